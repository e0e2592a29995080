"""The planner: which request gets how many tokens in the next step. Pure Python, no torch."""
