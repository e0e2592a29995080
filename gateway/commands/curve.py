"""``evenhand curve-keys``: a key pair for one end of an engine's TCP socket."""

from __future__ import annotations

import sys

import zmq


def run() -> int:
    """Print a fresh pair as settings of the section ``[engine]``. The other end gets the public key as a peer's."""
    public, secret = zmq.curve_keypair()
    sys.stdout.write(f'curve_public_key = "{public.decode()}"\ncurve_secret_key = "{secret.decode()}"\n')
    return 0
