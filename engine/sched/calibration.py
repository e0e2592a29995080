"""The file of `evenhand bench calibrate`: a cost model, whose it is, and how it was come by.

What a step costs depends on model, device and number format, so a file is refused for any other engine. It also depends
on processor, threads and torch: those are written down for people, and not compared, since figures that are somewhat
off do no harm to shares. Knows nothing of where such files are kept, nor of how they are measured.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from engine.errors import ConfigError
from engine.sched.cost import CostModel


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cost model with its origin.

    Attributes:
        model: the name under which the model is served.
        device: as in the engine's configuration.
        dtype: of weights and KV; never ``auto``.
        processor: the name that the processor, or the GPU, gives itself.
        num_threads: CPU threads of torch.
        measured_on: date, UTC, as 2026-11-30.
        num_steps: different steps that were measured.
        median_error_permille, worst_error_permille: of the measured steps, how far the model is off, of the measured
            time.
    """

    model: str
    device: str
    dtype: str
    cost: CostModel
    processor: str
    num_threads: int
    torch_version: str
    measured_on: str
    num_steps: int
    median_error_permille: int
    worst_error_permille: int


def load_calibration(path: Path) -> Calibration:
    """Raises `ConfigError` if the file cannot be read or is no calibration."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Calibration)
    except OSError as e:
        raise ConfigError(f"cannot read the calibration '{path}': {e.strerror}") from e
    except (msgspec.DecodeError, UnicodeDecodeError, ConfigError) as e:
        raise ConfigError(f"'{path}' is no file of 'evenhand bench calibrate': {e}") from e


def load_cost_model(path: Path, *, model: str, device: str, dtype: str) -> CostModel:
    """The cost model of a file, for one engine.

    Args:
        dtype: ``auto`` takes the file's.

    Raises:
        ConfigError: as `load_calibration`, or the file is of another model, device or number format.
    """
    calibration = load_calibration(path)
    wanted = {"model": model, "device": device, "dtype": calibration.dtype if dtype == "auto" else dtype}
    for name, value in wanted.items():
        found = getattr(calibration, name)
        if found != value:
            raise ConfigError(
                f"the calibration '{path}' is of {name} '{found}', not of '{value}': run evenhand bench calibrate"
            )
    return calibration.cost


def store_calibration(calibration: Calibration, path: Path) -> None:
    """Write the file, whole or not at all. Raises `ConfigError` if that fails, or if something else is there."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"cannot write the calibration '{path}': it is no regular file")
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(calibration)) + b"\n")
        partial.replace(path)
    except OSError as e:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise ConfigError(f"cannot write the calibration '{path}': {e.strerror}") from e
