"""Device code and its oracles. Imports torch and triton only; open `dispatch.py` first."""
