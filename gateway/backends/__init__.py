"""Backends: what stands behind the gateway. The only gateway code (beside the command line) that imports engine."""
