"""What names, weights and other values of administrators may be. Every refusal names the field."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import get_args

from gateway.domain.credential import holds_credential
from gateway.domain.limits.periods import zone_named
from gateway.domain.request import Endpoint
from gateway.errors import InvalidRequest

MAX_NAME = 100
MAX_WEIGHT = 1_000_000
MAX_MODEL_NAME = 200
MAX_SCOPE_MODELS = 100
MAX_SYSTEM_DEFAULT = 20_000
MAX_QUEUE_DEPTH = 1_000_000
MAX_DEADLINE_MS = 86_400_000
MAX_NETWORKS = 100
MAX_NETWORK = 50
"""Characters: the longest IPv6 network has 43."""
MAX_REASON = 200
MAX_TIME_MS = 253_402_300_799_000
"""The end of the year 9999, where dates as text end too."""

ENDPOINTS: tuple[Endpoint, ...] = get_args(Endpoint)

_ALSO_PRINTABLE = str.maketrans("", "", "\u200c\u200d\u3000")
"""What Python does not count as printable: two joiners, which are parts of Persian and Indic spelling and of emoji, and
the wide space of Chinese and Japanese."""
_ZONE = re.compile(r"[A-Za-z0-9_+/-]{1,64}")
_NO_ZONES = ("localtime", "posixrules", "Factory")
_NO_ZONE_FOLDERS = ("posix/", "right/")
"""Parts of some systems' databases: what this machine uses, and the same zones with leap seconds counted."""
_IPV4_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
"""What a text of several lines does not have; one database cannot even keep the first of them."""


def check_name(name: str, param: str = "name") -> str:
    """Any script, on one line: no control or format characters, which would let one name pass for another."""
    if not 1 <= len(name) <= MAX_NAME:
        raise InvalidRequest(f"'{param}' must have 1 to {MAX_NAME} characters.", param=param)
    if not _is_printable(name):
        raise InvalidRequest(f"'{param}' must have printable characters only.", param=param)
    _refuse_credentials(name, param)
    if name != name.strip():
        raise InvalidRequest(f"'{param}' must not begin or end with a space.", param=param)
    return name


def check_weight(weight: int) -> int:
    return _within(weight, 1, MAX_WEIGHT, "weight")


def check_models(models: Sequence[str] | None) -> tuple[str, ...] | None:
    """The scope of a key, each name once. The names need not be there yet."""
    if models is None:
        return None
    if not 1 <= len(models) <= MAX_SCOPE_MODELS:
        raise InvalidRequest(
            f"'models' must have 1 to {MAX_SCOPE_MODELS} names; leave it out to allow all.", param="models"
        )
    for place, name in enumerate(models):
        param = f"models[{place}]"
        if not 1 <= len(name) <= MAX_MODEL_NAME or not _is_printable(name):
            raise InvalidRequest(f"'{param}' must have 1 to {MAX_MODEL_NAME} printable characters.", param=param)
        _refuse_credentials(name, param)
    return tuple(dict.fromkeys(models))


def check_endpoints(endpoints: Sequence[str] | None) -> tuple[Endpoint, ...] | None:
    """Like `check_models`."""
    if endpoints is None:
        return None
    if not endpoints or not set(endpoints) <= set(ENDPOINTS):
        raise InvalidRequest(
            f"'endpoints' must have some of {', '.join(ENDPOINTS)}; leave it out to allow all.", param="endpoints"
        )
    return tuple(each for each in ENDPOINTS if each in endpoints)


def check_queue_depth(depth: int | None) -> int | None:
    return None if depth is None else _within(depth, 1, MAX_QUEUE_DEPTH, "max_queue_depth")


def check_deadline(deadline_ms: int | None) -> int | None:
    return None if deadline_ms is None else _within(deadline_ms, 1, MAX_DEADLINE_MS, "deadline_ms")


def check_networks(networks: Sequence[str] | None) -> tuple[str, ...] | None:
    """Each once, in its usual form: an address alone is the network of that address, and one of IPv4 that is written as
    one of IPv6 becomes what addresses are compared as."""
    if networks is None:
        return None
    if not networks:
        raise InvalidRequest(
            "'networks' must have at least one network: null lets a key be used from everywhere, and one that may be "
            "used from nowhere is better revoked.",
            param="networks",
        )
    if len(networks) > MAX_NETWORKS:
        raise InvalidRequest(f"'networks' must have at most {MAX_NETWORKS} networks.", param="networks")
    return tuple(dict.fromkeys(_network(text, f"networks[{place}]") for place, text in enumerate(networks)))


