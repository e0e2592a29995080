"""Where organizations, keys, the ledger and the audit are kept: SQLAlchemy over SQLite or PostgreSQL, Redis for news.

Implements `gateway.services.stores`. Holds no rules and knows nothing of HTTP or engines.
"""
