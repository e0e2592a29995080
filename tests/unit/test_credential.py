"""The form of keys and tokens, their digests, and where peppers come from."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.domain.credential import ADMIN_TOKEN, API_KEY, SCANNER_PATTERN, Peppers, Prefix, issue, parse
from gateway.domain.tenancy import Secret
from gateway.pepper_file import PepperError, load_peppers
from gateway.settings import Settings

HEX = "ab" * 32


@pytest.mark.parametrize(("prefix", "length"), [(API_KEY, 65), (ADMIN_TOKEN, 66)])
def test_a_credential_has_its_parts_in_place(prefix: Prefix, length: int) -> None:
    raw, public_id = issue(prefix)

    assert len(raw) == length
    assert re.fullmatch(rf"{prefix}{public_id}_[0-9A-Za-z]{{49}}", raw)
    assert parse(raw, prefix) == parse(raw.encode(), prefix) == public_id
    assert parse(raw, ADMIN_TOKEN if prefix == API_KEY else API_KEY) is None


def test_no_two_credentials_are_alike() -> None:
    issued = [issue(API_KEY) for _ in range(500)]

    assert len({raw for raw, _ in issued}) == len({public_id for _, public_id in issued}) == 500
    assert len({raw[16:59] for raw, _ in issued}) == 500
    assert {character for raw, _ in issued for character in raw[16:59]} > set("0aAzZ9")


def test_the_checksum_is_the_one_that_is_documented() -> None:
    """CRC32 of what stands before it, in base 62 with digits before capitals before small letters."""
    assert parse("eh_TestTestTest_0123456789abcdefghijklmnopqrstuvwxyzABCDEFG4UO6VT", API_KEY) == "TestTestTest"


def test_scanners_find_credentials_in_text_and_nothing_else() -> None:
    key, token = issue(API_KEY)[0], issue(ADMIN_TOKEN)[0]
    text = f'{{"authorization": "Bearer {key}"}} export T={token};eh_short_key {key}x meh_{key[3:]}'

    assert re.findall(SCANNER_PATTERN, text) == [key, token]


def test_a_digest_is_of_the_whole_credential_and_under_the_first_pepper() -> None:
    peppers = Peppers({"new": b"n" * 32, "old": b"o" * 32})
    raw, public_id = issue(API_KEY)
    kept = Secret(public_id, *peppers.digest(raw))

    assert kept.pepper_id == "new"
    assert len(kept.digest) == 32
    assert peppers.matches(raw, kept)
    assert peppers.matches(raw.encode(), kept)
    assert not peppers.matches(raw[:-1], kept)
    assert not peppers.matches(issue(API_KEY)[0], kept)


def test_peppers_can_be_rotated() -> None:
    old = Peppers({"old": b"o" * 32})
    raw, public_id = issue(API_KEY)
    kept = Secret(public_id, *old.digest(raw))

    assert Peppers({"new": b"n" * 32, "old": b"o" * 32}).matches(raw, kept)
    assert not Peppers({"new": b"n" * 32}).matches(raw, kept)
    assert not Peppers({"old": b"n" * 32}).matches(raw, kept)


def test_peppers_do_not_show_themselves() -> None:
    assert repr(Peppers({"a": b"secret" * 6, "b": b"other!" * 6})) == "Peppers(a, b)"


def settings_of(home: Path, peppers: str | None = None) -> Settings:
    return Settings(home=home, auth={"peppers": peppers})


def test_peppers_come_from_the_settings(tmp_path: Path) -> None:
    peppers = load_peppers(settings_of(tmp_path, f"second:{'cd' * 32} , first:{HEX}"))

    assert repr(peppers) == "Peppers(second, first)"
    assert peppers.digest("x") == Peppers({"second": b"\xcd" * 32}).digest("x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEX, "entry 1 is not ID:SECRET"),
        (f"{HEX}:a", "entry 1 is not ID:SECRET"),
        (f"a:{HEX},:{HEX}", "entry 2 is not ID:SECRET"),
        (f"a b:{HEX}", "entry 1 is not ID:SECRET"),
        (f"a:{HEX[:-2]}", "entry 1: the secret has 31 bytes; at least 32 are needed"),
        (f"a:{HEX[:-1]}", "entry 1: the secret is not a row of hexadecimal digits"),
        (f"a:{HEX[:-2]}xy", "entry 1: the secret is not a row of hexadecimal digits"),
        (f"a:{HEX},a:{'cd' * 32}", "entry 2 has the id of an earlier one"),
        (" , ", "holds no pepper"),
    ],
)
def test_malformed_peppers_are_refused_without_being_repeated(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PepperError) as raised:
        load_peppers(settings_of(tmp_path, text))

    assert str(raised.value).startswith("auth.peppers: ")
    assert message in str(raised.value)
    assert "abab" not in str(raised.value)
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__ or raised.value.__context__ is None


def test_a_pepper_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    settings = settings_of(tmp_path / "home")
    digest = load_peppers(settings).digest("x")

    file = tmp_path / "home" / "pepper.key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert re.fullmatch(r"[0-9a-f]{8}:[0-9a-f]{64}\n", file.read_text())
    assert load_peppers(settings).digest("x") == digest
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["pepper.key"]


def test_of_many_processes_one_makes_the_pepper(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from gateway.pepper_file import *; "
        "print(load_peppers(Settings(home=Path(sys.argv[1]))).digest('x'))"
    )
    many = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]

    assert len({child.communicate(timeout=60)[0] for child in many}) == 1
    assert [child.returncode for child in many] == [0] * 4


def test_a_file_may_have_several_peppers(tmp_path: Path) -> None:
    file = tmp_path / "pepper.key"
    file.touch(mode=0o600)
    file.write_text(f"new:{'cd' * 32}\n\nold:{HEX},older:{HEX}\n")

    assert repr(load_peppers(settings_of(tmp_path))) == "Peppers(new, old, older)"


def test_a_pepper_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    load_peppers(settings_of(tmp_path))
    (tmp_path / "pepper.key").chmod(0o640)

    with pytest.raises(PepperError, match=r"others may read it \(mode 640\); run: chmod 600"):
        load_peppers(settings_of(tmp_path))


@pytest.mark.parametrize("content", [b"", b"secret\n", b"\xff"])
def test_a_file_without_a_pepper_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pepper.key").touch(mode=0o600)
    (tmp_path / "pepper.key").write_bytes(content)

    with pytest.raises(PepperError, match=r"pepper\.key"):
        load_peppers(settings_of(tmp_path))


def test_a_home_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(PepperError, match=r"file/home/pepper\.key: cannot be used"):
        load_peppers(settings_of(tmp_path / "file" / "home"))
