"""The numbers that need a GPU, in pieces: each call measures what is still missing and stops in time.

    python -m benchmarks.numbers_gpu --state gpu.jsonl --minutes 9 --url vllm://127.0.0.1:8000
    python -m benchmarks.numbers_gpu --state gpu.jsonl --minutes 30 --serve "vllm-32b=vllm serve /models/32b
        --port {port} --served-model-name m --num-gpu-blocks-override {blocks}" --serve "vllm-7b=vllm serve ..."
    python -m benchmarks.numbers_gpu --state gpu.jsonl --results

``--url`` measures on a server that runs, and only the pieces that such a server can do: those of its engine, and of
its size of KV cache where a piece names one. ``--serve`` (or the environment: ``BATCH_AGENT_SERVE_VLLM_32B``) starts
servers one after the other, waits until each is healthy, and ends it when its pieces are done. The command stays in
the foreground; ``{tokens}`` is the KV cache that the pieces need, ``{blocks}`` the same in blocks of 16. Servers speak
the scripts that the prompts carry (``benchmarks/gpu.py`` says how).

A piece is measured in steps of a few seconds to five minutes. Each step that ends is printed as a line of JSON and
appended to the file of ``--state``, with a digest of the code that it measures; a step that is there with the present
digest is not repeated. No step begins that would not end in time. ``--results`` writes ``results/NAME-ENGINE.json`` of
the code that was measured last. Exit status: 0 when all pieces asked for are done, 3 when there is more to do, 1 when a
step failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp

from batch_agent.errors import BackendError
from benchmarks import engines, gpu, kv, people, report

Line = dict[str, Any]  # a finished step, as in the file
Step = tuple[int, str]  # repetition, variant
PORT = 8000
START_SECONDS = 300.0  # until a server is healthy, at most
USUAL_START = 120.0
CACHE_MAY_DIFFER = 0.05  # a server rounds the size of its cache
AMPLE = 150_000  # tokens of a KV cache that holds all contexts of the pieces that name no size
MORE = 3  # exit status


@dataclass(frozen=True, slots=True)
class Piece:
    name: str
    file: str  # results/FILE-ENGINE.json
    model: str  # the server that ``--serve`` starts
    play: Callable[[str, str], Awaitable[object]]  # url, variant
    seconds: float  # of a step, before one was measured
    kv_tokens: int | None = None  # that the server must have; None: enough for all
    variants: tuple[str, ...] = ("round",)
    repetitions: int = 3
    warm: bool = False  # a round of a small work comes before the first step of a call
    engines: tuple[str, ...] = ("vllm", "sglang")

    def steps(self) -> Iterator[Step]:
        for repetition in range(1, self.repetitions + 1):
            for variant in self.variants:
                yield repetition, variant


def of_kv(name: str, seconds: float) -> Piece:
    work = kv.WORKS[name]

    async def play(url: str, variant: str) -> object:
        seed = int(time.time() * 1_000) % 1_000_000
        return {"work": name, "seed": seed, **await kv.on_server(work, [url], seed, variant)}

    variants = tuple(kv.variants_of(work, ["loop", "ours"]))
    return Piece(f"kv-{name.replace(' ', '-')}", "kv", "32b", play, seconds, work.kv_tokens, variants)


def of_gpu(work: gpu.Work, seconds: float) -> Piece:
    async def play(url: str, variant: str) -> object:
        return {"work": str(work), "walls": await gpu.round_of(work, url)}

    return Piece(f"gpu-{work.agents}", "gpu", "7b", play, seconds, warm=True)


def of_engines(name: str, seconds: float) -> Piece:
    work = engines.WORKS[name]

    async def play(url: str, variant: str) -> object:
        return {"work": name, "walls": await engines.round_of(work, url)}

    return Piece(f"loop-{work.agents}", "engines", "7b", play, seconds, warm=True)


async def _people(url: str, variant: str) -> object:
    return await people.play(url, variant, whole=url.startswith("vllm"))


PIECES = {
    piece.name: piece
    for piece in (
        of_kv("growing", 85.0),
        of_kv("many turns", 135.0),
        *map(of_gpu, gpu.WORKS, (12.0, 25.0, 70.0)),
        *map(of_engines, engines.WORKS, (20.0, 35.0, 110.0)),
        Piece("people-long", "people", "7b", _people, 310.0, variants=("long",), repetitions=1),
        Piece("people-short", "people", "7b", _people, 150.0, variants=("short",), repetitions=1, engines=("vllm",)),
    )
}


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    version: str
    model: str
    kv_tokens: int | None

    @property
    def engine(self) -> str:
        return self.url.partition("://")[0]

    def lacks(self, piece: Piece) -> str:
        """Why the piece can not be measured here; empty if it can."""
        if self.engine not in piece.engines:
            return f"is not measured on {self.engine}"
        if piece.kv_tokens is None:
            small = self.kv_tokens is not None and self.kv_tokens < AMPLE
            return f"needs a KV cache for all: {AMPLE:,} tokens; the server has {self.kv_tokens:,}" if small else ""
        if self.kv_tokens is None or abs(self.kv_tokens / piece.kv_tokens - 1) > CACHE_MAY_DIFFER:
            have = "does not tell its size" if self.kv_tokens is None else f"has {self.kv_tokens:,}"
            return f"needs a KV cache of {piece.kv_tokens:,} tokens; that of the server {have}"
        return ""

    def to_dict(self) -> dict[str, object]:
        return {"version": self.version, "model": self.model, "kv_tokens": self.kv_tokens}


async def server_at(url: str) -> Server:
    """What runs at a URL. Raises ``SystemExit`` if nothing does."""
    base = gpu.base_url(url)
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)) as session:
            async with session.get(f"{base}/v1/models") as response:
                model = (await response.json())["data"][0]
            version = ""
            for path in ("/version", "/server_info", "/get_server_info"):
                async with session.get(f"{base}{path}") as response:
                    if response.status == 200:
                        version = version or str((await response.json(content_type=None)).get("version", ""))
        async with engines.engine_of(url) as backend:
            await backend.facts("m")
            tokens = (await backend.load()).kv_tokens
    except (aiohttp.ClientError, BackendError, TimeoutError, LookupError, ValueError) as error:
        raise SystemExit(f"no server to measure at {url}: {type(error).__name__}: {error}") from None
    return Server(url, version, str(model.get("root") or model.get("id")), tokens)


class Sitting:
    """One call: what is done already, what is left, and how much time."""

    def __init__(self, state: Path, pieces: Sequence[Piece], until: float, record: Mapping[str, object]) -> None:
        self._state, self._pieces, self._until, self._record = state, pieces, until, record
        self.lines = lines_of(state)
        self.failed = False
        self.out_of_time = False

    def left_of(self, piece: Piece, engine: str) -> list[Step]:
        digest = report.digest_of(piece.file)
        done = {
            (line["repetition"], line["variant"])
            for line in self.lines
            if (line["piece"], line["engine"], line["measures"]) == (piece.name, engine, digest)
        }
        return [step for step in piece.steps() if step not in done]

    def pieces_for(self, engine: str, model: str = "", kv_tokens: int | None = None) -> list[Piece]:
        """The pieces that have steps left, of one engine, and if given of one kind of server."""
        return [
            piece
            for piece in self._pieces
            if engine in piece.engines
            and (not model or (piece.model, piece.kv_tokens) == (model, kv_tokens))
            and self.left_of(piece, engine)
        ]

    def measure(self, server: Server, pieces: Sequence[Piece]) -> None:
        """Measure the first repetition of every piece, then the next."""
        steps = [(step, piece) for piece in pieces for step in self.left_of(piece, server.engine)]
        steps.sort(key=lambda pair: pair[0][0])
        if any(piece.warm for _, piece in steps):
            asyncio.run(gpu.round_of(gpu.WORKS[0], server.url))
        broken: set[str] = set()
        for step, piece in steps:
            if piece.name in broken:
                continue
            needed = 1.1 * self._longest(piece, server.engine, step[1])
            if time.monotonic() + needed > self._until:
                self.out_of_time = True
                show({"piece": piece.name, "step": step, "left for another call": f"it takes {needed:.0f} s"})
                continue  # a shorter one may still fit
            if not self._step(server, piece, step):
                broken.add(piece.name)

    def _step(self, server: Server, piece: Piece, step: Step) -> bool:
        repetition, variant = step
        line: Line = {"piece": piece.name, "engine": server.engine, "repetition": repetition, "variant": variant}
        began = time.monotonic()
        try:
            found = asyncio.run(_within(self._until - began, piece.play(server.url, variant)))
        except TimeoutError:
            self.out_of_time = True
            show({**line, "stopped": f"not done after {time.monotonic() - began:.0f} s; the call's time is over"})
            return False
        except Exception as error:  # noqa: BLE001
            self.failed = True
            show({**line, "failed": f"{type(error).__name__}: {error}"})
            return False
        line |= {
            "step_seconds": round(time.monotonic() - began, 1),
            "file": piece.file,
            "measures": report.digest_of(piece.file),
            "server": server.to_dict(),
            **self._record,
            "date": report.now(),
            "found": found,
        }
        self.lines.append(line)
        text = self._state.read_text() if self._state.exists() else ""
        with self._state.open("a") as file:  # its last line may have been cut by a kill
            file.write(("\n" if text and not text.endswith("\n") else "") + json.dumps(line) + "\n")
        show(line)
        return True

    def _longest(self, piece: Piece, engine: str, variant: str) -> float:
        seen = [
            line["step_seconds"]
            for line in self.lines
            if (line["piece"], line["engine"], line["variant"]) == (piece.name, engine, variant)
        ]
        return max(seen, default=piece.seconds)

    def seconds_left(self) -> float:
        return self._until - time.monotonic()


async def _within(seconds: float, step: Awaitable[object]) -> object:
    try:
        async with asyncio.timeout(seconds):
            return await step
    except SystemExit as error:  # how benchmarks say that an answer is wrong
        raise RuntimeError(str(error)) from None


def show(line: Mapping[str, object]) -> None:
    print(json.dumps(line), flush=True)


def lines_of(state: Path) -> list[Line]:
    """The finished steps of a file; a last line that was cut is left out."""
    lines: list[Line] = []
    for number, text in enumerate(state.read_text().splitlines() if state.exists() else (), 1):
        try:
            lines.append(json.loads(text))
        except ValueError:
            print(f"{state}:{number} is not a finished step, and is left out", file=sys.stderr)
    return lines


@contextmanager
def started(command: str, url: str, log: Path) -> Iterator[None]:
    """Run a server in a process group of its own until the block ends. Raises ``SystemExit`` if it does not come up."""
    with log.open("wb") as written:
        process = subprocess.Popen(
            shlex.split(command), stdout=written, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        began = time.monotonic()
        while not asyncio.run(_is_healthy(url)):
            if process.poll() is not None or time.monotonic() - began > START_SECONDS:
                said = log.read_text(errors="replace")[-2_000:]
                raise SystemExit(f"the server did not become healthy: {command}\n{said}")
            time.sleep(1)
        yield
    finally:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, sign)
                process.wait(30)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


async def _is_healthy(url: str) -> bool:
    timeout = aiohttp.ClientTimeout(30)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{gpu.base_url(url)}/health") as response,
        ):
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def commands_of(given: Sequence[str]) -> dict[tuple[str, str], str]:
    """The commands that start servers, by engine and model."""
    told = dict(item.partition("=")[::2] for item in given)
    for engine in ("vllm", "sglang"):
        for model in ("32b", "7b"):
            if command := os.environ.get(f"BATCH_AGENT_SERVE_{engine}_{model}".upper()):
                told.setdefault(f"{engine}-{model}", command)
    known = {f"{engine}-{model}": (engine, model) for engine in ("vllm", "sglang") for model in ("32b", "7b")}
    if wrong := sorted(set(told) - set(known)):
        raise SystemExit(f"--serve {wrong[0]}=…: there are {', '.join(known)}")
    return {known[name]: command for name, command in told.items()}


def serve_and_measure(sitting: Sitting, commands: Mapping[tuple[str, str], str], pieces: Sequence[Piece]) -> None:
    """Start one server after the other, each with the cache that its pieces need."""
    for (engine, model), command in commands.items():
        for tokens in dict.fromkeys(piece.kv_tokens for piece in pieces if piece.model == model):
            todo = sitting.pieces_for(engine, model, tokens)
            if not todo or sitting.out_of_time:
                continue
            if sitting.seconds_left() < USUAL_START + min(piece.seconds for piece in todo):
                sitting.out_of_time = True
                return
            blocks = (tokens or 0) // 16
            filled = command.replace("{port}", str(PORT)).replace("{blocks}", str(blocks))
            url = f"{engine}://127.0.0.1:{PORT}"
            try:
                with started(filled.replace("{tokens}", str(tokens or 0)), url, Path(f"{engine}-{model}.log")):
                    measure_at(sitting, url, todo)
            except SystemExit as error:
                sitting.failed = True
                show({"server": f"{engine}-{model}", "failed": str(error)})


def measure_at(sitting: Sitting, url: str, pieces: Sequence[Piece]) -> None:
    server = asyncio.run(server_at(url))
    show({"server": url, **server.to_dict()})
    fit = []
    for piece in pieces:
        if why := server.lacks(piece):
            show({"piece": piece.name, "left out": why})
        else:
            fit.append(piece)
    sitting.measure(server, fit)


def write_results(lines: Sequence[Line]) -> int:
    """Write a results file for each kind of piece and engine, of the code that was measured last."""
    status = 0
    for file, engine in dict.fromkeys((line["file"], line["engine"]) for line in lines):
        of_file = [line for line in lines if (line["file"], line["engine"]) == (file, engine)]
        newest = max(of_file, key=lambda line: line["date"])
        same = [line for line in of_file if line["measures"] == newest["measures"]]
        if len(same) < len(of_file):
            print(f"{file}-{engine}: {len(of_file) - len(same)} of {len(of_file)} steps measured other code; left out")
        bars, measurements = RESULTS[file](engine, same)
        kept = ("measures", "date", "accelerator", "commit", "python", "packages")
        env = {name: newest.get(name) for name in kept} | {"server": newest["server"]}
        status |= report.finish(f"{file}-{engine}", env, bars, measurements)
    return status


Results = tuple[list[report.Bar], object]


def _kv_results(engine: str, lines: Sequence[Line]) -> Results:
    flat = [
        {"engine_name": engine, "variant": line["variant"], "repetition": line["repetition"], **line["found"]}
        for line in lines
    ]
    bars: list[report.Bar] = []
    for (_, work), seconds in kv.medians(flat).items():
        bars += kv.bars_of(kv.WORKS[work], seconds, engine)
    return bars, flat


def _gpu_results(engine: str, lines: Sequence[Line]) -> Results:
    bars: list[report.Bar] = []
    measurements = []
    for work in gpu.WORKS:
        if rounds := [line["found"]["walls"] for line in lines if line["found"]["work"] == str(work)]:
            measurement = gpu.measured(work, rounds)
            measurements.append(measurement)
            bars += gpu.bars_of(work, measurement)
    return bars, measurements


def _loop_results(engine: str, lines: Sequence[Line]) -> Results:
    measurements = {}
    for name, work in engines.WORKS.items():
        if rounds := [line["found"]["walls"] for line in lines if line["found"]["work"] == name]:
            measurements[name] = engines.measured(work, rounds)
    return [], measurements


def _people_results(engine: str, lines: Sequence[Line]) -> Results:
    mixes = {line["variant"]: line["found"] for line in lines}
    return [bar for mix, found in mixes.items() for bar in people.bars_of(mix, found)], mixes


RESULTS: dict[str, Callable[[str, Sequence[Line]], Results]] = {
    "kv": _kv_results,
    "gpu": _gpu_results,
    "engines": _loop_results,
    "people": _people_results,
}


def accelerator() -> str:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return ""


def pieces_asked(options: argparse.Namespace) -> list[Piece]:
    pieces = []
    for name in options.pieces.split(",") if options.pieces else PIECES:
        if name not in PIECES:
            raise SystemExit(f"no piece {name!r}. There are: {', '.join(PIECES)}")
        piece = replace(PIECES[name], repetitions=min(PIECES[name].repetitions, options.repetitions))
        if piece.file == "kv" and options.variants:
            work = kv.WORKS[name.removeprefix("kv-").replace("-", " ")]
            piece = replace(piece, variants=tuple(kv.variants_of(work, options.variants)))
        pieces.append(piece)
    return pieces


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.numbers_gpu", description="The numbers of a GPU.")
    parser.add_argument("--state", type=Path, required=True, metavar="FILE", help="where finished steps are kept")
    parser.add_argument("--minutes", type=float, default=30, help="of this call, the start of servers included")
    parser.add_argument("--url", action="append", default=[], help="a server that runs: vllm:// or sglang://host:port")
    parser.add_argument("--serve", action="append", default=[], metavar="NAME=COMMAND", help="vllm-32b, vllm-7b, …")
    parser.add_argument("--pieces", default="", metavar="A,B", help=f"of {', '.join(PIECES)}; default: all")
    parser.add_argument("--variants", nargs="+", metavar="VARIANT", help="of the pieces of kv; default: loop ours")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--hardware", default="", help="for the record; default: what nvidia-smi says")
    parser.add_argument("--commit", default="", help="for the record, where there is no git")
    parser.add_argument("--results", action="store_true", help="measure nothing; write the results files")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.results:
        return write_results(lines_of(options.state))
    pieces = pieces_asked(options)
    commands = commands_of(options.serve)
    if not options.url and not commands:
        raise SystemExit("no server: give --url of one that runs, or --serve NAME=COMMAND")
    env = report.environment()
    record = {name: env[name] for name in ("commit", "python", "packages")}
    record |= {"accelerator": options.hardware or accelerator()} | (
        {"commit": options.commit} if options.commit else {}
    )
    sitting = Sitting(options.state, pieces, time.monotonic() + 60 * options.minutes, record)
    for url in options.url:
        measure_at(sitting, url, sitting.pieces_for(url.partition("://")[0]))
    if not options.url:
        serve_and_measure(sitting, commands, pieces)
    if sitting.failed:
        return 1
    return MORE if sitting.out_of_time else 0


if __name__ == "__main__":
    sys.exit(main())
