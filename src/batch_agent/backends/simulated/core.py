"""The engine as pure code: ``add`` requests, then ``schedule`` a step and ``complete`` it, until nothing is left.

One step is one forward pass, as in vLLM: running sequences first, each decoding a token or prefilling its next chunk,
then new ones from the queue while tokens, sequences and KV blocks last. If a running sequence finds no free block, the
last one in line is preempted and later recomputed from its start. No clock, no I/O, no randomness: the same calls give
the same steps. ``backend`` adds time and callers, and sets ``now``.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace

from batch_agent.backends.simulated.model import EngineModel
from batch_agent.backends.simulated.tokens import TOKEN_BYTES, count_tokens
from batch_agent.errors import ContextOverflow, InternalError, Rejected, Unavailable
from batch_agent.vllm_pin import EngineBlock, Order, Pins

BlockName = bytes  # digest of a block's tokens and of all tokens before it


@dataclass(slots=True, eq=False)
class Block:
    """A block, with vLLM's names: ``ref_cnt`` holders, ``block_hash`` its name."""

    block_id: int
    ref_cnt: int = 0
    block_hash: BlockName | None = None
    is_null: bool = False


class BlockPool:
    """The paged KV cache: a fixed number of blocks, given by number, shared by content, evicted least recently used
    first. Pins (``batch_agent.vllm_pin``) use it like vLLM's pool.

    A block is *held* while a running sequence refers to it and *idle* otherwise. An idle block keeps its content and
    its name until its memory is needed; a prefix hit reuses it at no cost.
    """

    def __init__(self, size: int) -> None:
        self.num_gpu_blocks = size
        self._blocks = [Block(number) for number in range(size)]
        self.blocks: Many[EngineBlock] = self._blocks
        self._named: dict[BlockName, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(size))  # in order of eviction

    @property
    def held(self) -> int:
        return self.num_gpu_blocks - len(self._idle)

    def get_num_free_blocks(self) -> int:
        return len(self._idle)

    def touch(self, blocks: Many[EngineBlock]) -> None:
        self.hold(block.block_id for block in blocks)

    def free_blocks(self, ordered_blocks: Iterable[EngineBlock]) -> None:
        """Release the blocks in the order of eviction."""
        self.release([block.block_id for block in ordered_blocks][::-1])

    def find(self, names: Many[BlockName]) -> list[int]:
        """Return the blocks of the longest cached prefix of ``names``; holds nothing yet."""
        found = []
        for name in names:
            block = self._named.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def room_for(self, fresh: int, hits: Many[int]) -> bool:
        """Return whether ``fresh`` new blocks can be taken while ``hits`` are held: an idle block that is a hit cannot
        be taken."""
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

    def release(self, blocks: Many[int]) -> None:
        """Release the blocks, deepest first: a conversation's end is evicted before the prefix that others share."""
        for number in reversed(blocks):
            block = self._blocks[number]
            if block.ref_cnt < 1:
                raise InternalError(f"KV block {number} released without being held")
            block.ref_cnt -= 1
            if not block.ref_cnt:
                self._idle[number] = None


class OffloadTier:
    """A slower memory with a copy of every block that was computed. When it is full, the least recently used copies are
    dropped."""

    def __init__(self, size: int) -> None:
        self.size = size  # blocks; 0: there is none
        self._names: OrderedDict[BlockName, None] = OrderedDict()

    def store(self, name: BlockName) -> None:
        if self.size:
            self._names[name] = None
            self._names.move_to_end(name)
            if len(self._names) > self.size:
                self._names.popitem(last=False)

    def find(self, names: Many[BlockName]) -> int:
        """Return how many of the first ``names`` this memory has."""
        for count, name in enumerate(names):
            if name not in self._names:
                return count
            self._names.move_to_end(name)
        return len(names)


