"""Gateways, an engine, PostgreSQL and Redis, all of them real processes that a test may kill.

The gateways share a home, as on one machine: when one dies, the other one settles what it left. The engine has no model
(`scripted_engine_program`, or one of one's choice); everything in front of it is what is shipped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
from databases import PostgresServer, RedisServer
from evenhand_process import wait_until
from scripted_engine_program import MODEL

SCRIPTED_ENGINE = Path(__file__).with_name("scripted_engine_program.py")
FAIR_ENGINE = Path(__file__).with_name("fair_engine_program.py")
ENDS_ENGINE = Path(__file__).with_name("ends_engine_program.py")
SHIPPED = (sys.executable, "-m", "gateway.cli", "gateway")
START_S = 60.0


class Member:
    """One process of the cluster: it can be killed, stopped and started again."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str], folder: Path) -> None:
        self.name = name
        self.log_path = folder / f"{name}.log"
        self._command = command
        self._environment = environment
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, within_s: float = 60.0) -> int:
        assert self.process is not None
        return self.process.wait(within_s)

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.wait()

    def close(self) -> None:
        if self.is_running:
            self.kill()

    @property
    def log(self) -> str:
        return self.log_path.read_text()


class Gateway(Member):
    """A gateway of the cluster and its address."""

    def __init__(
        self,
        name: str,
        port: int,
        metrics_port: int,
        environment: dict[str, str],
        folder: Path,
        command: Sequence[str] = SHIPPED,
    ) -> None:
        super().__init__(
            name,
            command,
            environment | {"EVENHAND_SERVER__PORT": str(port), "EVENHAND_SERVER__METRICS_PORT": str(metrics_port)},
            folder,
        )
        self.port = port
        self.metrics_port = metrics_port
        self.url = f"http://127.0.0.1:{port}"

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.log
            return self.is_ready()

        wait_until(ready, START_S)


class Cluster:
    """Gateways and an engine that belong together.

    Args:
        engine: its program, and the argument after the endpoint.
        gateway: the command of a gateway, if it is not the one that is shipped.

    Attributes:
        environment: what ``evenhand`` needs to work on the same hub.
        endpoint: of the engine.
    """

    def __init__(
        self,
        folder: Path,
        models: Path,
        free_port: Callable[[], int],
        *,
        num_gateways: int,
        engine: tuple[Path, str],
        settings: dict[str, str],
        gateway: Sequence[str] = SHIPPED,
    ) -> None:
        self.home = folder / "home"
        self.home.mkdir()
        (self.home / "models").symlink_to(models)
        endpoint = f"ipc://{self.home / 'run' / 'engine.sock'}"
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("EVENHAND_")} | {
            "EVENHAND_HOME": str(self.home),
            "EVENHAND_ENGINE__ENDPOINT": endpoint,
            **settings,
        }
        self.endpoint = endpoint
        program, argument = engine
        self.engine = Member("engine", [sys.executable, str(program), endpoint, argument], self.environment, folder)
        self.gateways = [
            Gateway(f"gateway-{i}", free_port(), free_port(), self.environment, folder, gateway)
            for i in range(num_gateways)
        ]

    @property
    def members(self) -> list[Member]:
        return [self.engine, *self.gateways]

    def start(self) -> None:
        self.command("migrate")
        for member in self.members:
            member.start()
        for gateway in self.gateways:
            gateway.wait_ready()

    def command(self, *arguments: str, expect: int = 0) -> str:
        """Run ``evenhand`` with these arguments; what it said on stdout."""
        done = subprocess.run(
            [sys.executable, "-m", "gateway.cli", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == expect, (
            f"evenhand {' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done.stdout.strip()

    def new_key(self, organization: str, team: str, name: str = "test", *options: str) -> str:
        return self.command("key", "create", "--org", organization, "--team", team, "--name", name, *options)

    def close(self) -> None:
        for member in self.members:
            member.close()


class SharedCluster(Cluster):
    """A cluster on PostgreSQL and Redis of its own, so that these may be killed, too."""

    postgres: PostgresServer
    redis: RedisServer
    database_url: str


@contextlib.contextmanager
def running_cluster(
    folder: Path,
    models: Path,
    free_port: Callable[[], int],
    *,
    step_ms: float = 2.0,
    engine: tuple[Path, str] | None = None,
    settings: dict[str, str] | None = None,
    gateway: Sequence[str] = SHIPPED,
    redis_keeps_data: bool = False,
) -> Iterator[SharedCluster]:
    """Two gateways on PostgreSQL and Redis."""
    with contextlib.ExitStack() as stack:
        postgres = PostgresServer(folder / "postgres", free_port())
        postgres.start()
        stack.callback(postgres.stop)
        redis = RedisServer(folder / "redis", free_port(), keeps_data=redis_keeps_data)
        redis.start()
        stack.callback(redis.stop)
        database_url = postgres.new_database()
        services = {"EVENHAND_DATABASE__URL": database_url, "EVENHAND_REDIS__URL": redis.url}
        cluster = SharedCluster(
            folder,
            models,
            free_port,
            num_gateways=2,
            engine=engine or (SCRIPTED_ENGINE, str(step_ms)),
            settings=services | (settings or {}),
            gateway=gateway,
        )
        cluster.postgres, cluster.redis, cluster.database_url = postgres, redis, database_url
        stack.callback(cluster.close)
        cluster.start()
        yield cluster


@contextlib.contextmanager
def running_alone(
    folder: Path,
    models: Path,
    free_port: Callable[[], int],
    *,
    step_ms: float = 2.0,
    engine: tuple[Path, str] | None = None,
    settings: dict[str, str] | None = None,
) -> Iterator[Cluster]:
    """One gateway, on SQLite."""
    engine = engine or (SCRIPTED_ENGINE, str(step_ms))
    cluster = Cluster(folder, models, free_port, num_gateways=1, engine=engine, settings=settings or {})
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


__all__ = [
    "ENDS_ENGINE",
    "FAIR_ENGINE",
    "MODEL",
    "Cluster",
    "Gateway",
    "Member",
    "SharedCluster",
    "running_alone",
    "running_cluster",
]
