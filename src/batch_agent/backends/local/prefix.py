"""Tracks from outside which prompt blocks the engine has cached, to decide which request starts now and which waits.

The engine shares the KV cache of equal prompt prefixes in blocks of BLOCK_TOKENS, but only after they are computed: two
requests that start cold together both compute them. A request whose next block is being computed by another one waits
for that one's first token. Pure bookkeeping: no engine, no clock.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable

BLOCK_TOKENS = 32  # of the engine's CPU device

Chain = tuple[int, ...]  # one hash per full block, each of everything up to its end


def chain_of(tokens: array[int]) -> Chain:
    link, out = 0, []
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        link = hash((link, tokens[end - BLOCK_TOKENS : end].tobytes()))
        out.append(link)
    return tuple(out)


class PrefixCache:
    """``capacity`` is the engine's number of blocks. Like the engine, it then drops the least recently used."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: OrderedDict[int, None] = OrderedDict()
        self._coming: dict[int, int] = {}  # block → the request that computes it

    def begin(self, request: int, chain: Chain) -> int | None:
        """Return the number of cached leading blocks; this request now computes the rest. None: wait."""
        held = 0
        while held < len(chain) and chain[held] in self._held:
            held += 1
        if held < len(chain) and chain[held] in self._coming:
            return None
        for block in chain[held:]:
            self._coming.setdefault(block, request)
        self._touch(chain[:held])
        return held

    def computed(self, request: int, chain: Chain) -> None:
        """Record the request's first token: every block of its prompt is now cached."""
        self.drop(request, chain)
        self._touch(chain)

    def drop(self, request: int, chain: Chain) -> None:
        """Record the end of the request, whether or not its blocks were computed."""
        for block in chain:
            if self._coming.get(block) == request:
                del self._coming[block]

    def _touch(self, chain: Iterable[int]) -> None:
        # In reverse order, so that the start of a chain, which more requests share, is dropped last.
        for block in reversed(tuple(chain)):
            self._held[block] = None
            self._held.move_to_end(block)
        while len(self._held) > self._capacity:
            self._held.popitem(last=False)
