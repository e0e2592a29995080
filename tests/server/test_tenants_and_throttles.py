"""Two gateways on PostgreSQL and Redis: a file that is applied beside them, networks of keys, who is told to wait."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from cluster import MODEL, Gateway, SharedCluster, running_cluster
from evenhand_process import wait_until
from identity_kit import new_key

from gateway.domain.credential import ADMIN_TOKEN, issue

pytestmark = pytest.mark.slow

KEYS, TOKENS, CHANGES = 6, 4, 5
BOUND_S = 2.0
"""What is promised for a change to be known everywhere."""
OFFICE, ELSEWHERE = "203.0.113.9", "198.51.100.1"
FILE = f"""
[[organizations.acme.limits]]
kind = "concurrent"
amount = 50

[organizations.acme.teams.research]
weight = 3

[organizations.acme.teams.research.keys.agents]
networks = ["203.0.113.0/24"]

[organizations.acme.teams.support.keys.helpdesk]

[aliases.small]
model = "{MODEL}"
"""


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, free_port: Callable[[], int]
) -> Iterator[SharedCluster]:
    """Behind a proxy on this machine, so that a test can come from any address."""
    settings = {
        "EVENHAND_SERVER__TRUSTED_PROXIES": "127.0.0.1",
        "EVENHAND_THROTTLE__FAILED_KEYS": f"{KEYS}/hour",
        "EVENHAND_THROTTLE__FAILED_ADMIN_TOKENS": f"{TOKENS}/hour",
        "EVENHAND_THROTTLE__ADMIN_CHANGES": f"{CHANGES}/hour",
    }
    folder, models = tmp_path_factory.mktemp("tenants"), smollm2_path.parents[1]
    with running_cluster(folder, models, free_port, settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def keys(cluster: SharedCluster) -> dict[str, str]:
    """By name those that the file made."""
    return {line.split("\t")[2]: line.split("\t")[3] for line in apply(cluster, FILE).splitlines()}


def apply(cluster: SharedCluster, text: str, *options: str, expect: int = 0) -> str:
    file = cluster.home.parent / "tenants.toml"
    file.write_text(text)
    return cluster.command("apply", str(file), *options, expect=expect)


def ask(gateway: Gateway, key: str, address: str = OFFICE, model: str = MODEL) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    headers = {"authorization": f"Bearer {key}", "x-forwarded-for": address}
    return httpx.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers, timeout=20)


def told(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def everywhere(cluster: SharedCluster, holds: Callable[[Gateway], bool]) -> None:
    """At all gateways within the time that is promised."""
    for gateway in cluster.gateways:
        wait_until(lambda gateway=gateway: holds(gateway), BOUND_S)


# A file that is applied


def test_what_a_file_says_holds_at_all_gateways_within_two_seconds(
    cluster: SharedCluster, keys: dict[str, str]
) -> None:
    everywhere(cluster, lambda gateway: ask(gateway, keys["helpdesk"]).status_code == 200)
    everywhere(cluster, lambda gateway: ask(gateway, keys["helpdesk"], model="small").status_code == 200)

    apply(cluster, FILE.replace("[organizations.acme.teams.support.", "[organizations.acme.teams.support]\n"
                                "disabled = true\n[organizations.acme.teams.support."))  # fmt: skip
    everywhere(cluster, lambda gateway: ask(gateway, keys["helpdesk"]).status_code == 403)
    assert told(ask(cluster.gateways[0], keys["helpdesk"])) == (403, "team_disabled")

    apply(cluster, FILE + "[organizations.acme.teams.support]\ndisabled = false\n")
    everywhere(cluster, lambda gateway: ask(gateway, keys["helpdesk"]).status_code == 200)
    assert apply(cluster, FILE, "--dry-run") == ""


def test_networks_of_a_key_hold_at_all_gateways(cluster: SharedCluster, keys: dict[str, str]) -> None:
    everywhere(cluster, lambda gateway: ask(gateway, keys["agents"]).status_code == 200)
    for gateway in cluster.gateways:
        assert told(ask(gateway, keys["agents"], ELSEWHERE)) == (403, "network_not_allowed")
        assert told(ask(gateway, keys["agents"], f"{OFFICE}, {ELSEWHERE}")) == (403, "network_not_allowed")

    apply(cluster, FILE.replace("203.0.113.0/24", "198.51.100.0/24"))
    everywhere(cluster, lambda gateway: ask(gateway, keys["agents"]).status_code == 403)
    assert ask(cluster.gateways[0], keys["agents"], ELSEWHERE).status_code == 200
    apply(cluster, FILE)
    everywhere(cluster, lambda gateway: ask(gateway, keys["agents"]).status_code == 200)


# Throttles


def test_wrong_keys_are_counted_over_all_gateways_and_right_ones_work(
    cluster: SharedCluster, keys: dict[str, str]
) -> None:
    address = "192.0.2.1"
    everywhere(cluster, lambda gateway: ask(gateway, keys["helpdesk"], address).status_code == 200)
    for number in range(KEYS):
        assert told(ask(cluster.gateways[number % 2], new_key(), address)) == (401, "invalid_api_key")

    for gateway in cluster.gateways:
        refused = ask(gateway, new_key(), address)
        assert told(refused) == (429, "too_many_attempts")
        assert 1 <= int(refused.headers["retry-after"]) <= 3600
        assert ask(gateway, keys["helpdesk"], address).status_code == 200
        assert told(ask(gateway, new_key(), "192.0.2.2")) == (401, "invalid_api_key")


def test_a_change_of_anything_does_not_shut_out_a_key_that_worked(cluster: SharedCluster, keys: dict[str, str]) -> None:
    """Gateways forget at every change what they know of keys, and look them up again."""
    address = "192.0.2.3"
    everywhere(cluster, lambda gateway: ask(gateway, keys["helpdesk"], address).status_code == 200)
    for _ in range(KEYS):
        for gateway in cluster.gateways:
            ask(gateway, new_key(), address)
    apply(cluster, FILE.replace("weight = 3", "weight = 4"))

    for gateway in cluster.gateways:
        for _ in range(5):
            assert ask(gateway, keys["helpdesk"], address).status_code == 200
    apply(cluster, FILE)


def admin(gateway: Gateway, token: str, address: str, *, name: str | None = None) -> httpx.Response:
    headers = {"authorization": f"Bearer {token}", "x-forwarded-for": address}
    url = f"{gateway.url}/admin/api/organizations"
    if name is None:
        return httpx.get(url, headers=headers, timeout=20)
    return httpx.post(url, headers=headers, json={"name": name}, timeout=20)


def test_wrong_admin_tokens_and_changes_are_counted_over_all_gateways(cluster: SharedCluster) -> None:
    token, address = cluster.command("admin-token", "create"), "192.0.2.4"
    for gateway in cluster.gateways:
        assert admin(gateway, token, address).status_code == 200
    for number in range(TOKENS):
        assert admin(cluster.gateways[number % 2], issue(ADMIN_TOKEN)[0], address).status_code == 401
    for gateway in cluster.gateways:
        refused = admin(gateway, issue(ADMIN_TOKEN)[0], address)
        assert (refused.status_code, refused.json()["code"]) == (429, "too_many_attempts")
        assert admin(gateway, token, address).status_code == 200

    for number in range(CHANGES):
        assert admin(cluster.gateways[number % 2], token, address, name=f"org {number}").status_code == 201
    for gateway in cluster.gateways:
        refused = admin(gateway, token, address, name="one too many")
        assert (refused.status_code, refused.json()["code"]) == (429, "too_many_changes")
        assert admin(gateway, token, address).status_code == 200
    cluster.command("org", "create", "by command")


def metric(gateway: Gateway, name: str) -> float:
    text = httpx.get(f"http://127.0.0.1:{gateway.metrics_port}/metrics", timeout=5).text
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_without_redis_each_gateway_counts_for_itself_and_says_so(cluster: SharedCluster, keys: dict[str, str]) -> None:
    def refusals(gateway: Gateway, address: str) -> list[int]:
        answers = [ask(gateway, "eh_nonsense", address) for _ in range(KEYS + 2)]
        assert max(answer.elapsed.total_seconds() for answer in answers) < 2
        return [answer.status_code for answer in answers]

    everywhere(cluster, lambda gateway: ask(gateway, keys["helpdesk"]).status_code == 200)
    assert [metric(gateway, "evenhand_throttles_alone") for gateway in cluster.gateways] == [0, 0]
    cluster.redis.kill()
    try:
        for gateway in cluster.gateways:
            assert refusals(gateway, "192.0.2.5") == [401] * KEYS + [429] * 2
            # A good key is not shut out; it is its limits that cannot be checked.
            answer = ask(gateway, keys["helpdesk"], "192.0.2.5")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "limits_unavailable")
            wait_until(lambda gateway=gateway: metric(gateway, "evenhand_throttles_alone") == 1, 10)
            assert gateway.log.count("each process counts for itself") == 1
    finally:
        cluster.redis.start()

    number = itertools.count()

    def counts_together() -> bool:
        address = f"10.9.{next(number) % 250}.1"
        codes = [ask(cluster.gateways[turn % 2], "eh_nonsense", address).status_code for turn in range(KEYS + 1)]
        return codes == [401] * KEYS + [429]

    wait_until(counts_together, 30)
    for gateway in cluster.gateways:
        wait_until(lambda gateway=gateway: metric(gateway, "evenhand_throttles_alone") == 0, 10)
        assert "Redis counts for throttles again" in gateway.log
