"""The paged KV cache: a fixed number of blocks, shared by content, evicted least recently used first.

A block is *held* while a running sequence refers to it and *idle* otherwise. An idle block keeps its content and its
name until its memory is needed; a prefix hit reuses it at no cost. This file knows blocks and their names; the engine
knows their content and holders.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from batch_agent.errors import InternalError
from batch_agent.vllm_pin import EngineBlock

BlockName = bytes  # digest of a block's tokens and of all tokens before it


@dataclass(slots=True, eq=False)
class Block:
    """A block, with vLLM's names: ``ref_cnt`` holders, ``block_hash`` its name."""

    block_id: int
    ref_cnt: int = 0
    block_hash: BlockName | None = None
    is_null: bool = False


class BlockPool:
    """The blocks, given by number. Pins (``batch_agent.vllm_pin``) use it like vLLM's pool."""

    def __init__(self, size: int) -> None:
        self.num_gpu_blocks = size
        self._blocks = [Block(number) for number in range(size)]
        self.blocks: Sequence[EngineBlock] = self._blocks
        self._named: dict[BlockName, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(size))  # in order of eviction

    @property
    def held(self) -> int:
        return self.num_gpu_blocks - len(self._idle)

    def get_num_free_blocks(self) -> int:
        return len(self._idle)

    def touch(self, blocks: Sequence[EngineBlock]) -> None:
        self.hold(block.block_id for block in blocks)

    def free_blocks(self, ordered_blocks: Iterable[EngineBlock]) -> None:
        """Release the blocks in the order of eviction."""
        self.release([block.block_id for block in ordered_blocks][::-1])

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
        """Return whether ``hits`` can be held and ``fresh`` more blocks taken: an idle hit cannot be taken."""
        return fresh + sum(1 for block in hits if not self._blocks[block].ref_cnt) <= len(self._idle)

    def hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if not self._blocks[block].ref_cnt:
                del self._idle[block]
            self._blocks[block].ref_cnt += 1

    def take(self, count: int) -> list[int]:
        """Return new blocks, evicting what was cached longest ago; the caller has checked for room."""
        taken = []
        for _ in range(count):
            block = self._blocks[self._idle.popitem(last=False)[0]]
            if block.block_hash is not None:
                del self._named[block.block_hash]
            block.block_hash, block.ref_cnt = None, 1
            taken.append(block.block_id)
        return taken

    def name(self, block: int, name: BlockName) -> None:
        """Make ``block`` findable by its content. A second block with the same content stays nameless."""
        if name not in self._named:
            self._named[name] = block
            self._blocks[block].block_hash = name

    def release(self, blocks: Sequence[int]) -> None:
        """Release the blocks, deepest first: a conversation's end is evicted before the prefix that others share."""
        for number in reversed(blocks):
            block = self._blocks[number]
            if block.ref_cnt < 1:
                raise InternalError(f"KV block {number} released without being held")
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self._idle[number] = None


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
