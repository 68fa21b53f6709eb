"""The process that owns the engine: requests on stdin, answers on stdout, one JSON object per line.

In:   {"id", "job", "messages", "grammar", "max_tokens", "sampling", "logprobs"}   or {"cancel": id}
Out:  {"ready": …} once, then for each request {"id", "first": true} and {"id", "text", "finish", …} or {"id", "error"}
      {"fatal": …, "suspects": [id…]} last message of an engine that must stop

It is a separate process because a step holds the interpreter lock, and because native code may crash. It ends when
stdin ends or the parent dies. It never prints: stdout carries the protocol, and output of native code goes to stderr.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, TypeAlias

import orjson

from batch_agent.backends.local import gguf
from batch_agent.messages import JsonObject

if TYPE_CHECKING:
    from pydantic import JsonValue

BLOCK_TOKENS = 32  # of the engine's CPU device

Chain = tuple[int, ...]  # one hash per full block, each of everything up to its end


def chain_of(tokens: array[int]) -> Chain:
    link, out = 0, []
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        link = hash((link, tokens[end - BLOCK_TOKENS : end].tobytes()))
        out.append(link)
    return tuple(out)


class PrefixCache:
    """Tracks which prompt blocks the engine has cached, to decide which request starts now and which waits.
    ``capacity`` is the engine's number of blocks. Like the engine, it then drops the least recently used.

    The engine shares the KV cache of equal prompt prefixes in blocks of BLOCK_TOKENS, but only after they are computed:
    two requests that start cold together both compute them. So a request whose next block is being computed by another
    one waits for that one's first token.
    """

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


REMEMBERED_JOBS = 4096
UNREADABLE = "\ufffd"  # in place of a part of a character
BATCHED_TOKENS = 512
PR_SET_PDEATHSIG = 1


Tokenized: TypeAlias = "tuple[str, array[int]]"  # a text and its tokens


@dataclass(slots=True)
class Request:
    id: int
    job: str
    text: str
    tokens: array[int]
    chain: Chain
    config: Any  # the engine's GenerationConfig
    grammar: str | None
    handle: Any = None
    cached: int = 0
    generated: array[int] = field(default_factory=lambda: array("q"))
    logprobs: list[float] | None = None  # of the generated tokens; None: not wanted
    finish: str = ""
    ignored: bool = False  # the KV cache had no room for it


class EmbeddedEngine:
    """The loop ``schedule → step → report`` around the pipeline. Everything here runs in one thread."""

    def __init__(self, config: JsonObject, wire: BinaryIO) -> None:
        # The engine's package would send telemetry over the network; a missing module disables that.
        sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
        self._genai = import_module("openvino_genai")
        self._tensor = import_module("openvino").Tensor
        self._numpy = import_module("numpy")
        self._wire = wire
        path = Path(str(config["path"]))
        self._context = gguf.context_length(path)
        self._max_seqs = int(str(config["max_seqs"]))
        self._pipeline = open_pipeline(self._genai, path, config)
        self._tokenizer = self._pipeline.get_tokenizer()
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        self._running: dict[int, Request] = {}
        self._proven: set[str] = set()  # grammars that the engine has accepted
        self._known: OrderedDict[str, list[Tokenized]] = OrderedDict()  # job → last turn, with and without the answer
        self._prefixes = PrefixCache(self._measure_blocks())

    def _measure_blocks(self) -> int:
        """Run one token through the engine and return the number of its cache blocks. Problems with this machine appear
        now. The number follows from the share of the cache that one block uses."""
        config = self._genai.GenerationConfig(max_new_tokens=2, ignore_eos=True)
        handle = self._pipeline.add_request(0, self._as_tensor(array("q", [0])), config)
        self._pipeline.step()
        share = self._pipeline.get_metrics().cache_usage
        handle.cancel()
        self._pipeline.step()
        blocks: int = round(100 / share)
        return blocks

    def _as_tensor(self, tokens: array[int]) -> Any:
        return self._tensor(self._numpy.frombuffer(tokens, dtype=self._numpy.int64).reshape(1, -1))

    def send(self, message: JsonObject) -> None:
        self._wire.write(orjson.dumps(message) + b"\n")
        self._wire.flush()

    def serve(self, inbox: queue.SimpleQueue[JsonObject]) -> NoReturn:
        self.send({"ready": True, "context": self._context, "version": self._genai.get_version()})
        while True:
            idle = not self._running and not self._waiting
            while idle or not inbox.empty():
                self._take(inbox.get())
                idle = False
            self._admit()
            if self._running:
                self._pipeline.step()
                for request in list(self._running.values()):
                    self._report(request)

    def suspects(self) -> list[int]:
        """Return the requests whose grammar was new to the engine."""
        return [r.id for r in self._running.values() if r.grammar is not None and r.grammar not in self._proven]

    def _take(self, message: JsonObject) -> None:
        if "cancel" in message:
            self._cancel(int(str(message["cancel"])))
            return
        try:
            request = self._parse(message)
        except Exception as error:  # from the engine's template, tokenizer or option checks; affects only this request  # noqa: BLE001
            self.send({"id": message["id"], "error": "invalid", "message": str(error)})
            return
        room = self._context - len(request.tokens)
        if room < 1:
            # The tokenizer stops at the model's context length; the number of characters shows the real size.
            size = f"{len(request.tokens):,} tokens or more ({len(request.text):,} characters)"
            what = f"the prompt has {size}, the model's context is {self._context:,}"
            self.send({"id": request.id, "error": "context", "message": what})
            return
        request.config.max_new_tokens = min(request.config.max_new_tokens, room)
        self._waiting[request.id] = request

    def _parse(self, message: Any) -> Request:
        text = self._tokenizer.apply_chat_template(message["messages"], add_generation_prompt=True)
        tokens = self._tokenize(message["job"], text)
        config = self._genai.GenerationConfig(max_new_tokens=message["max_tokens"], **message["sampling"])
        if message["stop"]:
            config.stop_strings = set(message["stop"])
        if message["grammar"] is not None:
            config.structured_output_config = self._genai.StructuredOutputConfig(grammar=message["grammar"])
        told: list[float] | None = [] if message["logprobs"] else None
        if told is not None:
            config.logprobs = 1  # that of the chosen token, before the grammar forbids others
        config.validate()
        told_by = message["id"], message["job"]
        return Request(*told_by, text, tokens, chain_of(tokens), config, message["grammar"], logprobs=told)

    def _tokenize(self, job: str, text: str) -> array[int]:
        """Return the tokens of a text that starts with the job's previous turn, and reuse the tokens of that turn. A
        model may write a text with other tokens than the tokenizer, and only identical tokens are found in the
        cache."""
        turns = self._known.get(job, [])
        before, known = next((pair for pair in turns if text.startswith(pair[0])), ("", array("q")))
        if text == before:
            return known
        fresh = self._tokenizer.encode(text[len(before) :], add_special_tokens=False).input_ids.data
        return known + array("q", fresh.flatten().tolist())

    def _cancel(self, id: int) -> None:
        self._waiting.pop(id, None)
        if request := self._running.pop(id, None):
            request.handle.cancel()
            self._prefixes.drop(id, request.chain)

    def _admit(self) -> None:
        for request in list(self._waiting.values()):
            alone = request.ignored or any(other.ignored for other in self._running.values())
            if len(self._running) >= (1 if alone else self._max_seqs):
                return
            held = self._prefixes.begin(request.id, request.chain)
            if held is None:
                continue
            request.cached = min(held * BLOCK_TOKENS, len(request.tokens) - 1)
            request.handle = self._pipeline.add_request(request.id, self._as_tensor(request.tokens), request.config)
            self._running[request.id] = self._waiting.pop(request.id)

    def _report(self, request: Request) -> None:
        if request.handle.can_read():
            if not request.generated:
                self._started(request)
            for output in request.handle.read().values():
                request.generated.extend(output.generated_ids)
                if request.logprobs is not None:
                    request.logprobs.extend(output.generated_log_probs)
                request.finish = output.finish_reason.name.lower()
        status = request.handle.get_status().name
        if status != "RUNNING":
            del self._running[request.id]
            self._prefixes.drop(request.id, request.chain)
            self._ended(request, status)

    def _started(self, request: Request) -> None:
        self._prefixes.computed(request.id, request.chain)
        if request.grammar is not None:
            self._proven.add(request.grammar)
        self.send({"id": request.id, "first": True})

    def _ended(self, request: Request, status: str) -> None:
        if status == "IGNORED":
            self._try_alone(request)
            return
        tokens, end = request.generated, self._tokenizer.get_eos_token_id()
        said = tokens[:-1] if tokens and tokens[-1] == end else tokens
        text = self._tokenizer.decode(said.tolist(), skip_special_tokens=True)
        self._remember(request, text, said)
        self.send(
            {
                "id": request.id,
                "text": text,
                "finish": request.finish,
                "prompt_tokens": len(request.tokens),
                "cached_tokens": request.cached,
                "completion_tokens": len(tokens),
                "tokens": self._told(said, request.logprobs, text),
            }
        )

    def _told(self, said: array[int], logprobs: list[float] | None, text: str) -> list[JsonValue] | None:
        """Return the text of each token with its log-probability; None without log-probabilities. A token that is only
        a part of a character is joined with the next one."""
        if logprobs is None:
            return None
        told: list[JsonValue] = []
        done, sum_of_parts = 0, 0.0
        for count, logprob in enumerate(logprobs[: len(said)], start=1):
            sum_of_parts += logprob
            known = self._tokenizer.decode(said[:count].tolist(), skip_special_tokens=True).rstrip(UNREADABLE)
            if not text.startswith(known) or len(known) <= done:
                continue
            told.append([text[done : len(known)], sum_of_parts])
            done, sum_of_parts = len(known), 0.0
        return told if done == len(text) else []

    def _try_alone(self, request: Request) -> None:
        """Retry a request alone, because the KV cache had no room for it together with the others. All such requests
        fail in the same step. Alone, a request either succeeds or never fits."""
        if request.ignored:
            what = f"the KV cache is too small for a prompt of {len(request.tokens)} tokens: local://…?kv_gb=2"
            self.send({"id": request.id, "error": "context", "message": what})
            return
        request.ignored = True
        request.generated = array("q")
        self._waiting[request.id] = request
        self._waiting.move_to_end(request.id, last=False)

    def _remember(self, request: Request, text: str, said: array[int]) -> None:
        tokens = request.tokens + said
        self._prefixes.computed(request.id, chain_of(tokens[:-1]))  # the last token was sampled, not computed
        self._known[request.job] = [(request.text + text, tokens), (request.text, request.tokens)]
        self._known.move_to_end(request.job)
        if len(self._known) > REMEMBERED_JOBS:
            self._known.popitem(last=False)


def open_pipeline(genai: Any, path: Path, config: JsonObject) -> Any:
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = True
    scheduler.cache_size = config["kv_gb"]
    scheduler.max_num_seqs = config["max_seqs"]
    scheduler.max_num_batched_tokens = BATCHED_TOKENS
    properties = {
        "INFERENCE_NUM_THREADS": config["threads"],
        "ENABLE_CPU_PINNING": False,  # pinned threads wait for a busy core while another is free
        # The engine would choose bf16 if the CPU reports it: slower at this size, and an illegal instruction on virtual
        # machines that report AMX without allowing it.
        "INFERENCE_PRECISION_HINT": "f32",
    }
    return genai.ContinuousBatchingPipeline(str(path), scheduler, "CPU", properties)


def _read(source: BinaryIO, inbox: queue.SimpleQueue[JsonObject]) -> None:
    for line in source:
        inbox.put(orjson.loads(line))
    os._exit(0)  # the parent has ended or stops this process; there is nothing to save


def _die_with_parent(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


def main() -> NoReturn:
    config = orjson.loads(sys.argv[2])
    _die_with_parent(config["parent"])
    wire = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    inbox: queue.SimpleQueue[JsonObject] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, inbox), daemon=True).start()
    engine: EmbeddedEngine | None = None
    try:
        engine = EmbeddedEngine(config, wire)
        engine.serve(inbox)
    except BaseException as error:  # noqa: BLE001
        suspects = engine.suspects() if engine else []
        wire.write(orjson.dumps({"fatal": f"{type(error).__name__}: {error}", "suspects": suspects}) + b"\n")
        wire.flush()
        os._exit(1)
