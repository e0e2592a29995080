"""No raw key or token, nor its secret part, is anywhere but with its holder: logs, tables, files, answers, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import asyncpg
import httpx
import pytest
from cluster import MODEL, SharedCluster
from evenhand_process import wait_until
from identity_kit import with_other_secret

from gateway.domain.credential import API_KEY, hide_credentials, issue

pytestmark = pytest.mark.slow


class Request(NamedTuple):
    method: str
    path: str
    headers: dict[str, str] | None = None
    json: object = None
    content: bytes | None = None


def chat(model: str, text: str = "hi") -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 2}


def requests(good: str, token: str, *others: str) -> Iterator[Request]:
    """Right and wrong ways to use a key, and places where people paste one."""
    for key in (good, token, *others, good[:-1], f"{good} x"):
        for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}, {"authorization": key}):
            yield Request("POST", "/v1/chat/completions", headers=headers, json=chat(MODEL))
            yield Request("GET", "/admin/api/keys", headers=headers)
    mine = {"authorization": f"Bearer {good}"}
    admin = {"authorization": f"Bearer {token}"}
    yield Request("POST", f"/v1/chat/completions?api_key={good}", json=chat(MODEL))
    yield Request("POST", "/v1/chat/completions", headers=mine, json=chat(good))
    yield Request("POST", "/v1/chat/completions", headers=mine, json=chat("x" * 150 + good))
    yield Request("POST", "/v1/chat/completions", headers=mine, json={**chat(MODEL), "user": good, good: 1})
    yield Request("POST", "/v1/chat/completions", headers=mine, json={**chat(MODEL), "logit_bias": {good: "x"}})
    yield Request("POST", "/v1/chat/completions", headers=mine, json={**chat(MODEL), "tool_choice": good})
    yield Request("POST", "/v1/chat/completions", headers=mine, content=good.encode())
    yield Request("POST", "/v1/chat/completions", headers={**mine, "x-client-request-id": good}, json=chat(MODEL))
    yield Request("POST", "/v1/chat/completions", headers={**mine, "x-evenhand-class": good}, json=chat(MODEL))
    yield Request("GET", f"/v1/models/{good}", headers=mine)
    yield Request("GET", f"/v1/{good}", headers=mine)
    yield Request("GET", f"/v1/usage?from={good}", headers=mine)
    yield Request("POST", "/admin/api/organizations", headers=admin, json={"name": good})
    yield Request("POST", "/admin/api/organizations", headers=admin, json={"name": f"of {token}", good: 1})
    yield Request("POST", "/admin/api/aliases", headers=admin, json={"name": good, "model": MODEL})
    yield Request(
        "POST", "/admin/api/aliases", headers=admin, json={"name": "a", "model": MODEL, "system_default": f"Say {good}"}
    )
    yield Request("GET", f"/admin/api/keys/{good}", headers=admin)
    yield Request("GET", f"/admin/api/keys?after={good}", headers=admin)
    yield Request("GET", f"/admin/{token}", headers=admin)


def test_no_key_is_anywhere(shared_cluster: SharedCluster) -> None:
    cluster = shared_cluster
    good, revoked = cluster.new_key("acme", "blue", "good"), cluster.new_key("acme", "blue", "revoked")
    token = cluster.command("admin-token", "create", "--name", "scan")
    unknown, _ = issue(API_KEY)
    raws = (good, token, revoked, unknown, with_other_secret(good), with_other_secret(token))
    listed = cluster.command("key", "list", "--org", "acme", "--team", "blue")
    (revoked_line,) = [line for line in listed.splitlines() if revoked.split("_")[1] in line]
    (revoked_id,) = [word for word in revoked_line.split() if word.startswith("key_")]
    cluster.command("key", "revoke", revoked_id)
    seen = [listed]
    statuses = set()
    for gateway in cluster.gateways:
        with httpx.Client(base_url=gateway.url, timeout=30) as client:
            for request in requests(*raws):
                answer = client.request(
                    request.method, request.path, headers=request.headers, json=request.json, content=request.content
                )
                statuses.add(answer.status_code)
                seen.append(f"{answer.headers}\n{answer.text}")
        seen.append(httpx.get(f"http://127.0.0.1:{gateway.metrics_port}/metrics").text)
    wait_until(lambda: "clean" in cluster.command("ledger", "verify"))
    seen += [member.log for member in cluster.members]
    seen += [path.read_bytes().decode("latin-1") for path in files(cluster.home)]
    seen += asyncio.run(tables(cluster.database_url))

    assert {200, 400, 401, 404} <= statuses
    assert not statuses & {500, 502}
    for raw in raws:
        secret = raw.split("_")[2]
        assert [text[:300] for text in seen if secret[:20] in text] == []
    assert hide_credentials(f"a {good} b") == "a [redacted] b"
    lines = [line for gateway in cluster.gateways for line in gateway.log.splitlines()]
    assert [line for line in lines if "[redacted]" in line] == [], "redaction is for what nobody thought of"


def files(home: Path) -> Iterator[Path]:
    """All that the hub keeps, but for the models."""
    for path in home.iterdir():
        if path.name != "models":
            yield from [path] if path.is_file() else (each for each in path.rglob("*") if each.is_file())


async def tables(database_url: str) -> list[str]:
    """Every row of every table as text, bytes as they are and as digits."""
    connection = await asyncpg.connect(database_url)
    try:
        names = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        found = []
        for name in names:
            rows = await connection.fetch(f'SELECT t::text AS row FROM "{name[0]}" t')  # noqa: S608 - a table of ours
            found += [row["row"] for row in rows]
            found += [bytes.fromhex(part).decode("latin-1") for row in rows for part in hex_parts(row["row"])]
        return found
    finally:
        await connection.close()


def hex_parts(row: str) -> Iterator[str]:
    for part in row.split("\\x")[1:]:
        digits = "".join(c for c in part.split('"')[0] if c in "0123456789abcdef")
        yield digits[: len(digits) // 2 * 2]
