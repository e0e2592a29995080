"""What administrators may enter, and the forms that values of theirs come in."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
import typer

from gateway.commands.options import duration_ms
from gateway.commands.tables import everything, show
from gateway.domain.ids import AdminTokenId, KeyId, TeamId
from gateway.domain.tenancy import AdminToken, ApiKey, Role, Secret
from gateway.errors import InvalidRequest, NotAllowed
from gateway.services import admin_rules as rules
from gateway.services.admin_pages import Page, PageRequest
from gateway.services.admin_tokens import Permission, require_permission
from gateway.services.audit import describe
from gateway.web.admin.schema import ChangedKey, NewKey, NewOrganization, UsageQuery
from gateway.web.admin.times import to_iso, to_ms
from gateway.web.admin.wire import to_wire
from gateway.web.decoding import BodyDecoder

Check = Callable[[Any], Any]

KEY = ApiKey(
    id=KeyId("key_1"), team_id=TeamId("team_1"), name="k", secret=Secret("PUBLIC", b"digest", "p1"), created_at_ms=1
)


@pytest.mark.parametrize(
    "name", ["a", "x" * 100, "Ácme & Søn", "株式会社　営業", "صوت‌ها", "O'Brien; DROP TABLE", "👩‍👧", "a b", '"q"']
)
def test_a_name_may_be_in_any_script(name: str) -> None:
    assert rules.check_name(name) == name


_SPOOFED = ("\u202eabc", "a\u200b", "\ufeffa", "\u200d", "\u3000", "\u3000a", "\u2028")
_BROKEN = ("a\nb", "a\r\nb", "a\x00", "a\tb", "\ud83d", "\x1b[2J")


@pytest.mark.parametrize("name", ["", "x" * 101, " a", "a ", *_SPOOFED, *_BROKEN])
def test_a_name_that_could_pass_for_another_or_break_a_line_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        rules.check_name(name)
    assert refused.value.param == "name"


@pytest.mark.parametrize("name", ["gpt-4", "claude/3.5", "a/b/c", "..a", "%2F", "模型"])
def test_an_alias_may_have_slashes(name: str) -> None:
    assert rules.check_alias_name(name) == name


@pytest.mark.parametrize("name", ["", "a b", "/a", "a/", "a//b", ".", "a/../b", "./a", "a\tb", "x" * 201, "\u200d"])
def test_an_alias_that_a_path_would_change_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        rules.check_alias_name(name)
    assert refused.value.param == "name"


@pytest.mark.parametrize(
    ("check", "value", "param"),
    [
        (rules.check_weight, 0, "weight"),
        (rules.check_weight, 1_000_001, "weight"),
        (rules.check_models, [], "models"),
        (rules.check_models, ["m"] * 101, "models"),
        (rules.check_models, ["ok", ""], "models[1]"),
        (rules.check_models, ["x" * 201], "models[0]"),
        (rules.check_models, ["a\x00"], "models[0]"),
        (rules.check_endpoints, [], "endpoints"),
        (rules.check_endpoints, ["chat", "embeddings"], "endpoints"),
        (rules.check_queue_depth, 0, "max_queue_depth"),
        (rules.check_deadline, 0, "deadline_ms"),
        (rules.check_deadline, 86_400_001, "deadline_ms"),
        (rules.check_networks, [], "networks"),
        (rules.check_networks, ["::1"] * 101, "networks"),
        (rules.check_networks, ["::1", "x"], "networks[1]"),
        (rules.check_time_zone, "", "time_zone"),
        (rules.check_time_zone, "Mars/Olympus", "time_zone"),
        (rules.check_time_zone, "../UTC", "time_zone"),
        (rules.check_time_zone, "Europe", "time_zone"),
        (rules.check_time_zone, "UTC\n", "time_zone"),
        (rules.check_time_zone, "\udcff", "time_zone"),
        (rules.check_time_zone, "x" * 65, "time_zone"),
        (rules.check_reason, "", "reason"),
        (rules.check_reason, "x" * 201, "reason"),
        (rules.check_reason, "a\tb", "reason"),
        (rules.check_system_default, "", "system_default"),
        (rules.check_system_default, "a\x00", "system_default"),
        (rules.check_system_default, "x" * 20_001, "system_default"),
        (lambda at: rules.check_expiry(at, 1000), 1000, "expires_at"),
        (lambda at: rules.check_expiry(at, 1000), rules.MAX_TIME_MS + 1, "expires_at"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_field(check: Check, value: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check(value)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("check", "value", "kept"),
    [
        (rules.check_weight, 1_000_000, 1_000_000),
        (rules.check_models, None, None),
        (rules.check_models, ["b", "a", "b"], ("b", "a")),
        (rules.check_endpoints, ["completions", "chat"], ("chat", "completions")),
        (rules.check_queue_depth, None, None),
        (rules.check_deadline, 86_400_000, 86_400_000),
        (rules.check_system_default, "a\n\tb\r\n", "a\n\tb\r\n"),
        (rules.check_networks, None, None),
        (rules.check_networks, ["10.0.0.0/8", "192.0.2.7", "10.0.0.0/8"], ("10.0.0.0/8", "192.0.2.7/32")),
        (rules.check_networks, ["2001:DB8:0::/32", "0.0.0.0/0", "::/0"], ("2001:db8::/32", "0.0.0.0/0", "::/0")),
        (rules.check_networks, ["::ffff:192.0.2.0/120", "::ffff:a00:1"], ("192.0.2.0/24", "10.0.0.1/32")),
        (rules.check_time_zone, "Etc/GMT+5", "Etc/GMT+5"),
        (rules.check_time_zone, "America/Argentina/Buenos_Aires", "America/Argentina/Buenos_Aires"),
        (rules.check_reason, "quarterly reports, как всегда", "quarterly reports, как всегда"),
        (lambda at: rules.check_expiry(at, 1000), 1001, 1001),
        (lambda at: rules.check_expiry(at, 1000), None, None),
    ],
)
def test_a_value_within_its_range_is_kept(check: Check, value: Any, kept: Any) -> None:
    assert check(value) == kept


_HOW = "'networks[0]' must be a network such as 10.0.0.0/8 or 2001:db8::/32, or one address"


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ("10.0.0.1/8", f"{_HOW}; that of this address is 10.0.0.0/8."),
        ("2001:db8::1/32", f"{_HOW}; that of this address is 2001:db8::/32."),
        ("::ffff:10.0.0.1/104", f"{_HOW}; that of this address is ::ffff:a00:0/104."),
        *(
            (text, f"{_HOW}.")
            for text in (
                "", "/", "/8", "x", "localhost", "10.0.0.0/", "10.0.0.0/33", "10.0.0.0/-1", "10.0.0.0/8 ",
                "10.0.0.0/255.0.0.0", "10.0.0.0/0.255.255.255", "10.0.0.0/8/8", "10.0.0", "010.0.0.0/8", "::/129",
                "fe80::1%eth0", "fe80::%eth0/64", "10.0.0.0/٨", "1" * 5000, "\x00", "\udcff", "10.0.0.0-10.0.0.9",
            )
        ),
    ],
)  # fmt: skip
def test_what_is_no_network_is_told_how_one_is_written(network: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        rules.check_networks([network])
    assert refused.value.message == message


def test_a_key_that_may_be_used_from_nowhere_is_refused_with_what_to_do_instead() -> None:
    with pytest.raises(InvalidRequest, match="null lets a key be used from everywhere, and one that"):
        rules.check_networks([])


@pytest.mark.parametrize("zone", ["localtime", "posixrules", "Factory", "right/UTC", "posix/Europe/Berlin"])
def test_a_zone_that_is_another_one_on_every_machine_is_refused(zone: str) -> None:
    with pytest.raises(InvalidRequest, match="time zone"):
        rules.check_time_zone(zone)


@pytest.mark.parametrize(
    ("role", "permission", "is_allowed"),
    [
        ("admin", "read", True),
        ("admin", "change", True),
        ("admin", None, False),
        ("viewer", "read", True),
        ("viewer", "change", False),
        ("viewer", None, False),
    ],
)
def test_a_role_may_do_what_it_is_for_and_nothing_that_was_forgotten(
    role: Role, permission: Permission | None, is_allowed: bool
) -> None:
    token = AdminToken(id=AdminTokenId("adm_1"), name="t", role=role, secret=KEY.secret, created_at_ms=1)
    if is_allowed:
        require_permission(token, permission)
    else:
        with pytest.raises(NotAllowed):
            require_permission(token, permission)


def test_of_a_secret_the_public_id_is_told_and_by_the_api_its_pepper_s_id() -> None:
    for told in (describe(KEY), to_wire(KEY)):
        assert told["public_id"] == "PUBLIC"
        assert "secret" not in told
        assert b"digest" not in msgspec.json.encode(told)
    assert "pepper_id" not in describe(KEY)
    assert to_wire(KEY)["pepper_id"] == "p1"


def test_times_are_iso_8601_in_utc_with_milliseconds() -> None:
    assert to_iso(1_800_000_000_250) == "2027-01-15T08:00:00.250Z"
    assert to_iso(0) == "1970-01-01T00:00:00.000Z"
    assert to_iso(rules.MAX_TIME_MS) == "9999-12-31T23:59:59.000Z"
    assert to_iso(None) is None
    assert to_ms(datetime(1, 1, 1, tzinfo=UTC)) < 0


def test_usage_is_of_the_last_day_unless_it_says_otherwise() -> None:
    day_ms = 86_400_000
    noon_ms = 1_800_014_400_000
    assert UsageQuery().range_ms(noon_ms) == (noon_ms - day_ms, noon_ms)
    assert UsageQuery(until="2027-01-15").range_ms(noon_ms) == (noon_ms - 3 * day_ms // 2, noon_ms - day_ms // 2)
    assert UsageQuery(begin="1800000000", until="1800000001").range_ms(noon_ms) == (
        1_800_000_000_000,
        1_800_000_001_000,
    )


def test_in_a_change_absent_is_unchanged_and_null_clears() -> None:
    change = BodyDecoder(ChangedKey).decode(b'{"models": null, "expires_at": "2027-01-15T08:00:00Z"}').change()

    assert change.models is None
    assert change.expires_at_ms == 1_800_000_000_000
    assert change.name is change.deadline_ms is change.endpoints is msgspec.UNSET


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (NewOrganization, {"name": "x", "role": "admin"}, "role"),
        (NewOrganization, {"name": "x", "y" * 5000: 1}, "y" * 200),
        (NewKey, {"team_id": "t", "name": "x", "endpoints": ["tools"]}, "endpoints[0]"),
        (NewKey, {"team_id": "t", "name": "x", "default_class": "z" * 5000}, "default_class"),
        (NewKey, {"team_id": "t", "name": "x", "expires_at": "2027-01-15T08:00:00"}, "expires_at"),
    ],
)
def test_a_wrong_field_is_named_in_a_short_message(kind: type[Any], body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        BodyDecoder(kind).decode(json.dumps(body).encode())
    assert refused.value.param == param
    assert len(refused.value.message) < 500


@pytest.mark.parametrize(
    ("text", "ms"),
    [("90s", 90_000), ("30m", 1_800_000), ("12h", 43_200_000), ("30d", 2_592_000_000), ("2w", 1_209_600_000)],
)
def test_a_duration_is_a_number_and_a_unit(text: str, ms: int) -> None:
    assert duration_ms(text) == ms


@pytest.mark.parametrize("text", ["", "30", "d", "1.5h", "-1d", "1 d", "1y", "9" * 12 + "d"])
def test_anything_else_is_no_duration(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        duration_ms(text)


def test_a_list_is_tab_separated_for_scripts_and_whole_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"a": "x", "b": None, "c": 1}, {"a": "y", "b": ("p", "q"), "c": 2}]

    show(rows, ("a", "b"), as_json=False)
    assert capsys.readouterr().out == "a\tb\nx\t-\ny\tp,q\n"
    show(rows, ("a", "b"), as_json=True)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"a": "x", "b": None, "c": 1},
        {"a": "y", "b": ["p", "q"], "c": 2},
    ]


async def test_everything_is_all_pages() -> None:
    async def fetch(page: PageRequest) -> Page[int]:
        begin = int(page.after or 0)
        return Page([begin, begin + 1], str(begin + 2) if begin < 4 else None)

    assert await everything(fetch) == [0, 1, 2, 3, 4, 5]
