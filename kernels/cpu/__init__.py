"""CPU device code."""
