"""The paged KV cache: a fixed number of blocks, shared by content, evicted least recently used first.

A block is *held* while a running sequence refers to it and *idle* otherwise. An idle block keeps its content and its
name until its memory is needed; a prefix hit reuses it at no cost. This file knows blocks and their names; the engine
knows their content and holders.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from batch_agent.errors import InternalError

BlockName = bytes  # digest of a block's tokens and of all tokens before it


class BlockPool:
    def __init__(self, size: int) -> None:
        self.size = size
        self.evictions = 0
        self._holders = [0] * size
        self._names: list[BlockName | None] = [None] * size
        self._named: dict[BlockName, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(size))  # in order of eviction

    @property
    def held(self) -> int:
        return self.size - len(self._idle)

    @property
    def idle(self) -> int:
        return len(self._idle)

    def holders(self, block: int) -> int:
        return self._holders[block]

    def name_of(self, block: int) -> BlockName | None:
        return self._names[block]

    def find(self, names: Sequence[BlockName]) -> list[int]:
        """Return the blocks of the longest cached prefix of ``names``; holds nothing yet."""
        found = []
        for name in names:
            block = self._named.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def room_for(self, fresh: int, hits: Sequence[int]) -> bool:
        """Return whether ``hits`` can be held and ``fresh`` more blocks taken: an idle hit is not available to be
        taken."""
        return fresh + sum(1 for block in hits if not self._holders[block]) <= len(self._idle)

    def hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if not self._holders[block]:
                del self._idle[block]
            self._holders[block] += 1

    def take(self, count: int) -> list[int]:
        """Return new blocks, evicting what was cached longest ago; the caller has checked for room."""
        taken = []
        for _ in range(count):
            block, _ = self._idle.popitem(last=False)
            name = self._names[block]
            if name is not None:
                del self._named[name]
                self._names[block] = None
                self.evictions += 1
            self._holders[block] = 1
            taken.append(block)
        return taken

    def name(self, block: int, name: BlockName) -> None:
        """Make ``block`` findable by its content. A second block with the same content stays nameless."""
        if name not in self._named:
            self._named[name] = block
            self._names[block] = name

    def release(self, blocks: Sequence[int]) -> None:
        """Release the blocks, deepest first, so that a conversation's end is evicted before the prefix it shares with
        others."""
        for block in reversed(blocks):
            if self._holders[block] < 1:
                raise InternalError(f"KV block {block} released without being held")
            self._holders[block] -= 1
            if not self._holders[block]:
                self._idle[block] = None


class OffloadTier:
    """A slower memory with a copy of every block that was computed, the least recently used ones forgotten first."""

    def __init__(self, size: int) -> None:
        self.size = size  # blocks; 0: there is none
        self._names: OrderedDict[BlockName, None] = OrderedDict()

    def store(self, name: BlockName) -> None:
        if self.size:
            self._names[name] = None
            self._names.move_to_end(name)
            if len(self._names) > self.size:
                self._names.popitem(last=False)

    def find(self, names: Sequence[BlockName]) -> int:
        """How many of the first ``names`` it has."""
        for count, name in enumerate(names):
            if name not in self._names:
                return count
            self._names.move_to_end(name)
        return len(names)
