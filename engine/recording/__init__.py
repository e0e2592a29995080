"""Recordings of an engine: what it was told, read, planned and got, in a file from which its plans come out again."""
