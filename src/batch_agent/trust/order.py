"""The order of rows by a keyed hash of their ids.

Every prefix of this order is a random sample of the table, a longer prefix contains a shorter one, and the order is the
same in every process and after every resume.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from hashlib import blake2b

PILOT_KEY = "batch-agent pilot"  # a constant, so that two prompts are tried on the same rows
SEALED_KEY = "batch-agent sealed gold"


class KeyedOrder:
    """The order of ids by their hash with one key."""

    def __init__(self, key: str = PILOT_KEY) -> None:
        self._hash = blake2b(key=blake2b(key.encode("utf-8", "surrogatepass")).digest(), digest_size=16)

    def rank(self, name: str) -> bytes:
        """Return the hash of an id. Ids are ordered by it."""
        made = self._hash.copy()
        made.update(name.encode("utf-8", "surrogatepass"))
        return made.digest()

    def first(self, names: Iterable[str], count: int) -> list[int]:
        """Return the positions of the ``count`` names that come first in this order, sorted by this order. Equal names
        are ordered by position."""
        ranked = ((self.rank(name), position) for position, name in enumerate(names))
        return [position for _, position in heapq.nsmallest(count, ranked)]

    def in_first_half(self, name: str) -> bool:
        """Return whether the hash of an id is in the lower half of all possible hashes. The result does not depend on
        other rows."""
        return self.rank(name)[0] < 128