@dataclass(slots=True, eq=False)
class Sequence:
    """One request. ``output`` is the complete answer, known from the start and revealed token by token."""

    prompt: bytes
    output: bytes
    arrival: int
    priority: int = 0
    generated: int = 0
    computed: int = 0  # tokens whose KV is in blocks
    blocks: list[int] = field(default_factory=list)
    cached_tokens: int | None = None  # prompt tokens found in the cache on its first run
    prompt_tokens: int = 0
    output_tokens: int = 0
    named: int = 0  # blocks that have a name for their content
    names: list[BlockName] = field(default_factory=list)
    ended: bool = False
    order: Order | None = None  # what to pin when it ends

    @property
    def known(self) -> int:
        """The number of tokens that exist: the prompt and the answer so far."""
        return self.prompt_tokens + self.generated


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    seconds: float
    shares: Mapping[Sequence, int]  # tokens of each sequence, in the order of their precedence


@dataclass(slots=True)
class Counters:
    """Counts since the engine was created."""

    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0  # prompt tokens looked up
    prefix_hits: int = 0  # ... and found
    prompt_tokens: int = 0
    prompt_tokens_computed: int = 0  # including recomputation after preemption
    generated_tokens: int = 0
    finished: int = 0
    aborted: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """What the engine's metrics show: counts at the end of a step. ``waiting``: requests that waited when the step
    began. A request that arrived during the step is in no number, as in vLLM."""

    running: int = 0
    waiting: int = 0
    held: int = 0  # blocks
    counters: Counters = field(default_factory=Counters)


