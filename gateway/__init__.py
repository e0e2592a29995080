"""The tenant-aware gateway: HTTP in, engine tokens out."""

__version__ = "0.1.0"
