"""Append-only files that every request is put on record in before it is answered, and again when it is settled."""