class SimulatedEngine:
    def __init__(self, model: EngineModel) -> None:
        self.model = model
        self._began: float | None = None  # when the first request arrived
        self._newest = self._published = Reading()  # of the last step that has ended; what metrics show
        self._published_at = -math.inf
        self._waited = 0  # requests that were left waiting when the current step began
        self.pool = BlockPool(model.blocks)
        self.offload = OffloadTier(model.offload_tokens // model.block_size)
        self.counters = Counters()
        self.running: list[Sequence] = []  # in order of precedence: the last is preempted first
        self._queue: list[tuple[tuple[int, int], Sequence]] = []  # a heap; aborted ones are skipped
        self._waiting = 0
        self._arrivals = 0
        self.now = 0.0  # for pins alone
        self.pins = Pins(self.pool, clock=lambda: self.now)

    @property
    def waiting(self) -> int:
        return self._waiting

    def reading(self, now: float) -> Reading:
        """Return what metrics show at this time: late, as on real engines (``EngineModel.reading_seconds``)."""
        is_cold = self._began is None or now < self._began + self.model.first_reading_seconds
        if not is_cold and now >= self._published_at + self.model.reading_seconds:
            self._published, self._published_at = self._newest, now
        return self._published

    def check(self, prompt: bytes, output: bytes, count: int = 1) -> None:
        """Raise the error with which a server would answer ``count`` requests of this size now."""
        limit, asked = self.model.context_tokens, count_tokens(prompt)
        if asked + count_tokens(output) > limit:
            raise ContextOverflow(
                f"This model's maximum context length is {limit} tokens. However, your request has {asked} input "
                f"tokens and {count_tokens(output)} output tokens (simulated).",
                status=400,
            )
        if not prompt or not output:
            raise Rejected("a simulated request has at least one prompt token and one output token", status=400)
        if self.model.max_queued is not None and self._waiting + count > self.model.max_queued:
            raise Unavailable(f"the simulated queue is full: {self._waiting} requests wait", status=503)

    def add(self, prompt: bytes, output: bytes, priority: int = 0, order: Order | None = None) -> Sequence:
        self.check(prompt, output)
        sequence = Sequence(prompt, output, self._arrivals, priority, order=order)
        if self._began is None:
            self._began = self.now
        if order is not None:
            for key in order.release:
                self.pins.release(key)
            self.pins.hold(order.pin)
        sequence.prompt_tokens = count_tokens(prompt)
        sequence.output_tokens = count_tokens(output)
        self._arrivals += 1
        self._enqueue(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Abort a sequence whose client has left. An ended sequence stays unchanged."""
        if sequence.ended:
            return
        self.counters.aborted += 1
        if sequence in self.running:
            self._end(sequence)
        else:
            sequence.ended = True
            self._waiting -= 1

    def schedule(self) -> SimulatedStep | None:
        """Return the next forward pass; None if there is nothing to compute."""
        if self.pins.blocks:
            self._make_room()
        room = self.model.max_batched_tokens
        preempted = self.counters.preemptions
        shares = self._continue_running(room)
        loaded = 0
        if self.counters.preemptions == preempted:
            loaded = self._admit(room - sum(shares.values()), shares)
        if not shares and self._waiting and self.pins.blocks:
            self.pins.clear()  # never in the way of the only request
            loaded = self._admit(room, shares)
        if not shares:
            return None
        self._waited = self._waiting
        prefill = sum(tokens for sequence, tokens in shares.items() if sequence.computed < sequence.known - 1)
        decoding = sum(1 for sequence in shares if sequence.computed == sequence.known - 1)
        seconds = (
            self.model.step_seconds
            + decoding * self.model.sequence_seconds
            + prefill / self.model.prefill_tokens_per_second
            + (self.model.prefill_step_seconds if prefill else 0.0)
            + loaded / self.model.offload_tokens_per_second
        )
        return SimulatedStep(seconds, shares)

    def complete(self, step: SimulatedStep) -> list[Sequence]:
        """Apply the step's results. Returns the sequences that got a token; finished ones are ``ended``."""
        advanced = []
        self.counters.steps += 1
        for sequence, tokens in step.shares.items():
            if sequence.ended:
                continue
            prompt_left = max(0, sequence.prompt_tokens - sequence.computed)
            self.counters.prompt_tokens_computed += min(tokens, prompt_left)
            sequence.computed += tokens
            if sequence.computed == sequence.known:
                sequence.generated += 1
                self.counters.generated_tokens += 1
                advanced.append(sequence)
                if sequence.generated == sequence.output_tokens:
                    self.counters.finished += 1
                    self._end(sequence)
        self._newest = Reading(len(self.running), self._waited, self.pool.held, replace(self.counters))
        return advanced

    def _make_room(self) -> None:
        """Release pins for what running sequences need in this step, and for the first request of the queue."""
        room = self.model.max_batched_tokens
        growing = sum(min(room, sequence.known - sequence.computed) for sequence in self.running)
        needed = self._blocks_for(min(room, growing)) + len(self.running)
        self.pins.make_room(needed)
        if self._queue and not self._queue[0][1].ended:
            first = self._queue[0][1]
            held = sum(1 for block in self._prefix(first) if self.pool.blocks[block].ref_cnt)
            self.pins.make_room(needed + self._blocks_for(first.known) - held, whole=True)

    def _continue_running(self, room: int) -> dict[Sequence, int]:
        shares: dict[Sequence, int] = {}
        position = 0
        while position < len(self.running) and room > 0:
            sequence = self.running[position]
            tokens = min(sequence.known - sequence.computed, room)
            while not self._grow(sequence, tokens):
                victim = self.running.pop()
                self._preempt(victim)
                if victim is sequence:
                    return shares
            shares[sequence] = tokens
            room -= tokens
            position += 1
        return shares

    def _admit(self, room: int, shares: dict[Sequence, int]) -> int:
        """Start requests of the queue. Returns the tokens that are loaded from the slower memory for them."""
        loaded = 0
        while room > 0 and self._queue and len(self.running) < self.model.max_num_seqs:
            sequence = self._queue[0][1]
            if sequence.ended:
                heapq.heappop(self._queue)
                continue
            hits = self._prefix(sequence)
            offloaded = self._offloaded(sequence, len(hits))
            found = (len(hits) + offloaded) * self.model.block_size
            tokens = min(sequence.known - found, room)
            if not self.pool.room_for(self._blocks_for(found + tokens) - len(hits), hits):
                return loaded  # strict order: short requests must not starve a long one
            heapq.heappop(self._queue)
            self._start(sequence, hits, offloaded)
            loaded += offloaded * self.model.block_size
            if not self._grow(sequence, tokens):
                raise InternalError("the simulated engine admitted a request it has no KV blocks for")
            shares[sequence] = tokens
            room -= tokens
        return loaded

    def _offloaded(self, sequence: Sequence, hits: int) -> int:
        """Return how many blocks after the ``hits`` are in the slower memory."""
        usable = (sequence.known - 1) // self.model.block_size
        return self.offload.find(sequence.names[hits:usable]) if self.offload.size and self.model.prefix_caching else 0

    def _start(self, sequence: Sequence, hits: list[int], offloaded: int = 0) -> None:
        self._waiting -= 1
        self.pool.hold(hits)
        sequence.blocks = hits
        sequence.named = len(hits)
        sequence.computed = (len(hits) + offloaded) * self.model.block_size
        if sequence.cached_tokens is None:  # a preempted sequence is looked up again, but counts once
            sequence.cached_tokens = sequence.computed
            self.counters.prompt_tokens += sequence.prompt_tokens
            if self.model.prefix_caching:
                self.counters.prefix_queries += sequence.prompt_tokens
                self.counters.prefix_hits += sequence.computed
        self.running.append(sequence)
        if self.model.policy == "priority":
            self.running.sort(key=self._precedence)

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Take blocks for ``tokens`` more. Returns False, and takes nothing, if there is no room."""
        until = sequence.computed + tokens
        fresh = self._blocks_for(until) - len(sequence.blocks)
        if fresh > self.pool.get_num_free_blocks():
            return False
        sequence.blocks.extend(self.pool.take(fresh))
        if self.model.prefix_caching:
            # Named when scheduled, not when computed: attention of the same pass can already read them.
            full = until // self.model.block_size
            for index in range(sequence.named, full):
                name = self._name(sequence, index)
                self.pool.name(sequence.blocks[index], name)
                self.offload.store(name)
            sequence.named = max(sequence.named, full)
        return True

    def _prefix(self, sequence: Sequence) -> list[int]:
        if not self.model.prefix_caching:
            return []
        # The last known token is always computed: it produces the next token.
        usable = (sequence.known - 1) // self.model.block_size
        if usable:
            self._name(sequence, usable - 1)
        return self.pool.find(sequence.names[:usable])

    def _name(self, sequence: Sequence, index: int) -> BlockName:
        width = self.model.block_size * TOKEN_BYTES
        names = sequence.names
        while len(names) <= index:
            start = len(names) * width
            text = sequence.prompt[start : start + width]
            if len(text) < width:
                behind = max(0, start - len(sequence.prompt))
                text += sequence.output[behind : behind + width - len(text)]
            names.append(hashlib.blake2b((names[-1] if names else b"") + text, digest_size=16).digest())
        return names[index]

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.model.block_size)

    def _preempt(self, sequence: Sequence) -> None:
        self.counters.preemptions += 1
        self._release(sequence)
        self._enqueue(sequence)

    def _end(self, sequence: Sequence) -> None:
        sequence.ended = True
        self.running.remove(sequence)
        order, is_whole = sequence.order, sequence.generated == sequence.output_tokens
        if order is not None and order.pin and order.seconds and is_whole:
            self.pins.pin(order.pin, sequence.blocks, order.seconds)
        elif order is not None and order.pin:
            self.pins.release(order.pin)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.named = 0
        sequence.computed = 0

    def _enqueue(self, sequence: Sequence) -> None:
        # A preempted sequence arrived before all waiting ones, so its arrival time puts it first.
        self._waiting += 1
        heapq.heappush(self._queue, (self._precedence(sequence), sequence))

    def _precedence(self, sequence: Sequence) -> tuple[int, int]:
        return (sequence.priority if self.model.policy == "priority" else 0, sequence.arrival)
