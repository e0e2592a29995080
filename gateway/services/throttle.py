"""Who fails too often to say who it is, or changes too much, is told to wait. Knows nothing of how that is counted."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from gateway.domain.networks import source_of
from gateway.errors import EvenhandError, InvalidKey, TooManyAttempts, TooManyChanges

MAX_VAIN = 10_000


class Throttle(Protocol):
    """Counts events of one kind by who causes them: so many in a time, and no more.

    Never raises, and takes a moment at most, whatever becomes of the place where counts are kept.
    """

    async def count(self, who: str) -> int:
        """Count an event. 0: it is within the rate. Else it is not counted, and one will be in so many seconds."""

    async def wait_s(self, who: str) -> int:
        """What `count` would answer now; counts nothing."""


class Unthrottled:
    """Implements `Throttle`, and lets everything pass."""

    async def count(self, who: str) -> int:  # noqa: ARG002 - the port's
        return 0

    async def wait_s(self, who: str) -> int:  # noqa: ARG002
        return 0


class Guesses:
    """What is done about those who try out keys or tokens, by the network address that they come from.

    Only attempts that fail are counted, and a right key is let in however many wrong ones come from its address, since
    that may be a whole office. Once an address is over its rate

    - whoever fails is told to wait, instead of what was wrong;
    - a key of which nothing is known here is refused before it is looked up.

    The latter has a count of its own, to which a wrong key counts once, however often it comes. Else one program of the
    office that goes on and on with an old key would keep new keys of the others out; now only somebody who tries many
    can, and even that only the keys which this process has not seen being right yet.

    Attempts are counted when they have failed, so those that are under way at a time may all be looked up.

    Args:
        failures: of attempts that failed.
        lookups: of different keys that were looked up in vain.
    """

    def __init__(self, failures: Throttle, lookups: Throttle) -> None:
        self._failures = failures
        self._lookups = lookups
        self._vain: OrderedDict[str, None] = OrderedDict()

    async def check(self, address: str, public_id: str) -> None:
        """Raises `TooManyAttempts` if this key must not be looked up now. Not to be asked of one known to be right."""
        throttle = self._failures if public_id in self._vain else self._lookups
        seconds = await throttle.wait_s(source_of(address))
        if seconds > 0:
            raise TooManyAttempts(seconds)

    async def failed(self, address: str, error: InvalidKey, *, vain: str | None = None) -> EvenhandError:
        """Count an attempt that failed; what to raise: the error, or `TooManyAttempts`.

        Args:
            vain: the public id, if it was looked up, and would be again the next time for all that is kept here.
        """
        source = source_of(address)
        if vain is not None and vain not in self._vain:
            self._vain[vain] = None
            if len(self._vain) > MAX_VAIN:
                self._vain.popitem(last=False)
            await self._lookups.count(source)
        seconds = await self._failures.count(source)
        return error if seconds == 0 else TooManyAttempts(seconds)


async def check_changes(throttle: Throttle, token_id: str) -> None:
    """Count a change that an administrator asks for. Raises `TooManyChanges`."""
    seconds = await throttle.count(token_id)
    if seconds > 0:
        raise TooManyChanges(seconds)
