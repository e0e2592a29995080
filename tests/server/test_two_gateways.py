"""What holds on both of two gateway processes, and on one with SQLite: who gets in, what they see, who is shut out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from cluster import MODEL, Cluster, Gateway, SharedCluster, running_alone
from evenhand_process import wait_until

EXPIRY_S = 5
BOUND_S = 2.0
"""What is promised for a change to be known everywhere."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def one_on_sqlite(
    tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, free_port: Callable[[], int]
) -> Iterator[Cluster]:
    """A gateway on a SQLite file, without Redis: it finds out by asking what the command line has changed."""
    with running_alone(tmp_path_factory.mktemp("one"), smollm2_path.parents[1], free_port) as cluster:
        cluster.command("org", "create", "acme")
        cluster.command("team", "create", "--org", "acme", "--weight", "2", "blue")
        yield cluster


@pytest.fixture(params=["postgresql and redis", "sqlite"])
def pair(request: pytest.FixtureRequest) -> Cluster:
    name = {"postgresql and redis": "shared_cluster", "sqlite": "one_on_sqlite"}[request.param]
    cluster: Cluster = request.getfixturevalue(name)
    return cluster


@pytest.fixture
def tenants(pair: Cluster, request: pytest.FixtureRequest) -> tuple[str, str]:
    """An organization with one team, for a test that disables them."""
    organization = f"org of {abs(hash(request.node.nodeid))}"
    pair.command("org", "create", organization)
    pair.command("team", "create", "--org", organization, "--weight", "1", "crew")
    return organization, "crew"


def client_of(gateway: Gateway, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)


def ask(gateway: Gateway, key: str, model: str = MODEL) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers, timeout=20)


def test_two_keys_work_with_the_official_client_on_both(pair: Cluster) -> None:
    for key in (pair.new_key("acme", "blue", "one"), pair.new_key("acme", "blue", "two")):
        for gateway in pair.gateways:
            with client_of(gateway, key) as client:
                answer = client.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=3
                )
                usage = answer.usage
                assert usage is not None
                assert usage.completion_tokens == 3


def test_a_key_limited_to_one_name_sees_and_uses_only_that(pair: Cluster) -> None:
    pair.command("alias", "create", "gpt-4o-mini", "--model", MODEL)
    limited = pair.new_key("acme", "blue", "limited", "--model", "gpt-4o-mini")
    free = pair.new_key("acme", "blue", "free")
    try:
        for gateway in pair.gateways:
            wait_until(lambda gateway=gateway: ask(gateway, free, "gpt-4o-mini").status_code == 200, BOUND_S)
            with client_of(gateway, limited) as client:
                assert [model.id for model in client.models.list()] == ["gpt-4o-mini"]
                answer = client.chat.completions.create(
                    model="gpt-4o-mini", messages=[{"role": "user", "content": "hi"}], max_tokens=3
                )
                assert answer.model == "gpt-4o-mini"
                with pytest.raises(openai.NotFoundError) as refused:
                    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
                assert refused.value.code == "model_not_found"
                with pytest.raises(openai.NotFoundError):
                    client.models.retrieve(MODEL)
            with client_of(gateway, free) as client:
                assert {model.id for model in client.models.list()} == {"gpt-4o-mini", MODEL}
    finally:
        pair.command("alias", "remove", "gpt-4o-mini")


@pytest.mark.parametrize(
    ("what", "status", "code"),
    [
        ("revoked key", 401, "invalid_api_key"),
        ("expired key", 401, "invalid_api_key"),
        ("disabled team", 403, "team_disabled"),
        ("disabled organization", 403, "organization_disabled"),
    ],
)
def test_who_is_shut_out_is_refused_by_both_within_two_seconds(
    pair: Cluster, tenants: tuple[str, str], what: str, status: int, code: str
) -> None:
    organization, team = tenants
    options = ["--expires-in", f"{EXPIRY_S}s"] if what == "expired key" else []
    key = pair.new_key(organization, team, "victim", *options)
    made_at = time.monotonic()  # a little later than its expiry counts from
    for gateway in pair.gateways:
        assert ask(gateway, key).status_code == 200
    if what == "revoked key":
        listed = pair.command("key", "list", "--org", organization, "--team", team).splitlines()
        (key_id,) = [word for line in listed for word in line.split() if word.startswith("key_")]
        pair.command("key", "revoke", key_id)
    elif what == "disabled team":
        pair.command("team", "disable", "--org", organization, team)
    elif what == "disabled organization":
        pair.command("org", "disable", organization)
    changed_at = made_at + EXPIRY_S if what == "expired key" else time.monotonic()

    for gateway in pair.gateways:
        within_s = max(changed_at + BOUND_S - time.monotonic(), 0)
        wait_until(lambda gateway=gateway: ask(gateway, key).status_code != 200, within_s)
        refusal = ask(gateway, key)
        error = refusal.json()["error"]
        assert (refusal.status_code, error["code"]) == (status, code)
        assert set(error) == {"message", "type", "param", "code"}
    if what.startswith("disabled"):
        words = ["team", "enable", "--org", organization, team] if "team" in what else ["org", "enable", organization]
        pair.command(*words)
        for gateway in pair.gateways:
            wait_until(lambda gateway=gateway: ask(gateway, key).status_code == 200, BOUND_S)


def test_a_database_that_is_gone_lets_nobody_in_and_says_so(shared_cluster: SharedCluster) -> None:
    cluster = shared_cluster
    key = cluster.new_key("acme", "blue", "patient")
    gateway = cluster.gateways[0]
    assert ask(gateway, key).status_code == 200
    cluster.postgres.freeze()
    try:
        wait_until(lambda: ask(gateway, key).status_code == 503, 5)
        refusal = ask(gateway, key)
        assert refusal.json()["error"]["code"] == "storage_unavailable"
        assert refusal.headers["retry-after"]
        wait_until(lambda: not gateway.is_ready(), 5)
    finally:
        cluster.postgres.thaw()
    wait_until(lambda: ask(gateway, key).status_code == 200, 10)
    wait_until(gateway.is_ready, 10)


def test_a_second_gateway_on_sqlite_is_refused(
    one_on_sqlite: Cluster, free_port: Callable[[], int], tmp_path: Path
) -> None:
    second = Gateway("second", free_port(), free_port(), one_on_sqlite.environment, tmp_path)
    try:
        second.start()

        assert second.wait(30) == 78
        assert "several need database.url (PostgreSQL) and redis.url" in second.log
    finally:
        second.close()
