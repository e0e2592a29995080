from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT = (sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache")


def _lint(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(LINT, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_imports_run_one_way() -> None:
    done = _lint(ROOT)

    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 broken." in done.stdout


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("engine/planted.py", "import gateway"),
        ("kernels/planted.py", "import engine"),
        ("kernels/planted.py", "import numpy"),
        ("engine/sched/planted.py", "import torch"),
        ("engine/planted.py", "import litestar"),
        ("engine/models/planted.py", "import kernels"),
        ("gateway/domain/planted.py", "import litestar"),
        ("gateway/services/planted.py", "import engine.client"),
        ("gateway/services/planted.py", "import gateway.storage.database"),
        ("gateway/storage/planted.py", "import gateway.web.auth"),
        ("gateway/web/planted.py", "import engine.client"),
        ("gateway/services/planted.py", "import gateway.limits.memory"),
        ("gateway/limits/planted.py", "import gateway.storage.database"),
        ("gateway/limits/planted.py", "import limits"),
    ],
)
def test_an_import_the_wrong_way_is_found(tmp_path: Path, module: str, statement: str) -> None:
    """Otherwise a rule that names a package wrongly would hold for ever."""
    for package in ("gateway", "engine", "kernels"):
        for source in (ROOT / package).rglob("*.py"):
            copy = tmp_path / source.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(source.read_bytes())
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    (tmp_path / module).write_text(f"{statement}\n")

    done = _lint(tmp_path)

    assert done.returncode == 1, done.stdout + done.stderr
    assert "planted ->" in done.stdout
