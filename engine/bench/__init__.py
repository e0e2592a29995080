"""Benchmarks that run the engine itself: `evenhand bench ...`."""
