"""Pins in the simulated engine: those of ``batch_agent.vllm_pin``, on the simulated pool of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import overload

from batch_agent.backends.simulated.blocks import BlockName, BlockPool
from batch_agent.vllm_pin import EngineBlock, Order, Pins


class PinnableBlock:
    """A block as vLLM has it."""

    __slots__ = ("_pool", "block_id", "is_null")

    def __init__(self, pool: BlockPool, block_id: int) -> None:
        self._pool, self.block_id, self.is_null = pool, block_id, False

    @property
    def ref_cnt(self) -> int:
        return self._pool.holders(self.block_id)

    @property
    def block_hash(self) -> BlockName | None:
        return self._pool.name_of(self.block_id)


class PinnableBlocks(Sequence[PinnableBlock]):
    """The pool as vLLM has it. Each block is made when it is looked at."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.num_gpu_blocks = pool.size
        self.blocks: Sequence[EngineBlock] = self

    def __len__(self) -> int:
        return self.num_gpu_blocks

    @overload
    def __getitem__(self, place: int) -> PinnableBlock: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[PinnableBlock]: ...
    def __getitem__(self, place: int | slice) -> PinnableBlock | Sequence[PinnableBlock]:
        if isinstance(place, slice):
            return [PinnableBlock(self._pool, number) for number in range(*place.indices(self.num_gpu_blocks))]
        return PinnableBlock(self._pool, place)

    def touch(self, blocks: Sequence[EngineBlock]) -> None:
        self._pool.hold(block.block_id for block in blocks)

    def free_blocks(self, ordered_blocks: Iterable[EngineBlock]) -> None:
        """In the order of eviction, of which the pool takes the reverse."""
        self._pool.release([block.block_id for block in ordered_blocks][::-1])

    def get_num_free_blocks(self) -> int:
        return self._pool.idle


class EnginePins:
    """What the simulated engine does about orders, as ``PinConnector`` does it in vLLM."""

    def __init__(self, pool: BlockPool, clock: Callable[[], float]) -> None:
        self.pins = Pins(PinnableBlocks(pool), clock=clock)

    def arrived(self, order: Order) -> None:
        for key in order.release:
            self.pins.release(key)
        self.pins.hold(order.pin)

    def finished(self, order: Order, blocks: Sequence[int]) -> None:
        if order.pin and order.seconds:
            self.pins.pin(order.pin, blocks, order.seconds)
        elif order.pin:
            self.pins.release(order.pin)
