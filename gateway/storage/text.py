"""The one type of text columns: any length, compared byte by byte, without NUL."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Dialect, Text
from sqlalchemy.dialects.postgresql import TEXT
from sqlalchemy.types import TypeDecorator, TypeEngine


class PlainText(TypeDecorator[str]):
    """Text that sorts and compares by its bytes in both databases, whatever language a PostgreSQL was set up with, so
    that pages come in the same order everywhere.

    Writing text with a NUL raises `ValueError` (within SQLAlchemy's `StatementError`): PostgreSQL has no such text.
    """

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        # Not `dialect.type_descriptor`: the driver's own text type would make the column a VARCHAR.
        return TEXT(collation="C") if dialect.name == "postgresql" else Text()

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002 - SQLAlchemy's names
        if value is not None and "\0" in value:
            raise ValueError("text with a NUL cannot be kept")
        return value
