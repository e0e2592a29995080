"""A certificate and a key tried in a process of its own: ``python -m gateway.tls_trial CERT KEY``.

What granian's TLS cannot use ends the process that granian runs in (a panic that aborts), after OpenSSL took it: so the
trial is left to a process that may end that way. Serves nobody: it ends, with 0, once granian has built its TLS.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from pathlib import Path

from granian.constants import HTTPModes, Interfaces, SSLProtocols
from granian.server.embed import Server

ROUNDS = 10
"""Of the event loop; granian builds its TLS in the second."""


async def _try(certificate: Path, key: Path) -> None:
    server = Server(
        None,
        address="127.0.0.1",
        port=0,
        interface=Interfaces.ASGINL,
        http=HTTPModes.http1,
        websockets=False,
        log_enabled=False,
        ssl_cert=certificate,
        ssl_key=key,
        ssl_protocol_min=SSLProtocols.tls12,
    )
    serving = asyncio.create_task(server.serve())
    for _ in range(ROUNDS):
        await asyncio.sleep(0)
    if serving.done():
        serving.result()
    sys.stderr.flush()
    os._exit(0)  # a server that is told to stop while it starts panics, too


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asyncio.run(_try(Path(sys.argv[1]), Path(sys.argv[2])))
