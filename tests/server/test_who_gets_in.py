"""Over HTTP, through proxies and without: from where a key works, and what somebody is told who tries out keys."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from databases import RedisServer
from evenhand_process import wait_until
from identity_kit import new_key
from scripted_server import KEY, ScriptedServer, chat_body, running_server

RATE = 5


def ask(server: ScriptedServer, *forwarded: str, key: str = KEY) -> httpx.Response:
    """With one ``x-forwarded-for`` for each of `forwarded`."""
    headers = [("authorization", f"Bearer {key}"), *(("x-forwarded-for", value) for value in forwarded)]
    return httpx.post(f"{server.url}/v1/chat/completions", json=chat_body("hello"), headers=headers, timeout=30)


def told(answer: httpx.Response) -> tuple[int, str | None]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return answer.status_code, error["code"]


NOT_FROM_THERE = (403, "network_not_allowed")

# Networks


@pytest.fixture(scope="module")
def behind_proxies(free_port: Callable[[], int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    """Its proxies are this machine and 10.0.0.0/8; its key is for an office."""
    door = {"networks": ["203.0.113.0/24", "2001:db8:1::/48"]}
    folder = tmp_path_factory.mktemp("proxied")
    with running_server(free_port(), folder, door=door, trusted_proxies=["127.0.0.0/8", "10.0.0.0/8"]) as server:
        yield server


@pytest.mark.parametrize(
    "forwarded",
    [
        ["203.0.113.9"],
        ["203.0.113.9:4711"],
        ["198.51.100.1, 203.0.113.9"],
        ["198.51.100.1, 203.0.113.9, 10.1.2.3"],
        ["198.51.100.1", "203.0.113.9", "10.1.2.3"],
        ["::ffff:203.0.113.9"],
        ["2001:db8:1::77"],
        ["[2001:db8:1::77]:4711"],
    ],
)
def test_a_key_works_for_whom_a_trusted_proxy_names(behind_proxies: ScriptedServer, forwarded: list[str]) -> None:
    assert ask(behind_proxies, *forwarded).status_code == 200


@pytest.mark.parametrize(
    "forwarded",
    [
        [],
        ["198.51.100.1"],
        ["203.0.113.9, 198.51.100.1"],
        ["203.0.113.9", "198.51.100.1"],
        ["203.0.113.9, unknown"],
        ["unknown"],
        ["2001:db8:2::77"],
        ["10.1.2.3"],
    ],
    ids=["the proxy itself", "elsewhere", "pretended", "pretended in a header of its own", "hidden behind one",
         "hidden", "elsewhere, IPv6", "another proxy"],
)  # fmt: skip
def test_a_key_works_for_nobody_else_behind_a_proxy(behind_proxies: ScriptedServer, forwarded: list[str]) -> None:
    answer = ask(behind_proxies, *forwarded)

    assert told(answer) == NOT_FROM_THERE
    assert "203.0.113" not in answer.text
    assert "2001:db8" not in answer.text


def test_networks_hold_for_every_route(behind_proxies: ScriptedServer) -> None:
    for path in ("/v1/models", "/models", "/v1/models/hello"):
        headers = behind_proxies.headers
        outside = httpx.get(behind_proxies.url + path, headers=headers | {"x-forwarded-for": "198.51.100.1"})
        inside = httpx.get(behind_proxies.url + path, headers=headers | {"x-forwarded-for": "203.0.113.9"})
        assert told(outside) == NOT_FROM_THERE
        assert inside.status_code == 200


def test_the_official_client_says_what_is_wrong(behind_proxies: ScriptedServer) -> None:
    with openai.OpenAI(base_url=f"{behind_proxies.url}/v1", api_key=KEY, max_retries=0) as client:
        with pytest.raises(openai.PermissionDeniedError) as refused:
            client.models.list()
        assert refused.value.code == "network_not_allowed"


@pytest.mark.parametrize(
    ("networks", "expected"),
    [
        (["127.0.0.0/8"], 200),
        (["::ffff:127.0.0.1"], 200),
        (["203.0.113.0/24"], 403),
        ([], 403),
    ],
)
def test_without_trusted_proxies_the_other_end_of_the_connection_counts(
    free_port: Callable[[], int], tmp_path: Path, networks: list[str], expected: int
) -> None:
    with running_server(free_port(), tmp_path, door={"networks": networks}) as server:
        assert ask(server).status_code == expected
        assert ask(server, "203.0.113.9").status_code == expected


def test_an_ipv4_client_of_an_ipv6_socket_is_that_ipv4_client(free_port: Callable[[], int], tmp_path: Path) -> None:
    if not _has_ipv6():
        pytest.fail("this machine has no IPv6 loopback, which these tests need")
    with running_server(free_port(), tmp_path, door={"networks": ["127.0.0.1/32"]}, host="::") as server:
        assert ask(server).status_code == 200
        over_ipv6 = httpx.get(f"http://[::1]:{server.port}/v1/models", headers=server.headers)
        assert told(over_ipv6) == NOT_FROM_THERE


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


# Wrong keys


@pytest.fixture
def guarded(free_port: Callable[[], int], tmp_path: Path) -> Iterator[ScriptedServer]:
    door = {"failed_keys": f"{RATE}/hour"}
    with running_server(free_port(), tmp_path, door=door, trusted_proxies=["127.0.0.1"]) as server:
        yield server


def test_who_tries_out_keys_is_told_to_wait_and_the_right_key_works_all_the_same(guarded: ScriptedServer) -> None:
    for _ in range(RATE):
        assert told(ask(guarded, "203.0.113.9", key=new_key())) == (401, "invalid_api_key")
    refused = ask(guarded, "203.0.113.9", key=new_key())

    assert told(refused) == (429, "too_many_attempts")
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(refused.headers["retry-after"]) <= 3600
    assert int(refused.headers["retry-after-ms"]) == 1000 * int(refused.headers["retry-after"])
    assert "www-authenticate" not in refused.headers
    assert ask(guarded, "203.0.113.9").status_code == 200
    assert told(ask(guarded, "203.0.113.10", key=new_key())) == (401, "invalid_api_key")


def test_it_is_in_the_log_with_the_address_and_without_the_key(guarded: ScriptedServer) -> None:
    keys = [new_key() for _ in range(RATE + 1)]
    for key in keys:
        ask(guarded, "2001:db8:1:2::77", key=key)
    wait_until(lambda: len([line for line in guarded.log_lines() if line["event"] == "request.refused"]) > RATE)

    *_, line = [line for line in guarded.log_lines() if line["event"] == "request.refused"]
    assert (line["status"], line["code"], line["client"]) == (429, "too_many_attempts", "2001:db8:1:2::77")
    assert not any(key[16:] in guarded.log_file.read_text() for key in keys)


def test_two_servers_count_together_and_go_on_when_redis_is_gone(free_port: Callable[[], int], tmp_path: Path) -> None:
    redis = RedisServer(tmp_path / "redis", free_port())
    redis.start()
    door = {"failed_keys": f"{RATE}/hour", "redis_url": redis.url}
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    try:
        with (
            running_server(free_port(), folders[0], door=door) as one,
            running_server(free_port(), folders[1], door=door) as two,
        ):
            for number in range(RATE):
                assert ask((one, two)[number % 2], key=new_key()).status_code == 401
            assert [ask(server, key=new_key()).status_code for server in (one, two)] == [429, 429]

            redis.kill()
            assert [ask(server).status_code for server in (one, two)] == [200, 200]
            for server in (one, two):  # each counts for itself now, from nothing
                answers = [ask(server, key="sk-nonsense") for _ in range(RATE + 1)]
                assert [answer.status_code for answer in answers] == [401] * RATE + [429]
                assert max(answer.elapsed.total_seconds() for answer in answers) < 1
                assert any("counts for itself" in line["event"] for line in server.log_lines())
    finally:
        redis.stop()
