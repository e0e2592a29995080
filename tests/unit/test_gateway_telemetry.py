"""Logs without secrets, metrics with bounded labels, and the port they are read from."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
import structlog
from identity_kit import PRINCIPAL

import gateway.telemetry.metrics
from gateway.domain.ids import RequestId
from gateway.domain.ledger import Opening
from gateway.domain.record import RequestInfo, RequestRecord
from gateway.domain.usage import EngineTimings, TokenUsage
from gateway.telemetry.logging import configure_logging
from gateway.telemetry.metrics import EngineLoad, GatewayMetrics, metrics_server
from gateway.telemetry.recorder import TelemetryRecorder

RECORD = RequestRecord(
    info=RequestInfo(
        request_id=RequestId("req_1"), principal=PRINCIPAL, request_class="interactive", endpoint="chat", stream=True
    ),
    opening=Opening(
        request_id=RequestId("req_1"),
        opened_at_ms=1000,
        organization_id=PRINCIPAL.organization_id,
        team_id=PRINCIPAL.team_id,
        key_id=PRINCIPAL.key_id,
        model="m",
        requested_model="alias-of-m",
        endpoint="chat",
        stream=True,
        request_class="interactive",
        prompt_tokens=10,
    ),
    closed_at_ms=1500,
    outcome="finished",
    usage=TokenUsage(prompt_tokens=10, completion_tokens=4, cached_tokens=3),
    timings=EngineTimings(queue_us=2500),
    finish_reason="stop",
    error_code=None,
    first_delta_s=0.02,
    total_s=0.5,
    inter_token_s=(0.01, 0.02, 0.03),
)


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Where the lines go; the process's own set-up comes back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    stream = io.StringIO()
    configure_logging("info", stream)
    yield stream
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_line_of_json(log: io.StringIO) -> None:
    structlog.get_logger().info("request.finished", tokens=3, text_with="line\nbreak")

    [line] = lines(log)
    assert line["event"] == "request.finished"
    assert line["level"] == "info"
    assert line["tokens"] == 3
    assert line["timestamp"].endswith("Z")


def test_less_severe_events_are_left_out(log: io.StringIO) -> None:
    structlog.get_logger().debug("noise")

    assert log.getvalue() == ""


@pytest.mark.parametrize(
    "fields",
    [
        {"authorization": "hunter2-hunter2"},
        {"api_key": "hunter2-hunter2"},
        {"detail": "header was Bearer hunter2-hunter2"},
        {"detail": "the key eh_hunter2-hunter2 is bad"},
        {"detail": {"nested": ["sk-hunter2-hunter2"]}},
    ],
    ids=repr,
)
def test_secrets_are_blanked_by_name_and_by_shape(log: io.StringIO, fields: dict[str, Any]) -> None:
    structlog.get_logger().info("event", **fields)
    logging.getLogger("somebody.else").warning("saw %s", fields)

    assert len(lines(log)) == 2
    assert "hunter2" not in log.getvalue().splitlines()[0]
    assert "eh_hunter2" not in log.getvalue()
    assert "sk-hunter2" not in log.getvalue()


def test_an_exception_is_a_type_and_places_but_never_its_message(log: io.StringIO) -> None:
    try:
        int("the prompt")
    except ValueError:
        structlog.get_logger().exception("it.failed")
        logging.getLogger("somebody.else").exception("it failed there")

    for line in lines(log):
        assert line["error_type"] == "builtins.ValueError"
        assert any("test_gateway_telemetry.py" in place for place in line["error_at"])
    assert "the prompt" not in log.getvalue()


def test_libraries_speak_through_the_same_lines(log: io.StringIO) -> None:
    logging.getLogger("somebody.else").warning("careful")
    logging.getLogger("somebody.else").info("not worth a line")

    [line] = lines(log)
    assert (line["event"], line["level"], line["logger"]) == ("careful", "warning", "somebody.else")


def test_a_settled_request_is_one_line_and_its_counts(log: io.StringIO) -> None:
    metrics = GatewayMetrics(lambda: True)
    TelemetryRecorder(metrics).settled(RECORD)

    [line] = lines(log)
    expected = {
        "event": "request.finished",
        "request_id": "req_1",
        "team": "red",
        "key_id": "key_1",
        "model": "m",
        "outcome": "finished",
        "finish_reason": "stop",
        "prompt_tokens": 10,
        "cached_tokens": 3,
        "completion_tokens": 4,
        "queue_ms": 2.5,
        "ttft_ms": 20.0,
        "total_ms": 500.0,
    }
    assert expected.items() <= line.items()

    def sample(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    assert sample("evenhand_requests_total", model="m", outcome="finished") == 1
    assert sample("evenhand_prompt_tokens_total", model="m") == 10
    assert sample("evenhand_cached_tokens_total", model="m") == 3
    assert sample("evenhand_completion_tokens_total", model="m") == 4
    assert sample("evenhand_inter_token_seconds_count", model="m") == 3
    assert sample("evenhand_inter_token_seconds_sum", model="m") == pytest.approx(0.06)
    assert sample("evenhand_time_to_first_token_seconds_sum", model="m") == pytest.approx(0.02)
    assert sample("evenhand_queue_seconds_sum", model="m") == pytest.approx(0.0025)
    assert sample("evenhand_request_seconds_sum", model="m") == pytest.approx(0.5)


def test_tokens_and_requests_are_counted_by_team_up_to_a_number_of_teams() -> None:
    metrics = GatewayMetrics(lambda: True, max_teams=2)
    for team in ("red", "blue", "green", "red", "white"):
        principal = msgspec.structs.replace(PRINCIPAL, organization="acme", team=team)
        info = msgspec.structs.replace(RECORD.info, principal=principal)
        metrics.observe(msgspec.structs.replace(RECORD, info=info))

    def tokens(organization: str, team: str, kind: str) -> float | None:
        labels = {"organization": organization, "team": team, "kind": kind}
        return metrics.registry.get_sample_value("evenhand_team_tokens_total", labels)

    assert [tokens("acme", "red", kind) for kind in ("prompt", "cached", "completion")] == [20, 6, 8]
    assert tokens("acme", "blue", "prompt") == 10
    assert tokens("other", "other", "prompt") == 20
    assert tokens("acme", "green", "prompt") is None
    finished = {"organization": "other", "team": "other", "outcome": "finished"}
    assert metrics.registry.get_sample_value("evenhand_team_requests_total", finished) == 2


def test_a_name_in_a_label_is_cut() -> None:
    metrics = GatewayMetrics(lambda: True)
    principal = msgspec.structs.replace(PRINCIPAL, organization="o" * 1000, team="t" * 1000)
    metrics.observe(msgspec.structs.replace(RECORD, info=msgspec.structs.replace(RECORD.info, principal=principal)))

    labels = {"organization": "o" * 100, "team": "t" * 100, "outcome": "finished"}
    assert metrics.registry.get_sample_value("evenhand_team_requests_total", labels) == 1


async def test_the_engine_s_load_is_asked_for_as_long_as_the_gateway_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway.telemetry.metrics, "REFRESH_S", 0.01)
    load = EngineLoad(model="m", num_running=3, num_waiting=7, num_free_blocks=10, num_used_blocks=90)
    num_asked = 0
    told = asyncio.Event()

    async def ask() -> EngineLoad | None:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 3:
            told.set()  # what it was told the second time has been taken in
        return None if num_asked == 1 else load

    metrics = GatewayMetrics(lambda: num_asked > 1)
    value = metrics.registry.get_sample_value
    assert value("evenhand_engine_up") == 0
    async with asyncio.timeout(10), metrics.kept_fresh(ask):
        await told.wait()

    assert value("evenhand_engine_up") == 1
    assert value("evenhand_engine_running", {"model": "m"}) == 3
    assert value("evenhand_engine_waiting", {"model": "m"}) == 7
    assert value("evenhand_engine_kv_blocks", {"model": "m", "state": "used"}) == 90
    assert value("evenhand_engine_kv_blocks", {"model": "m", "state": "free"}) == 10


def test_metrics_are_served_on_a_port_of_their_own() -> None:
    metrics = GatewayMetrics(lambda: False)
    metrics.refused(404, None)
    metrics.refused(404, "model_not_found")
    with metrics_server(0, metrics.registry) as port:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text

    assert "evenhand_engine_up 0.0" in text
    assert 'evenhand_requests_refused_total{code="none",status="404"} 1.0' in text
    assert 'evenhand_requests_refused_total{code="model_not_found",status="404"} 1.0' in text
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/metrics")
