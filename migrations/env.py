"""Alembic's entry. `gateway.storage.schema` hands over a connection that is in a transaction already, and locked."""

from __future__ import annotations

from alembic import context

from gateway.storage.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,  # SQLite alters hardly anything; the table is made anew instead
)
context.run_migrations()
