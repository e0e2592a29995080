"""Counter-based random numbers: a draw is a function of its key, whatever else is sampled in the same step.

Philox4x32-10 (Salmon et al. 2011), the generator that GPU libraries use too, so that a kernel can make the same draws.
"""

from __future__ import annotations

from enum import IntEnum

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


class Purpose(IntEnum):
    """What a draw is for; draws for different purposes are independent."""

    TOKEN = 0


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit words from a counter of four and a key of two 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & _MASK, (first >> 32) ^ c3 ^ k1, first & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int, purpose: Purpose = Purpose.TOKEN) -> float:
    """A number in [0, 1) with 53 random bits. The seed counts modulo 2^64, choice and position modulo 2^32."""
    key = (seed & _MASK, seed >> 32 & _MASK)
    high, low, _, _ = philox((position & _MASK, choice & _MASK, int(purpose), 0), key)
    return ((high << 21) | (low >> 11)) * 2.0**-53
