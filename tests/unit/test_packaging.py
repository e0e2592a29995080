from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from gateway import __version__
from gateway.commands.doctor import packages_findings

ROOT = Path(__file__).parents[2]
FORBIDDEN_AT_RUN_TIME = {"transformers", "accelerate", "diffusers", "kernels"}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\s;<>=!~\[(]", name, maxsplit=1)[0]).lower()


def _needed(roots: list[str]) -> set[str]:
    """The distributions that these requirements bring along here, without extras."""
    found: set[str] = set()
    waiting = [_normal(root) for root in roots]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            requirements = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # for another platform or Python
        found.add(name)
        waiting += [_normal(line) for line in requirements if "extra ==" not in line]
    return found


@pytest.fixture(scope="module")
def project() -> dict[str, list[str]]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        table = tomllib.load(file)
    return {"runtime": table["project"]["dependencies"], "dev": table["dependency-groups"]["dev"]}


def test_the_three_packages_come_from_this_repository() -> None:
    for name in ("gateway", "engine", "kernels"):
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin == str(ROOT / name / "__init__.py")


def test_no_other_distribution_provides_them() -> None:
    assert [finding.level for finding in packages_findings(metadata.packages_distributions())] == ["ok"]


def test_the_package_of_the_same_name_is_found_and_named() -> None:
    findings = list(packages_findings({"kernels": ["evenhand", "kernels"], "gateway": ["evenhand"]}))

    assert [finding.level for finding in findings] == ["problem"]
    assert "'kernels' also installs the package 'kernels': pip uninstall kernels" in findings[0].message


def test_what_runs_does_not_bring_transformers(project: dict[str, list[str]]) -> None:
    needed = _needed(project["runtime"])

    assert {"litestar", "torch", "numpy", "pydantic-core"} <= needed
    assert needed & FORBIDDEN_AT_RUN_TIME == set()


def test_everything_asked_for_is_pinned(project: dict[str, list[str]]) -> None:
    pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))

    assert _needed(project["runtime"] + project["dev"]) - set(pins) == set()
    assert all("+" not in version for version in pins.values())


def test_a_wheel_has_the_three_packages_and_the_migrations_and_finds_them(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=60)
    installed = tmp_path / "installed"
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(installed)
    code = "from gateway.storage.schema import migrations_folder; print(migrations_folder())"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert {path.name for path in installed.iterdir() if path.suffix != ".dist-info"} == {
        "gateway",
        "engine",
        "kernels",
    }
    folder = Path(found.stdout.strip())
    assert folder == installed / "gateway" / "storage" / "_migrations"
    kept = [
        path.relative_to(ROOT / "migrations") for path in (ROOT / "migrations").rglob("*.*") if path.suffix != ".pyc"
    ]
    assert {path.relative_to(folder) for path in folder.rglob("*.*")} == set(kept)


def test_the_command_starts_without_torch() -> None:
    code = "import sys, gateway.cli, engine.models.fetch, engine.config; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


def test_the_version_is_the_distribution_s() -> None:
    assert metadata.version("evenhand") == __version__
