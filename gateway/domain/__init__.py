"""Pure domain values: standard library and msgspec only."""
