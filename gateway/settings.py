"""Every setting there is: one frozen tree, read once at start and passed down.

`Settings(...)` reads nothing but its arguments, so a test can build any tree; `settings_sources` fills it from the file
and the environment. Knows nothing of what the values are for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    FilePath,
    IPvAnyNetwork,
    SecretStr,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

ENV_PREFIX = "EVENHAND_"


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


def _split(value: object) -> object:
    """Lists come as TOML arrays, or as text with commas."""
    if isinstance(value, str):
        return [part for part in (each.strip() for each in value.split(",")) if part]
    return value


_RATE = re.compile(
    r"\s*([0-9]{1,6})\s*(?:/|\s+per\s+)\s*([0-9]{1,3})?\s*(?:second|minute|hour|day)s?\s*", re.IGNORECASE
).fullmatch


def _rate(text: str) -> str:
    """What the library `limits` reads as one rate, with periods that make sense here; or off."""
    if text != "off":
        found = _RATE(text)
        if found is None:
            raise ValueError("must be a rate such as 30/minute, 5/second or 10 per 5 minutes, or off")
        if int(found[1]) == 0 or found[2] == "0":
            raise ValueError("must let something pass; to have no throttle, write off")
    return text


Rate = Annotated[str, AfterValidator(_rate)]
Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Networks = Annotated[tuple[IPvAnyNetwork, ...], NoDecode, BeforeValidator(_split)]
Port = Annotated[int, Field(ge=1, le=65535)]
AbsolutePath = Annotated[Path, AfterValidator(_absolute)]


class Section(BaseModel):
    """A section of the tree."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ServerSettings(Section):
    """The HTTP door."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on. `0.0.0.0` or `::` opens it to the network; use TLS or a proxy with TLS then."""

    port: Port = 8000
    """Port of the API."""

    workers: int = Field(default=1, ge=1, le=256)
    """Gateway worker processes of `evenhand serve`. More than one needs `database.url` (PostgreSQL) and `redis.url`:
    workers share keys, ledger and limits through them."""

    tls_cert: FilePath | None = None
    """PEM file with the certificate chain; goes together with `server.tls_key`."""

    tls_key: FilePath | None = None
    """PEM file with the certificate's private key."""

    metrics_port: Port = 9464
    """Port of the Prometheus metrics, always on 127.0.0.1. With several workers it has the sums over all of them."""

    metrics_teams: int = Field(default=200, ge=0)
    """Most teams that have metrics of their own; further ones are counted together as `other`."""

    max_body_bytes: ByteSize = Field(default=ByteSize(10 << 20), gt=0)
    """Largest request body; a larger one is refused with 413."""

    max_header_bytes: ByteSize = Field(default=ByteSize(32 << 10), ge=1024)
    """Most bytes of all request headers together; more are refused with 431. There may be 100 headers."""

    header_timeout_s: float = Field(default=10.0, ge=1)
    """Seconds that a connection may take until the headers of its next request are there, idle time included; then it
    is closed. Behind a proxy that keeps connections: more than the idle time-out of that, so that it is who closes."""

    body_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that a client has to send its request's body; then it is refused with 408."""

    trusted_proxies: Networks = ()
    """Addresses or networks, for example `10.0.0.0/8`, of proxies in front: what they say in `x-forwarded-for` is
    believed, for networks of keys, for throttles, for the audit and the logs. Anybody else's forwarded headers are
    ignored."""

    heartbeat_s: float = Field(default=10.0, gt=0)
    """Seconds between signs of life on a stream that waits for its next token."""

    drain_s: float = Field(default=30.0, ge=0)
    """Seconds that running requests get to finish after SIGINT or SIGTERM. A second signal cuts it short."""

    drain_notice_s: float = Field(default=0.0, ge=0)
    """Seconds that new requests are still taken after SIGINT or SIGTERM, while `/ready` says no already: as long as the
    load balancer in front takes to notice. 0 is right where there is none."""

    @model_validator(mode="after")
    def _tls_is_a_pair(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: set both or neither")
        if self.port == self.metrics_port:
            raise ValueError(f"port and metrics_port are both {self.port}")
        return self


class DatabaseSettings(Section):
    """Where organizations, keys and the ledger are kept."""

    url: SecretStr | None = None
    """Address of the database, for example `postgresql://user:password@host/evenhand`, or `sqlite:////folder/file`.
    Unset is a SQLite file, `evenhand.db`, in `EVENHAND_HOME`. Its tables are brought up to date at every start."""

    pool_size: int = Field(default=5, ge=1, le=100)
    """Connections that each process keeps to PostgreSQL at most."""


class RedisSettings(Section):
    """Where several gateway workers or hosts share their counters."""

    url: SecretStr | None = None
    """Address of Redis, for example `redis://:password@host:6379/0`. Processes tell each other through it of revoked
    keys and other changes at once; without it each one finds out within a second or two by asking the database."""


class LimitSettings(Section):
    """How limits and quotas are kept. What they are is set by administrators, with `evenhand limit` and others."""

    when_unavailable: Literal["refuse", "degrade"] = "refuse"
    """What becomes of requests that a limit holds for while Redis does not answer. `refuse` answers 503. `degrade` lets
    each process allow its share of rates, soft quotas and numbers of requests, by `limits.processes`; where a hard
    quota holds it still answers 503. Without `redis.url` limits are kept in the one process there is."""

    processes: int = Field(default=1, ge=1, le=10_000)
    """Gateway processes on all hosts together, for `limits.when_unavailable`: `server.workers` or more. More than there
    are is safe."""

    lease_s: float = Field(default=15.0, ge=1, le=3600)
    """Seconds after which what a request has reserved is settled by others, if its process is not heard of."""

    answer_s: float = Field(default=0.15, ge=0.01, le=10)
    """Seconds that Redis gets to answer, and to be connected to."""


class AuthSettings(Section):
    """How keys are kept."""

    peppers: SecretStr | None = None
    """Secrets that digests of keys are made with, as `ID:SECRET`, separated by commas; the first makes new ones, all
    are accepted. A secret has 32 bytes or more as hexadecimal digits. Every host needs the same. Unset is a file,
    `pepper.key`, in `EVENHAND_HOME`, made at first start. Whoever loses them has to make all keys anew."""


class ThrottleSettings(Section):
    """What comes too often is refused with 429 and `retry-after`. `off` lets everything pass."""

    failed_keys: Rate = "30/minute"
    """Wrong API keys that a network address may send, and different ones of them that are looked up for it. A right key
    is let in all the same, unless a process sees it for the first time just then. Of IPv6 a /64 counts as one address.
    Behind a proxy set `server.trusted_proxies`, else all its clients count as one. With `redis.url` all processes count
    together; a rate that is changed begins anew."""

    failed_admin_tokens: Rate = "10/minute"
    """The same of admin tokens."""

    admin_changes: Rate = "300/minute"
    """Requests to the admin API that are to change something, by token. Commands are not counted."""


class EngineSettings(Section):
    """The inference engine."""

    model: str = Field(default="smollm2-135m-instruct", min_length=1)
    """What is served: a name from the catalogue (`evenhand model fetch --help` lists it), a GGUF file, or a folder of
    safetensors with config.json and tokenizer.json."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model runs. `cuda` works from the release that brings GPU kernels; until then the engine refuses it."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Number format of weights and KV cache; `auto` is bfloat16, or float32 on a CPU that would have to emulate it."""

    policy: Literal["fair", "fcfs", "static"] = "fair"
    """Who gets the next tokens: `fair` goes by the weights of teams; `fcfs` is arrival order; `static` runs whole
    batches and exists for comparison only."""

    max_sequences: int = Field(default=64, ge=1)
    """Sequence slots: requests that may be resident in one step."""

    max_step_tokens: int = Field(default=512, ge=1)
    """Token budget of one step, prefill and decode together."""

    kv_cache_bytes: ByteSize = Field(default=ByteSize(2 << 30), gt=0)
    """Size of the KV pool on the device."""

    host_kv_bytes: ByteSize = ByteSize(0)
    """Size of the KV tier in host memory; 0 has none. Accepted now, used from the release that swaps KV blocks."""

    record: AbsolutePath | None = None
    """File that everything the engine is told, plans and computes is written to, token ids of prompts and answers
    included, for `evenhand sim --replay`: 1 KB or so a step, and prompts. The file before it is kept with a number at
    its end. Unset writes none."""

    cost_model: AbsolutePath | None = None
    """File that `evenhand bench calibrate` wrote: what steps cost, which fair share plans with. Unset is the one that
    it writes by itself, under `calibration` in `EVENHAND_HOME`; if there is none, built-in figures."""

    threads: int = Field(default=0, ge=0)
    """CPU threads of the engine; 0 lets torch choose. `evenhand doctor` advises one fewer beside busy neighbors."""

    endpoint: str | None = Field(default=None, pattern=r"^(ipc:///|tcp://).+")
    """ZeroMQ address between gateway and engine, for `evenhand engine` and `evenhand gateway` run apart: `ipc:///path`
    on one machine, `tcp://host:port` between machines, which needs CURVE keys. Unset is a private Unix socket under
    `EVENHAND_HOME`."""

    curve_public_key: str | None = None
    """This process's own public CURVE key; `evenhand curve-keys` makes a pair."""

    curve_secret_key: SecretStr | None = None
    """The secret key of the same pair."""

    curve_peer_keys: Words = ()
    """Public keys of the other end: for an engine those of the gateways that may use it, for a gateway the engine's."""

    @model_validator(mode="after")
    def _tcp_has_keys(self) -> Self:
        keys = (self.curve_public_key, self.curve_secret_key, self.curve_peer_keys or None)
        if any(key is not None for key in keys) and None in keys:
            raise ValueError("curve_public_key, curve_secret_key and curve_peer_keys go together: set all or none")
        if self.endpoint is not None and self.endpoint.startswith("tcp://") and None in keys:
            raise ValueError("a TCP endpoint needs curve_public_key, curve_secret_key and curve_peer_keys")
        return self


class LogSettings(Section):
    """Logs, on stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe event that is written."""


class Settings(BaseSettings):
    """The whole tree."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        env_prefix=ENV_PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
    )

    home: AbsolutePath = Path("~/.evenhand")
    """Folder for everything Evenhand keeps: models, database, journal, pepper, sockets. Made at first start."""

    server: ServerSettings = ServerSettings()
    database: DatabaseSettings = DatabaseSettings()
    redis: RedisSettings = RedisSettings()
    limits: LimitSettings = LimitSettings()
    auth: AuthSettings = AuthSettings()
    throttle: ThrottleSettings = ThrottleSettings()
    engine: EngineSettings = EngineSettings()
    log: LogSettings = LogSettings()

    @property
    def engine_endpoint(self) -> str:
        """Where gateway and engine meet; a socket in the home if nobody has chosen a place."""
        return self.engine.endpoint or f"ipc://{self.home / 'run' / 'engine.sock'}"

    @property
    def shares_state(self) -> bool:
        """PostgreSQL and Redis are set up, so that several gateways may run."""
        return self.redis.url is not None and _is_postgresql(self.database.url)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - the names are pydantic's
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments only; `settings_sources` puts the layers together and keeps track of where a value came from."""
        return (init_settings,)

    @model_validator(mode="after")
    def _workers_share_state(self) -> Self:
        if self.server.workers > 1 and not self.shares_state:
            raise ValueError(
                f"server.workers is {self.server.workers}, but more than one worker needs database.url (PostgreSQL) "
                "and redis.url, through which workers share what they know"
            )
        return self

    @model_validator(mode="after")
    def _shares_are_of_all_processes(self) -> Self:
        workers, limits = self.server.workers, self.limits
        if limits.when_unavailable == "degrade" and workers > limits.processes:
            raise ValueError(
                f"server.workers is {workers}, but limits.processes is {limits.processes}: with "
                "limits.when_unavailable = degrade it has to count the gateway processes of all hosts, since each "
                "allows its share of the limits"
            )
        return self


def _is_postgresql(url: SecretStr | None) -> bool:
    return url is not None and url.get_secret_value().startswith(("postgresql://", "postgresql+", "postgres://"))


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf of the tree.

    Attributes:
        name: dotted, for example ``server.port``.
        variable: the environment variable that sets it.
        field: type, default and description.
    """

    name: str
    variable: str
    field: FieldInfo

    @property
    def is_secret(self) -> bool:
        return self.field.annotation in (SecretStr, SecretStr | None)


def all_settings() -> Iterator[Setting]:
    """Every setting in the order of the tree."""
    for name, field in Settings.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            for leaf, leaf_field in section.model_fields.items():
                yield Setting(f"{name}.{leaf}", f"{ENV_PREFIX}{name}__{leaf}".upper(), leaf_field)
        else:
            yield Setting(name, f"{ENV_PREFIX}{name}".upper(), field)
