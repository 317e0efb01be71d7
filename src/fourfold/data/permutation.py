"""A random order of n things that needs no table: any place of it is computed from a key.

A Feistel network over the pairs (x, y) with x < a, y < b, a b >= n: x += f(y) mod a, then y += f(x) mod b, eight times.
Every such step can be undone, so the whole is a permutation of the a b pairs. A pair beyond n is sent through it again
until it falls below n, which keeps it a permutation (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains").
"""

from __future__ import annotations

import hashlib
import json
import math
import struct

_MASK = (1 << 64) - 1
_ROUNDS = 8


def keys(*parts: object, count: int) -> tuple[int, ...]:
    """``count`` numbers of 64 bits, at most 8, that depend on each of the parts, which are numbers and strings."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8 * count).digest()
    return struct.unpack(f"<{count}Q", digest)


class Permutation:
    """The permutation of 0 ... ``size`` - 1 that ``seed`` and further parts choose.

    Args:
        size: at least 1.
        parts: what it depends on: numbers and strings.
    """

    def __init__(self, size: int, *parts: object) -> None:
        if size < 1:
            raise ValueError(f"size = {size}: must be at least 1")
        self._size = size
        self._columns = math.isqrt(size - 1) + 1
        self._rows = -(-size // self._columns)
        self._keys = keys(*parts, count=_ROUNDS)

    def __getitem__(self, place: int) -> int:
        """What stands at ``place``."""
        if not 0 <= place < self._size:
            raise IndexError(f"place {place} of a permutation of {self._size}")
        while (place := self._pass(place)) >= self._size:
            pass
        return place

    def _pass(self, place: int) -> int:
        rows, columns = self._rows, self._columns
        x, y = divmod(place, columns)
        for number in range(0, _ROUNDS, 2):
            x = (x + _mix(y + self._keys[number])) % rows
            y = (y + _mix(x + self._keys[number + 1])) % columns
        return x * columns + y


def _mix(value: int) -> int:
    """64 bits in, 64 bits out, each of which depends on all: the finalizer of splitmix64 (Steele et al. 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)