def check_time_zone(name: str) -> str:
    """Those that mean something else on every machine are refused like those that do not exist."""
    if not _ZONE.fullmatch(name) or holds_credential(name):
        raise InvalidRequest("There is no such time zone: names are like Europe/Berlin or UTC.", param="time_zone")
    try:
        zone_named(name)
    except ValueError as e:
        said = str(e)
        raise InvalidRequest(f"{said[:1].upper()}{said[1:]}.", param="time_zone") from e
    if name in _NO_ZONES or name.startswith(_NO_ZONE_FOLDERS):
        raise InvalidRequest(
            f"The time zone '{name}' is not the same on every machine: names are like Europe/Berlin or UTC.",
            param="time_zone",
        )
    return name


def check_reason(reason: str) -> str:
    """On one line, like a name, but longer."""
    if not 1 <= len(reason) <= MAX_REASON or not _is_printable(reason) or reason != reason.strip():
        raise InvalidRequest(
            f"'reason' must have 1 to {MAX_REASON} printable characters, and no space at either end.", param="reason"
        )
    _refuse_credentials(reason, "reason")
    return reason


def check_expiry(expires_at_ms: int | None, now_ms: int) -> int | None:
    if expires_at_ms is not None and not now_ms < expires_at_ms <= MAX_TIME_MS:
        raise InvalidRequest("'expires_at' must be in the future, and before the year 10000.", param="expires_at")
    return expires_at_ms


def check_alias_name(name: str) -> str:
    """Slashes are part of many models' names. Where a path would lose something of the name, it is refused."""
    if not 1 <= len(name) <= MAX_MODEL_NAME or not _is_printable(name) or any(c.isspace() for c in name):
        raise InvalidRequest(
            f"'name' must have 1 to {MAX_MODEL_NAME} printable characters without spaces.", param="name"
        )
    _refuse_credentials(name, "name")
    if not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise InvalidRequest("'name' must not begin or end with a slash, or have '//', './' or '../'.", param="name")
    return name


def check_system_default(text: str | None) -> str | None:
    """May have several lines."""
    if text is None:
        return None
    if not 1 <= len(text) <= MAX_SYSTEM_DEFAULT or _CONTROL.search(text):
        raise InvalidRequest(
            f"'system_default' must have 1 to {MAX_SYSTEM_DEFAULT} characters, of the control characters only tabs and "
            "line ends.",
            param="system_default",
        )
    _refuse_credentials(text, "system_default")
    return text


def can_be_kept(text: str) -> bool:
    """Whether a database may be asked for it: it would fail for a NUL, or half a surrogate pair."""
    return _CONTROL.search(text) is None


def is_id(text: str, prefix: str) -> bool:
    """Whether it looks like one of our ids; nothing else needs to be looked up."""
    return re.fullmatch(prefix + "[0-9a-f]{32}", text) is not None


def _refuse_credentials(text: str, param: str) -> None:
    """Somebody has pasted a key into the wrong field; it would be kept, and shown, in the clear."""
    if holds_credential(text):
        raise InvalidRequest(f"'{param}' must not hold a key or token.", param=param)


def _network(text: str, param: str) -> str:
    how = f"'{param}' must be a network such as 10.0.0.0/8 or 2001:db8::/32, or one address"
    address, slash, length = text[: MAX_NETWORK + 1].partition("/")
    if len(text) > MAX_NETWORK or "%" in address or (slash and not re.fullmatch("[0-9]{1,3}", length)):
        raise InvalidRequest(f"{how}.", param=param)
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError as e:
        raise InvalidRequest(f"{how}.", param=param) from e
    if slash and network.network_address != ipaddress.ip_address(address):
        raise InvalidRequest(f"{how}; that of this address is {network}.", param=param)
    if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(_IPV4_MAPPED):
        network = ipaddress.ip_network((int(network.network_address) & 0xFFFF_FFFF, network.prefixlen - 96))
    return str(network)


def _within(value: int, low: int, high: int, param: str) -> int:
    if not low <= value <= high:
        raise InvalidRequest(f"'{param}' must be between {low} and {high}.", param=param)
    return value


def _is_printable(text: str) -> bool:
    visible = text.translate(_ALSO_PRINTABLE)
    return visible != "" and visible.isprintable()
