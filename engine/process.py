"""The engine process from start to exit code: load the model, then listen, serve, and leave when told to."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import sys
import threading
import time
from types import FrameType

from engine.carriers.curve import CurveKeys
from engine.carriers.port import ServerCarrier
from engine.carriers.zeromq_server import ZeroMQServer
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import ConfigError, ModelLoadError
from engine.garbage import collect_less_often
from engine.lifecycle import watch_pipe
from engine.messages import Ready
from engine.openmp import limit_spinning
from engine.recording.recorder import RecordingCore
from engine.runner.port import Runner
from engine.sched.registry import cost_model
from engine.server import Core, EngineServer

logger = logging.getLogger(__name__)

EXIT_FAILED = os.EX_SOFTWARE
EXIT_CONFIG = os.EX_CONFIG
"""The supervisor need not try again: nothing changes until somebody changes a setting or a file."""

LEAVE_WITHIN_S = 30.0
"""A process whose supervisor is gone, and that is stuck in a step, ends itself after so long."""


def run_engine(
    config: EngineConfig, endpoint: str, *, curve: CurveKeys | None = None, supervisor_fd: int | None = None
) -> int:
    """Run one engine in this process's main thread; returns the process's exit code.

    SIGTERM, or the end of the supervisor's pipe, stops it in order (0), and so does SIGINT when there is no supervisor
    to obey; a failed core ends it with 70 after every client has been told; a model or setting that cannot work is one
    line on stderr and 78, before anything listens.
    """
    # Imported here: the gateway and the command line import this package without torch.
    limit_spinning()
    from engine.runner.model_runner import build_runner

    if supervisor_fd is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the supervisor, which drains first
    obey(supervisor_fd)
    try:
        carrier = ZeroMQServer(endpoint, curve=curve)
        loaded = build_runner(config)
        runner: Runner = loaded.runner
        with contextlib.ExitStack() as stack:
            stack.callback(runner.close)
            core = _make_core(
                config,
                runner,
                max_model_len=loaded.max_model_len,
                eos_token_ids=loaded.model_config.eos_token_ids,
                stack=stack,
            )
            card = Ready(
                engine_id=config.engine_id,
                model=config.model_name,
                max_model_len=loaded.max_model_len,
                vocab_size=runner.vocab_size,
                eos_token_ids=loaded.model_config.eos_token_ids,
                kv_capacity_tokens=core.kv_capacity_tokens,
                max_sequences=config.max_sequences,
                incarnation=new_incarnation(),
            )
            collect_less_often()
            return serve(core, carrier, card)
    except (ConfigError, ModelLoadError) as e:
        sys.stderr.write(f"evenhand engine: {e}\n")
        return EXIT_CONFIG


def serve(core: Core, carrier: ServerCarrier, card: Ready) -> int:
    """Serve until SIGTERM, or SIGINT unless it is ignored; returns the exit code.

    Raises `ConfigError` if the carrier cannot listen.
    """
    server = EngineServer(core, carrier, card)

    def stop(_signal: int, _frame: FrameType | None) -> None:
        server.stop()

    signal.signal(signal.SIGTERM, stop)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, stop)
    logger.info("engine %s serves %s", card.engine_id, card.model)
    return os.EX_OK if server.run() else EXIT_FAILED


def new_incarnation() -> str:
    """A word that tells this run of an engine from its earlier and later ones."""
    return secrets.token_hex(8)


def obey(supervisor_fd: int | None) -> None:
    """Leave when the supervisor does: in order if the main thread can, by force if it cannot."""
    if supervisor_fd is None:
        return

    def leave() -> None:
        # Before the server is there this ends the process at once; nothing is in flight yet.
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(LEAVE_WITHIN_S)
        os._exit(EXIT_FAILED)

    watch_pipe(supervisor_fd, leave)


def _make_core(
    config: EngineConfig,
    runner: Runner,
    *,
    max_model_len: int,
    eos_token_ids: tuple[int, ...],
    stack: contextlib.ExitStack,
) -> EngineCore | RecordingCore:
    cost = cost_model(config)
    if config.record is None:
        return EngineCore(
            config, runner, max_model_len=max_model_len, eos_token_ids=eos_token_ids, clock=_now_us, cost=cost
        )
    core = RecordingCore(
        config,
        runner,
        path=config.record,
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        clock=_now_us,
        cost=cost,
    )
    stack.callback(core.close)
    logger.warning("engine %s records all prompts and plans to %s", config.engine_id, config.record)
    return core


def _now_us() -> int:
    return time.monotonic_ns() // 1000
