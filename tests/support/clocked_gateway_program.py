"""A gateway as it is shipped, but for its clock, which is the one in a file: ``clocked_gateway_program.py FILE``."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from moved_clock import MovedClock

from gateway import app, cli


def main(clock: Path) -> None:
    app.SystemClock = partial(MovedClock, clock)  # type: ignore[misc, assignment]
    sys.argv = ["evenhand", "gateway"]
    cli.main()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
