"""Use cases: one request from admission to settlement, over Protocol ports."""
