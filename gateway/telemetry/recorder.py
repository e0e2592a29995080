"""The recorder in use: one log line and the metrics for every settled request. Never text, never a key."""

from __future__ import annotations

import structlog

from gateway.domain.ledger import Opening
from gateway.domain.record import RequestRecord
from gateway.services.ports import Running
from gateway.telemetry.metrics import GatewayMetrics


class TelemetryRecorder:
    """Implements `gateway.services.ports.Recorder`."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._log = structlog.get_logger()

    def opened(self, opening: Opening, running: Running) -> None:
        """Nothing is told before the end."""

    def settled(self, record: RequestRecord) -> None:
        info, usage = record.info, record.usage
        self._metrics.observe(record)
        self._log.info(
            "request.finished",
            request_id=info.request_id,
            organization=info.principal.organization,
            team=info.principal.team,
            key_id=info.principal.key_id,
            request_class=info.request_class,
            endpoint=info.endpoint,
            stream=info.stream,
            model=record.opening.model,
            outcome=record.outcome,
            finish_reason=record.finish_reason,
            error_code=record.error_code,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            queue_ms=None if record.timings is None else round(record.timings.queue_us / 1e3, 2),
            ttft_ms=None if record.first_delta_s is None else round(record.first_delta_s * 1e3, 2),
            total_ms=round(record.total_s * 1e3, 2),
        )
