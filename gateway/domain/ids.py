"""Typed ids. Knows nothing of where they are stored."""

from __future__ import annotations

import secrets
from typing import NewType

RequestId = NewType("RequestId", str)

REQUEST_PREFIX = "req_"


def new_request_id() -> RequestId:
    return RequestId(REQUEST_PREFIX + secrets.token_hex(16))
