"""Commands as tests run them, and what they print."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from gateway.cli import main


@dataclass(frozen=True, slots=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The only one there is on stdout."""
        assert (self.code, self.err) == (0, "")
        assert self.out.count("\n") == 1
        return self.out.strip()


class Cli:
    """Runs commands in this process, each as if it were new."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Done:
        self._monkeypatch.setattr(sys, "argv", ["evenhand", *arguments])
        self._capsys.readouterr()
        try:
            main()
            code: object = 0
        except SystemExit as e:
            code = e.code or 0
        said = self._capsys.readouterr()
        assert isinstance(code, int)
        return Done(code, said.out, said.err)


def rows_of(done: Done) -> list[dict[str, str]]:
    """Of a list, by the names of its columns."""
    assert (done.code, done.err) == (0, "")
    header, *rows = [line.split("\t") for line in done.out.splitlines()]
    return [dict(zip(header, row, strict=True)) for row in rows]
