"""The CURVE keys of a TCP socket between gateway and engine, from settings."""

from __future__ import annotations

from engine.carriers.curve import CurveKeys
from gateway.settings import EngineSettings


def curve_keys(settings: EngineSettings) -> CurveKeys | None:
    """The keys of this end, if it has any. Raises `ConfigError` for one that is not a key."""
    public, secret = settings.curve_public_key, settings.curve_secret_key
    if public is None or secret is None:
        return None
    return CurveKeys(
        public_key=public.encode(),
        secret_key=secret.get_secret_value().encode(),
        peer_keys=frozenset(key.encode() for key in settings.curve_peer_keys),
    )
