"""The simulator: the engine's own planner on a clock that is only counted."""
