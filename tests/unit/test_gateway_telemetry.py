"""Logs without secrets, metrics with bounded labels, and the port they are read from."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import structlog

from gateway.domain.ids import RequestId
from gateway.domain.record import RequestInfo, RequestRecord
from gateway.domain.usage import EngineTimings, TokenUsage
from gateway.errors import InvalidKey
from gateway.services.authenticate import BOOTSTRAP, Authenticator, SingleKeyStore
from gateway.telemetry.logging import configure_logging
from gateway.telemetry.metrics import GatewayMetrics, metrics_server
from gateway.telemetry.recorder import TelemetryRecorder

RECORD = RequestRecord(
    info=RequestInfo(
        request_id=RequestId("req_1"), principal=BOOTSTRAP, request_class="interactive", endpoint="chat", stream=True
    ),
    model="m",
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
        "team": "default",
        "key_id": "bootstrap",
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


def test_one_key_is_known_and_no_other() -> None:
    authenticator = Authenticator(SingleKeyStore.for_key("eh_right"))

    assert authenticator.authenticate([(b"authorization", b"bearer eh_right")]) == BOOTSTRAP
    assert authenticator.authenticate([(b"host", b"x"), (b"x-api-key", b" eh_right ")]) == BOOTSTRAP
    both = [(b"authorization", b"Basic eh_x"), (b"x-api-key", b"eh_right")]
    assert authenticator.authenticate(both) == BOOTSTRAP
    for headers in (
        [],
        [(b"authorization", b"Bearer eh_wrong")],
        [(b"x-api-key", b"")],
        [(b"authorization", b"eh_right")],
    ):
        with pytest.raises(InvalidKey) as raised:
            authenticator.authenticate(headers)
        assert "eh_wrong" not in str(raised.value)
        assert "eh_right" not in str(raised.value)


def test_the_key_store_never_sees_the_key() -> None:
    seen: list[bytes] = []

    class Store:
        def find(self, digest: bytes) -> None:
            seen.append(digest)

    with pytest.raises(InvalidKey):
        Authenticator(Store()).authenticate([(b"x-api-key", b"eh_secret")])

    assert len(seen[0]) == 32
    assert b"secret" not in seen[0]
