"""A KV connector for vLLM that keeps an agent's context in the GPU cache while the agent waits for a tool.

vLLM evicts the least recently used blocks. It does not know that an agent in a tool wait comes back, and that a
finished one does not. With this connector a request can order that its blocks stay, for a limited time:

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "PinConnector",
        "kv_connector_module_path": "batch_agent.vllm_pin", "kv_role": "kv_both"}'

    "kv_transfer_params": {"batch_agent": {"pin": KEY, "seconds": 20, "release": [KEY, ...]}}

When the request finishes, its full blocks are pinned under ``pin`` for ``seconds``, instead of what was pinned under
that key before; without ``seconds`` the key is released. Keys in ``release`` are released when the request arrives. The
answer has ``kv_transfer_params.batch_agent.pinned_tokens`` (not in a streamed answer).

Limits, so that pins never stop the engine: they hold at most ``pin_share`` of the blocks (0.8) for at most
``pin_seconds`` (60; both in ``kv_connector_extra_config``). They leave the blocks that the next step needs, and they
are released when a waiting request does not fit otherwise. A malformed order is ignored. Resetting the connector's
cache releases all pins.

The module needs vLLM 0.22 or later, and nothing but the standard library beside it. It imports vLLM when
``PinConnector`` is looked up, so that it can be imported without.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

ORDER = "batch_agent"  # the key in kv_transfer_params, of a request and of its answer
SHARE = 0.8  # of the blocks that pins may hold
LONGEST = 60.0  # seconds of a pin
LONGEST_KEY, MOST_KEYS = 200, 1_000  # characters of a key, keys in one order
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
NOT_WANTED = ("FINISHED_ABORTED", "FINISHED_ERROR")  # no agent waits for the next turn of such a request


class EngineBlock(Protocol):
    """A block of the GPU cache, as vLLM has it."""

    @property
    def block_id(self) -> int: ...
    @property
    def ref_cnt(self) -> int: ...
    @property
    def is_null(self) -> bool: ...
    @property
    def block_hash(self) -> object | None: ...


class EngineBlocks(Protocol):
    """The part of vLLM's block pool that pins use."""

    num_gpu_blocks: int
    blocks: Sequence[EngineBlock]

    def touch(self, blocks: Sequence[EngineBlock]) -> None: ...
    def free_blocks(self, ordered_blocks: Iterable[EngineBlock]) -> None: ...
    def get_num_free_blocks(self) -> int: ...


class EnginePool(EngineBlocks, Protocol):
    """The part of vLLM's block pool that the connector uses."""

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> Sequence[EngineBlock] | None: ...


class EngineRequest(Protocol):
    """The part of vLLM's request that pins use."""

    num_tokens: int
    kv_transfer_params: Mapping[str, object] | None
    status: object
    block_hashes: Sequence[bytes]


class EngineStep(Protocol):
    num_scheduled_tokens: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Order:
    """What a request asks for. ``seconds`` is 0 where its key is only released."""

    pin: str = ""
    seconds: float = 0.0
    release: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        given = {"pin": self.pin, "seconds": round(self.seconds, 1), "release": list(self.release)}
        return {name: value for name, value in given.items() if value}


def read_order(params: Mapping[str, object] | None) -> Order | None:
    """Return the order in a request's ``kv_transfer_params``; None if there is none, or if it is malformed."""
    order = params.get(ORDER) if isinstance(params, Mapping) else None
    if not isinstance(order, Mapping):
        return None
    pin = order.get("pin", "")
    seconds = order.get("seconds", 0.0)
    release = order.get("release", ())
    if not _is_key(pin) or isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        return None
    if not isinstance(release, list | tuple) or len(release) > MOST_KEYS or not all(map(_is_key, release)):
        return None
    return Order(str(pin), float(seconds), tuple(map(str, release)))


def _is_key(value: object) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_KEY


@dataclass(slots=True)
class Pin:
    until: float
    blocks: list[EngineBlock]


