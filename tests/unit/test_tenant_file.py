"""Tenants as a file: what is read of it, and every mistake with its place."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

from gateway.commands.administer import CommandError
from gateway.commands.tenant_file import read_tenants, wanted_of
from gateway.domain.limits.policy import (
    Concurrency,
    ContextSize,
    OutputSize,
    Price,
    QuotaRule,
    RequestRate,
    Rule,
    TokenRate,
)
from gateway.services.admin_catalog import AliasChange
from gateway.services.admin_keys import KeyChange
from gateway.services.tenants import OrganizationChange, TenantChange
from gateway.services.wanted import Wanted, WantedKey

EXAMPLE = Path(__file__).parents[2] / "deploy" / "tenants.toml"


def read(text: str) -> Wanted:
    wanted, mistakes = wanted_of(tomllib.loads(text))
    assert mistakes == []
    return wanted


def mistakes_in(text: str) -> list[str]:
    _, mistakes = wanted_of(tomllib.loads(text))
    return [str(each) for each in mistakes]


def key_of(settings: str) -> WantedKey:
    ((organization,),) = (read(f"[organizations.o.teams.t.keys.k]\n{settings}").organizations,)
    ((key,),) = (organization.teams[0].keys,)
    return key


def rule_of(settings: str) -> Rule:
    (organization,) = read(f"[[organizations.o.limits]]\n{settings}").organizations
    (limit,) = organization.limits
    return limit.rule


def test_an_empty_file_wants_nothing() -> None:
    assert read("") == Wanted()
    assert read("# only words\n") == Wanted()


def test_what_is_left_out_is_left_to_what_is_there() -> None:
    (organization,) = read("[organizations.acme.teams.alpha.keys.k]").organizations
    (team,) = organization.teams
    (key,) = team.keys

    assert (organization.name, team.name, key.name) == ("acme", "alpha", "k")
    assert organization.terms == OrganizationChange()
    assert team.terms == TenantChange()
    assert key.terms == KeyChange()
    assert organization.limits == team.limits == key.limits == ()


def test_every_place_is_told_as_it_would_be_written() -> None:
    (organization,) = read('[organizations."Ácme GmbH".teams."a.b".keys."a \\"key\\""]').organizations
    (team,) = organization.teams

    assert organization.place == 'organizations."Ácme GmbH"'
    assert team.place == 'organizations."Ácme GmbH".teams."a.b"'
    assert team.keys[0].place == 'organizations."Ácme GmbH".teams."a.b".keys."a \\"key\\""'


def test_an_organization_and_a_team() -> None:
    (organization,) = read(
        """
        [organizations.acme]
        weight = 2
        time_zone = "Europe/Berlin"
        disabled = true
        [organizations.acme.teams.alpha]
        weight = 3
        disabled = false
        """
    ).organizations

    assert organization.terms == OrganizationChange(weight=2, time_zone="Europe/Berlin", is_disabled=True)
    assert organization.teams[0].terms == TenantChange(weight=3, is_disabled=False)


def test_a_key_with_everything() -> None:
    key = key_of(
        """
        default_class = "batch"
        models = ["a", "b", "a"]
        endpoints = ["chat"]
        networks = ["10.0.0.0/8", "192.0.2.7"]
        max_queue_depth = 4
        deadline_ms = 500
        expires_at = 2030-01-01T00:00:00.250+01:00
        """
    )

    assert key.terms == KeyChange(
        default_class="batch",
        models=("a", "b"),
        endpoints=("chat",),
        networks=("10.0.0.0/8", "192.0.2.7/32"),
        max_queue_depth=4,
        deadline_ms=500,
        expires_at_ms=1_893_452_400_250,
    )


def test_what_is_to_be_unset_takes_a_word() -> None:
    key = key_of(
        """
        models = "all"
        endpoints = "all"
        networks = "all"
        max_queue_depth = "none"
        deadline_ms = "none"
        expires_at = "never"
        """
    )

    assert key.terms == KeyChange(
        models=None, endpoints=None, networks=None, max_queue_depth=None, deadline_ms=None, expires_at_ms=None
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ('kind = "requests"\nrate = "100/minute"', RequestRate(amount=100, period="minute")),
        ('kind = "requests"\nrate = "5 per second"\nburst = 20', RequestRate(amount=5, period="second", burst=20)),
        (
            'kind = "tokens"\nrate = "7/day"\nburst = 1\nmax_debt = 0\nprompt_percent = 50\nstrict = true',
            TokenRate(amount=7, period="day", burst=1, max_debt=0, prompt_percent=50, cached_percent=50,
                      is_strict=True),
        ),
        ('kind = "concurrent"\namount = 10', Concurrency(amount=10)),
        ('kind = "context"\namount = 8_192', ContextSize(amount=8192)),
        ('kind = "output"\namount = 1024', OutputSize(amount=1024)),
        (
            'kind = "quota"\nunit = "tokens"\nperiod = "day"\namount = 5',
            QuotaRule(unit="tokens", period="day", amount=5),
        ),
        (
            'kind = "quota"\nunit = "usd"\nperiod = "month"\namount = "250.05"\nhard = false\nalerts = [100, 50]',
            QuotaRule(unit="microusd", period="month", amount=250_050_000, is_hard=False, alerts=(50, 100)),
        ),
        (
            'kind = "quota"\nunit = "microusd"\nperiod = "week"\namount = 5\nalerts = []',
            QuotaRule(unit="microusd", period="week", amount=5, alerts=()),
        ),
    ],
)  # fmt: skip
def test_a_limit_of_every_kind(settings: str, expected: Rule) -> None:
    assert rule_of(settings) == expected


def test_limits_on_each_level_for_a_model_and_in_shadow() -> None:
    (organization,) = read(
        """
        [[organizations.o.limits]]
        kind = "concurrent"
        amount = 1
        [[organizations.o.limits]]
        kind = "concurrent"
        amount = 2
        model = "m"
        shadow = true
        [[organizations.o.teams.t.limits]]
        kind = "concurrent"
        amount = 3
        [[organizations.o.teams.t.keys.k.limits]]
        kind = "concurrent"
        amount = 4
        """
    ).organizations
    team = organization.teams[0]
    limits = [*organization.limits, *team.limits, *team.keys[0].limits]

    assert [(each.rule, each.model, each.is_shadow) for each in limits] == [
        (Concurrency(amount=1), None, False),
        (Concurrency(amount=2), "m", True),
        (Concurrency(amount=3), None, False),
        (Concurrency(amount=4), None, False),
    ]
    assert [each.place for each in limits] == [
        "organizations.o.limits[0]",
        "organizations.o.limits[1]",
        "organizations.o.teams.t.limits[0]",
        "organizations.o.teams.t.keys.k.limits[0]",
    ]


def test_prices_aliases_and_models() -> None:
    wanted = read(
        """
        [[prices]]
        model = "m"
        valid_from = 2026-12-01T00:00:00Z
        prompt = "0.15"
        completion = "0.60"
        [[prices]]
        model = "m"
        valid_from = 2027-01-01T00:00:00+01:00
        prompt = "1"
        cached = "0.000001"
        completion = "2"
        [aliases.plain]
        model = "m"
        [aliases."vendor/full"]
        model = "m"
        system_default = "Be kind."
        request_class = "batch"
        [aliases.empty]
        model = "m"
        system_default = ""
        request_class = "none"
        [models."m"]
        disabled = true
        """
    )

    assert [each.price for each in wanted.prices] == [
        Price(model="m", valid_from_ms=1_796_083_200_000, prompt=150_000, cached=150_000, completion=600_000),
        Price(model="m", valid_from_ms=1_798_758_000_000, prompt=1_000_000, cached=1, completion=2_000_000),
    ]
    assert {each.name: each.terms for each in wanted.aliases} == {
        "plain": AliasChange(model="m"),
        "vendor/full": AliasChange(model="m", system_default="Be kind.", request_class="batch"),
        "empty": AliasChange(model="m", system_default=None, request_class=None),
    }
    assert [(each.name, each.is_disabled) for each in wanted.models] == [("m", True)]


TEAM = "[organizations.o.teams.t]\n"
KEY = "[organizations.o.teams.t.keys.k]\n"
LIMIT = "[[organizations.o.teams.t.limits]]\n"
PRICE = '[[prices]]\nmodel = "m"\nvalid_from = 2026-12-01T00:00:00Z\nprompt = "1"\ncompletion = "1"\n'
AT_TEAM = "organizations.o.teams.t"
NO_KIND = "must be one of requests, tokens, concurrent, context, output, quota"
NO_TIME = "must be a time with a zone, such as 2027-01-01T00:00:00Z"
NO_EXPIRY = f'{NO_TIME}, or "never"'
NO_NETWORK = "must be a network such as 10.0.0.0/8 or 2001:db8::/32, or one address"
NO_USD = 'must be USD as text, such as "250.00"'


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("organisations = 1", "organisations", "is not known here; did you mean organizations?"),
        ("x = 1", "x", "is not known here; there are organizations, models, aliases, prices"),
        ("organizations = 1", "organizations", "must be a table"),
        ("[[organizations]]", "organizations", "must be a table"),
        ("organizations.o = 1", "organizations.o", "must be a table"),
        ("[organizations.o]\nwieght = 1", "organizations.o.wieght", "is not known here; did you mean weight?"),
        (
            '[organizations.o]\n"a b" = 1',
            'organizations.o."a b"',
            "is not known here; there are weight, time_zone, disabled, limits, teams",
        ),
        ("[organizations.o]\nweight = 0", "organizations.o.weight", "must be between 1 and 1000000."),
        ("[organizations.o]\nweight = 1.5", "organizations.o.weight", "must be a whole number"),
        ("[organizations.o]\nweight = true", "organizations.o.weight", "must be a whole number"),
        ("[organizations.o]\ndisabled = 1", "organizations.o.disabled", "must be true or false"),
        ("[organizations.o]\ntime_zone = 1", "organizations.o.time_zone", "must be text"),
        (
            '[organizations.o]\ntime_zone = "Mars/Base"',
            "organizations.o.time_zone",
            "There is no time zone 'Mars/Base': names are like Europe/Berlin, Asia/Kolkata or UTC.",
        ),
        ('[organizations." o"]', 'organizations." o"', "its name must not begin or end with a space."),
        ('[organizations.""]', 'organizations.""', "its name must have 1 to 100 characters."),
        ('[organizations."a\\nb"]', 'organizations."a\\nb"', "its name must have printable characters only."),
        ('[organizations."\\u202Eb"]', 'organizations."\\u202eb"', "its name must have printable characters only."),
        (
            TEAM + 'time_zone = "UTC"',
            f"{AT_TEAM}.time_zone",
            "is not known here; there are weight, disabled, limits, keys",
        ),
        (
            KEY + 'default_class = "fast"',
            f"{AT_TEAM}.keys.k.default_class",
            'must be "interactive", "standard" or "batch"',
        ),
        (KEY + "models = []", f"{AT_TEAM}.keys.k.models", 'must have 1 to 100 names; write "all" to allow all.'),
        (KEY + 'models = "m"', f"{AT_TEAM}.keys.k.models", 'must be a list or "all"'),
        (KEY + 'models = ["a", 1]', f"{AT_TEAM}.keys.k.models[1]", "must be text"),
        (KEY + 'models = ["a", ""]', f"{AT_TEAM}.keys.k.models[1]", "must have 1 to 200 printable characters."),
        (
            KEY + 'endpoints = ["embed"]',
            f"{AT_TEAM}.keys.k.endpoints",
            'must have some of chat, completions; write "all" to allow all.',
        ),
        (
            KEY + 'networks = ["10.0.0.1/8"]',
            f"{AT_TEAM}.keys.k.networks[0]",
            f"{NO_NETWORK}; that of this address is 10.0.0.0/8.",
        ),
        (KEY + 'deadline_ms = "never"', f"{AT_TEAM}.keys.k.deadline_ms", 'must be a whole number or "none"'),
        (KEY + "max_queue_depth = 0", f"{AT_TEAM}.keys.k.max_queue_depth", "must be between 1 and 1000000."),
        (KEY + "expires_at = 2030-01-01", f"{AT_TEAM}.keys.k.expires_at", NO_EXPIRY),
        (KEY + "expires_at = 2030-01-01T00:00:00", f"{AT_TEAM}.keys.k.expires_at", NO_EXPIRY),
        (TEAM + "limits = [1]", f"{AT_TEAM}.limits[0]", "must be a table"),
        (TEAM + "limits = 1", f"{AT_TEAM}.limits", "must be a list"),
        (LIMIT, f"{AT_TEAM}.limits[0].kind", NO_KIND),
        (LIMIT + 'kind = "rate"', f"{AT_TEAM}.limits[0].kind", NO_KIND),
        (LIMIT + 'kind = "requests"', f"{AT_TEAM}.limits[0].rate", "is missing"),
        (
            LIMIT + 'kind = "requests"\nrate = "5"',
            f"{AT_TEAM}.limits[0].rate",
            "must be an amount for one second, minute, hour or day, such as 100/minute.",
        ),
        (
            LIMIT + 'kind = "requests"\nrate = "5/day"\nmax_debt = 1',
            f"{AT_TEAM}.limits[0].max_debt",
            "is not known here; there are rate, burst, model, shadow",
        ),
        (
            LIMIT + 'kind = "requests"\nrate = "5/day"\nmodle = "m"',
            f"{AT_TEAM}.limits[0].modle",
            "is not known here; did you mean model?",
        ),
        (LIMIT + 'kind = "concurrent"\namount = -1', f"{AT_TEAM}.limits[0].amount", "is -1, not 0 to 100000000."),
        (LIMIT + 'kind = "concurrent"\namount = 1\nmodel = 1', f"{AT_TEAM}.limits[0].model", "must be text"),
        (
            LIMIT + 'kind = "concurrent"\namount = 1\nshadow = "yes"',
            f"{AT_TEAM}.limits[0].shadow",
            "must be true or false",
        ),
        (
            LIMIT + 'kind = "quota"\nunit = "euro"\nperiod = "day"\namount = 1',
            f"{AT_TEAM}.limits[0].unit",
            "must be one of tokens, usd, microusd",
        ),
        (LIMIT + 'kind = "quota"\nunit = "usd"\nperiod = "day"\namount = 1.5', f"{AT_TEAM}.limits[0].amount", NO_USD),
        (
            LIMIT + 'kind = "quota"\nunit = "usd"\nperiod = "day"\namount = "a"',
            f"{AT_TEAM}.limits[0].amount",
            "must be USD such as 250 or 0.15, with at most six digits behind the point",
        ),
        (LIMIT + 'kind = "quota"\nunit = "usd"\nperiod = "day"', f"{AT_TEAM}.limits[0].amount", "is missing"),
        (LIMIT + 'kind = "quota"\nperiod = "day"\namount = 1', f"{AT_TEAM}.limits[0].unit", "is missing"),
        (
            LIMIT + 'kind = "quota"\nunit = "tokens"\nperiod = "day"\namount = 1\nalerts = [1, "x"]',
            f"{AT_TEAM}.limits[0].alerts[1]",
            "must be a whole number",
        ),
        ("models.m.disabled = 1", "models.m.disabled", "must be true or false"),
        ("[models.m]", "models.m.disabled", "is missing"),
        ("[aliases.a]", "aliases.a.model", "is missing"),
        (
            '[aliases."a b"]\nmodel = "m"',
            'aliases."a b"',
            "its name must have 1 to 200 printable characters without spaces.",
        ),
        (
            '[aliases.a]\nmodel = "m"\nrequest_class = "x"',
            "aliases.a.request_class",
            'must be "interactive", "standard", "batch" or "none"',
        ),
        ("prices = {}", "prices", "must be a list"),
        ("prices = [1]", "prices[0]", "must be a table"),
        (PRICE.replace('"1"', "1.5", 1), "prices[0].prompt", NO_USD),
        (PRICE.replace("T00:00:00Z", ""), "prices[0].valid_from", NO_TIME),
        (PRICE.replace("2026", "1960"), "prices[0].valid_from", "must be between the years 1970 and 9999."),
        (PRICE + 'cached = "2"', "prices[0].cached", "must not be more than other prompt tokens cost."),
        (PRICE.replace('model = "m"\n', ""), "prices[0].model", "is missing"),
    ],
)
def test_a_mistake_is_told_with_its_place(text: str, place: str, words: str) -> None:
    assert mistakes_in(text) == [f"{place}: {words}"]


def test_a_limit_cannot_be_there_twice() -> None:
    twice = LIMIT + 'kind = "concurrent"\namount = 1\n' + LIMIT + 'kind = "concurrent"\namount = 2\n'
    for_models = twice.replace("amount = 2", 'amount = 2\nmodel = "m"')

    assert mistakes_in(twice) == [
        f"{AT_TEAM}.limits[1]: is a second concurrent for all models, beside {AT_TEAM}.limits[0]"
    ]
    assert mistakes_in(for_models) == []
    assert mistakes_in(for_models + LIMIT + 'kind = "concurrent"\namount = 3\nmodel = "m"') == [
        f"{AT_TEAM}.limits[2]: is a second concurrent for this model, beside {AT_TEAM}.limits[1]"
    ]


def test_every_mistake_is_told_not_only_the_first_of_a_table() -> None:
    text = """
        [organizations.o]
        weight = "much"
        wieght = 1
        time_zone = 5
        [organizations.o.teams." t"]
        weight = 0
        [organizations.o.teams." t".keys.k]
        networks = "office"
        deadline_ms = 0
        [[organizations.o.teams." t".limits]]
        kind = "requests"
        rate = 5
        brust = 1
        [[prices]]
        model = 5
        prompt = 1
        """

    assert {each.partition(":")[0] for each in mistakes_in(text)} == {
        "organizations.o.weight",
        "organizations.o.wieght",
        "organizations.o.time_zone",
        'organizations.o.teams." t"',
        'organizations.o.teams." t".weight',
        'organizations.o.teams." t".keys.k.networks',
        'organizations.o.teams." t".keys.k.deadline_ms',
        'organizations.o.teams." t".limits[0].rate',
        'organizations.o.teams." t".limits[0].brust',
        "prices[0].model",
    }


def test_models_of_what_is_wrong_otherwise_are_told_of_all_the_same() -> None:
    wanted, mistakes = wanted_of(
        tomllib.loads(
            LIMIT + 'kind = "concurrent"\namount = -1\nmodel = "gone"\n'
            '[aliases."a b"]\nmodel = "lost"\n' + PRICE.replace('"1"', "1").replace('"m"', '"away"')
        )
    )

    assert len(mistakes) == 4
    assert [(each.place, each.model) for each in wanted.mentions] == [
        ('aliases."a b"', "lost"),
        ("prices[0]", "away"),
        (f"{AT_TEAM}.limits[0]", "gone"),
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[organizations", "not valid TOML: "),
        (b"a = 1\na = 2", "not valid TOML: "),
        (b"a = \xff", "not valid TOML: "),
        (b"a = " + b"[" * 100_000, "not valid TOML: "),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_what_is_no_toml_is_told_with_the_file(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "tenants.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CommandError) as refused:
        read_tenants(path)

    assert str(refused.value).startswith(f"{path}: {words}")


def test_the_example_has_no_mistake_and_everything_that_there_is() -> None:
    wanted, mistakes = read_tenants(EXAMPLE)
    assert mistakes == []
    keys = [key for organization in wanted.organizations for team in organization.teams for key in team.keys]
    terms: list[Any] = [
        *(each.terms for each in wanted.organizations),
        *(team.terms for each in wanted.organizations for team in each.teams),
        *(each.terms for each in keys),
        *(each.terms for each in wanted.aliases),
    ]
    for kind in (OrganizationChange, TenantChange, KeyChange, AliasChange):
        of_kind = [each for each in terms if isinstance(each, kind)]
        names = [name for name in kind.__struct_fields__ if name != "name"]
        assert [name for name in names if all(getattr(each, name) is UNSET for each in of_kind)] == []
    limits = [
        limit
        for organization in wanted.organizations
        for owner in (organization, *organization.teams, *keys)
        for limit in owner.limits
    ]
    kinds = {type(each.rule) for each in limits}
    assert kinds == {RequestRate, TokenRate, Concurrency, ContextSize, OutputSize, QuotaRule}
    assert wanted.models
    assert wanted.prices
