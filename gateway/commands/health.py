"""``evenhand health``: whether the server of these settings answers, for health checks of containers and the like."""

from __future__ import annotations

import http.client
import ssl
import sys

from gateway.settings import ServerSettings, Settings

TIMEOUT_S = 4.0
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared, not bound


def run(settings: Settings) -> int:
    """Ask ``/health`` and print a line; 0 if it is well, else 1."""
    url = server_url(settings.server)
    why = complaint(settings.server)
    if why is None:
        print(f"{url} answers")  # noqa: T201
        return 0
    print(f"evenhand: {url} {why}", file=sys.stderr)  # noqa: T201
    return 1


def server_url(server: ServerSettings, address: str | None = None) -> str:
    """Where this machine reaches the API.

    Args:
        address: what ``server.host`` stands for, if that is known.
    """
    scheme = "http" if server.tls_cert is None else "https"
    host = reachable(address or server.host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}"


def reachable(address: str) -> str:
    """Where this machine reaches what listens on an address."""
    return _EVERYWHERE.get(address, address)


def complaint(server: ServerSettings) -> str | None:
    """What is wrong with the answer of ``/health``; None if nothing is."""
    host = reachable(server.host)
    if server.tls_cert is None:
        connection = http.client.HTTPConnection(host, server.port, timeout=TIMEOUT_S)
    else:
        # The certificate is for the names that clients know; here it is our own process on our own machine.
        trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusting.check_hostname = False
        trusting.verify_mode = ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, server.port, timeout=TIMEOUT_S, context=trusting)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        if answer.status == http.HTTPStatus.OK and b'"status"' in answer.read():
            return None
    except OSError as e:
        return f"does not answer: {e.strerror or e}"
    except http.client.HTTPException:
        pass
    finally:
        connection.close()
    return "answers, but not as Evenhand does"