class Pins:
    """Blocks that are kept from eviction, by key. A pin is one reference to each of its blocks."""

    def __init__(
        self,
        pool: EngineBlocks,
        *,
        share: float = SHARE,
        longest: float = LONGEST,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._clock = pool, clock
        self._most_blocks = int(share * pool.num_gpu_blocks)
        self._longest = longest
        self._pins: dict[str, Pin] = {}
        self._held: Counter[int] = Counter()  # pins of each block

    @property
    def blocks(self) -> int:
        """Distinct blocks that are pinned."""
        return len(self._held)

    def pin(self, key: str, block_ids: Iterable[int], seconds: float) -> int:
        """Pin the blocks under the key, in place of what the key held. Returns how many were pinned. Blocks without a
        hash are left out, because they cannot be hit again; so are blocks beyond the share, from the end of the
        context."""
        self.expire()
        taken: list[EngineBlock] = []
        room = self._most_blocks - len(self._held)
        for number in block_ids:
            block = self._pool.blocks[number]
            if block.is_null or block.block_hash is None:
                continue
            if number not in self._held:
                room -= 1
                if room < 0:
                    break
            taken.append(block)
        self._pool.touch(taken)
        self._held.update(block.block_id for block in taken)
        self.release(key)  # after the new references: what both have is never free
        if taken:
            self._pins[key] = Pin(self._clock() + min(seconds, self._longest), taken)
        return len(taken)

    def hold(self, key: str) -> None:
        """Keep the blocks of the key until the next request under it, which has arrived, has finished."""
        if key in self._pins:
            self._pins[key].until = self._clock() + self._longest

    def release(self, key: str) -> None:
        pin = self._pins.pop(key, None)
        if pin is None:
            return
        for block in pin.blocks:
            self._held[block.block_id] -= 1
            if not self._held[block.block_id]:
                del self._held[block.block_id]
        self._pool.free_blocks(reversed(pin.blocks))  # the end of a context is evicted before its beginning

    def expire(self) -> None:
        now = self._clock()
        for key in [key for key, pin in self._pins.items() if pin.until <= now]:
            self.release(key)

    def make_room(self, needed: int, *, whole: bool = False) -> None:
        """Release pins until this many blocks are free; those that end last are released first. ``whole``: if releasing
        all of them would not be enough, release none: the blocks are held by running requests."""
        self.expire()
        free = self._pool.get_num_free_blocks()
        if not self._pins or free >= needed:
            return
        if whole:
            only_pinned = sum(self._pool.blocks[number].ref_cnt == pins for number, pins in self._held.items())
            if free + only_pinned < needed:
                return
        for key, _ in sorted(self._pins.items(), key=lambda item: item[1].until, reverse=True):
            self.release(key)
            if self._pool.get_num_free_blocks() >= needed:
                return

    def clear(self) -> None:
        for key in list(self._pins):
            self.release(key)


class _Pinning:
    """The methods of ``PinConnector``. Only the scheduler's copy has pins: no KV is moved."""

    _pins: Pins | None = None
    _pool: EnginePool | None = None
    _asked = False  # in this step a waiting request asked for blocks

    def __init__(self, vllm_config: object, role: object, kv_cache_config: object) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        config = getattr(vllm_config, "kv_transfer_config", None)
        extra = getattr(config, "kv_connector_extra_config", None) or {}
        self._share = min(0.95, max(0.0, float(extra.get("pin_share", SHARE))))
        self._longest = max(0.0, float(extra.get("pin_seconds", LONGEST)))
        self._block_size = max(1, int(getattr(getattr(vllm_config, "cache_config", None), "block_size", None) or 16))

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # Scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: EnginePool) -> None:
        self._pool = gpu_block_pool
        self._pins = Pins(gpu_block_pool, share=self._share, longest=self._longest)

    def on_new_request(self, request: EngineRequest) -> None:
        order = read_order(request.kv_transfer_params)
        if self._pins is None or order is None:
            return
        for key in order.release:
            self._pins.release(key)
        self._pins.hold(order.pin)

    def get_num_new_matched_tokens(self, request: EngineRequest, num_computed_tokens: int) -> tuple[int, bool]:
        """Return that nothing is loaded. The request is about to get its blocks, so pins make room for it."""
        if self._pins is not None and self._pool is not None and self._pins.blocks:
            self._asked = True
            whole = -(-request.num_tokens // self._block_size)
            if self._pool.get_num_free_blocks() <= whole:
                held = self._held_hits(request, num_computed_tokens // self._block_size)
                self._pins.make_room(whole - held + 1, whole=True)
        return 0, False

    def _held_hits(self, request: EngineRequest, hits: int) -> int:
        """Return how many cached blocks of the request are in use or pinned, and so are not taken from the free
        ones."""
        held = 0
        for block_hash in request.block_hashes[:hits]:
            found = None if self._pool is None else self._pool.get_cached_block(block_hash, [0])
            if not found:
                break
            held += found[0].ref_cnt > 0
        return held

    def update_state_after_alloc(self, request: EngineRequest, blocks: object, num_external_tokens: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: EngineStep) -> object:
        """Called in each step. Pins are released so that running requests find enough free blocks, as if the next step
        were like this one. If a request asked for blocks and nothing could be scheduled in this step, all pins are
        released."""
        if self._pins is not None:
            scheduled = scheduler_output.num_scheduled_tokens
            if self._asked and not scheduled:
                self._pins.clear()
            self._asked = False
            self._pins.make_room(-(-sum(scheduled.values()) // self._block_size) + 2 * len(scheduled))
        return import_module(BASE).KVConnectorMetadata()

    def request_finished(self, request: EngineRequest, block_ids: list[int]) -> tuple[bool, dict[str, object] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: EngineRequest, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, object] | None]:
        order = read_order(request.kv_transfer_params)
        if self._pins is None or order is None or not order.pin:
            return False, None
        if not order.seconds or getattr(request.status, "name", "") in NOT_WANTED:
            self._pins.release(order.pin)
            return False, None
        # Of several groups of layers, all blocks of one place in the context together.
        longest = max(map(len, block_ids), default=0)
        numbers = [ids[place] for place in range(longest) for ids in block_ids if place < len(ids)]
        pinned = self._pins.pin(order.pin, numbers, order.seconds)
        tokens = pinned * self._block_size // max(1, len(block_ids))
        return False, {ORDER: {"pinned_tokens": tokens, "seconds": min(order.seconds, self._longest)}}

    def reset_cache(self) -> bool:
        if self._pins is not None:
            self._pins.clear()
        return True

    # Worker

    def start_load_kv(self, forward_context: object, **kwargs: object) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: object, attn_metadata: object, **kwargs: object) -> None:
        return

    def wait_for_save(self) -> None:
        return


def __getattr__(name: str) -> object:
    """``PinConnector``, made when vLLM looks it up."""
    if name != "PinConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base = import_module(BASE)
    bases = (_Pinning, base.KVConnectorBase_V1, base.SupportsHMA)
    connector = type(name, bases, {"__module__": __name__, "__doc__": __doc__})
    globals()[name] = connector
    return connector
