"""Who may import what, module by module, as lists of what is allowed: a new module or package cannot slip through."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("gateway", "engine", "kernels")

THIRD_PARTIES: dict[str, set[str]] = {
    "kernels": {"torch", "triton"},
    "engine": {"torch", "numpy", "msgspec", "zmq", "safetensors", "tokenizers", "gguf", "jinja2", "matplotlib"},
    "gateway/domain": {"msgspec"},
    "gateway/journal": {"msgspec"},
    "gateway/services": {"msgspec"},
    "gateway/storage": {"sqlalchemy", "alembic", "aiosqlite", "asyncpg", "redis", "msgspec"},
    "gateway/limits": {"redis", "hiredis", "limits", "msgspec"},
}
"""Folder → third-party packages that modules in it may import."""

OWN: dict[str, tuple[str, ...]] = {
    "kernels": ("kernels",),
    "gateway/domain": ("gateway.domain",),
    "gateway/journal": ("gateway.domain", "gateway.journal"),
    "gateway/services": ("gateway.domain", "gateway.journal", "gateway.services", "gateway.errors"),
    "gateway/storage": (
        "gateway.domain",
        "gateway.services.stores",
        "gateway.services.ports",
        "gateway.errors",
        "gateway.storage",
        "gateway.settings",
    ),
    "gateway/limits": (
        "gateway.domain",
        "gateway.services.limit_store",
        "gateway.services.throttle",
        "gateway.errors",
        "gateway.limits",
    ),
}
"""Folder → our own modules that modules in it may import."""

KERNEL_USERS = ("engine/layers", "engine/runner", "engine/sample", "kernels")
LIMITS_USERS = ("gateway/limits/throttles.py", "gateway/limit_notation.py")
ENGINE_USERS = ("gateway/backends", "gateway/commands", "gateway/cli.py", "engine")
TORCH_FREE = (
    "engine/sched",
    "engine/sim",
    "engine/kv",
    "engine/text",
    "engine/carriers",
    "engine/request.py",
    "engine/core.py",
)


def _within(file: str, places: Iterable[str]) -> bool:
    return any(file == place or file.startswith(f"{place}/") for place in places)


def _imports(source: str) -> Iterator[str]:
    """Every imported module's full name, wherever in the file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are banned"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def wrong_imports(file: str, source: str) -> list[str]:
    """The imports that a file, named from the root, may not have."""
    wrong = []
    for name in _imports(source):
        top = name.partition(".")[0]
        is_third_party = top not in OURS and top not in sys.stdlib_module_names
        is_wrong = (
            any(is_third_party and _within(file, [place]) and top not in some for place, some in THIRD_PARTIES.items())
            or any(top in OURS and _within(file, [place]) and not name.startswith(some) for place, some in OWN.items())
            or (top == "kernels" and not _within(file, KERNEL_USERS))
            or (top == "engine" and not _within(file, ENGINE_USERS))
            or (top == "limits" and not _within(file, LIMITS_USERS))
            or (top == "torch" and _within(file, TORCH_FREE))
            or (top == "gateway" and not _within(file, ["gateway"]))
        )
        if is_wrong:
            wrong.append(name)
    return wrong


def test_every_module_imports_only_what_its_house_allows() -> None:
    files = [path for package in OURS for path in (ROOT / package).rglob("*.py")]
    wrong = {
        str(path.relative_to(ROOT)): wrong_imports(str(path.relative_to(ROOT)), path.read_text()) for path in files
    }

    assert len(files) > 100
    assert {file: names for file, names in wrong.items() if names} == {}


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("engine/new.py", "from kernels.dispatch import select"),
        ("engine/carriers/new.py", "import kernels"),
        ("engine/new.py", "import httpx"),
        ("engine/new.py", "import gateway.errors"),
        ("engine/text/new.py", "import torch"),
        ("kernels/new.py", "import transformers"),
        ("kernels/new.py", "def late():\n    import engine.core"),
        ("gateway/domain/new.py", "import jinja2"),
        ("gateway/journal/new.py", "import sqlalchemy"),
        ("gateway/journal/new.py", "from gateway.services.ports import Clock"),
        ("gateway/services/new.py", "import structlog"),
        ("gateway/services/new.py", "from gateway.telemetry import metrics"),
        ("gateway/services/new.py", "import sqlalchemy"),
        ("gateway/services/new.py", "from gateway.storage.database import Database"),
        ("gateway/storage/new.py", "import litestar"),
        ("gateway/storage/new.py", "from gateway.services.inference import Inference"),
        ("gateway/domain/new.py", "from gateway.limits.memory import MemoryLimits"),
        ("gateway/services/new.py", "from gateway.limits.memory import MemoryLimits"),
        ("gateway/storage/new.py", "from gateway.limits.memory import MemoryLimits"),
        ("gateway/limits/new.py", "import sqlalchemy"),
        ("gateway/limits/new.py", "from limits import parse"),
        ("gateway/new.py", "import limits.aio.storage"),
        ("gateway/limits/new.py", "from gateway.services.ports import Clock"),
        ("gateway/limits/new.py", "from gateway.storage.database import Database"),
        ("gateway/new.py", "from engine.client import EngineClient"),
        ("gateway/app.py", "import engine.core"),
    ],
)
def test_a_wrong_import_is_found(file: str, statement: str) -> None:
    assert wrong_imports(file, statement) != []
