"""The whole product on a real engine: one part after the other, each checked, with ratios against a plain loop.

``python -m benchmarks.engines --url sglang://127.0.0.1:8001 PART …`` drives a running SGLang or vLLM server that speaks
the scripts which the prompts carry (``benchmarks/gpu.py`` says how). Parts:

- *loop*: agents with a tool, and rows of one turn, against the plain loop; ours with and without streaming
- *schema*: output schemas by the engine's grammar; *metrics*: names and load while requests run
- *priority*: which sign goes first; *cancel*: how soon a cancelled run has left the server
- *outage*: the server is killed and started again in the middle of a run (``--kill GROUP --restart COMMAND``)
- *fleet*: the servers of several ``--url`` as one backend, against each alone
- *doctor*: ``doctor --thorough``, whose report is written beside the results

Each part prints one line of JSON, and ``--out FILE`` collects them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import aiohttp

from batch_agent import BatchAgent, Fleet, Tool
from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.backends.engines.engine import EngineBackend
from batch_agent.backends.registry import open_backend
from batch_agent.conformance.examination import examine
from batch_agent.messages import Conversation, Message
from benchmarks import gpu, report
from benchmarks.agent_loop import StreamedMessage
from benchmarks.gpu import CLOSE, OPEN, SYSTEM, Finding, Work, result_of

WORKS = {
    "20 agents": Work(20, 8, 0.4, topics=9),
    "100 agents": Work(100, 32, 0.8),
    "1,000 rows": Work(1_000, 256, 0.0),
}
VARIANTS: dict[str, dict[str, object]] = {
    "number given": {},
    "number given, not streamed": {"streaming_tool_dispatch": False},
    "number found": {"max_inflight": None},
}
Part = Callable[[argparse.Namespace], Awaitable[object]]


def base_url(backend: str) -> str:
    return f"{gpu.base_url(backend)}/v1"


def engine_of(backend: str) -> EngineBackend:
    opened, _ = open_backend(backend)
    assert isinstance(opened, EngineBackend), "an engine: sglang://host:port or vllm://host:port"
    return opened


async def ours(work: Work, backend: object, **options: object) -> list[Finding | None]:
    @Tool.define(cacheable=True)
    async def web_search(query: str) -> str:
        """Search the web."""
        await asyncio.sleep(work.tool_seconds)
        return result_of(query)

    given: dict[str, object] = {"max_inflight": work.inflight, **options}
    results = await BatchAgent.run(
        system_prompt=SYSTEM,
        task="{prompt}",
        inputs=[{"prompt": work.prompt(agent)} for agent in range(work.agents)],
        tools=[web_search] if work.tool_seconds else [],
        output_schema=Finding,
        backend=backend,
        model="m",
        **{name: value for name, value in given.items() if value is not None},
    )
    return [result.output for result in results]


def check(work: Work, found: Sequence[Finding | None], name: str) -> None:
    if [finding and finding.topic for finding in found] != [agent % work.topics for agent in range(work.agents)]:
        raise SystemExit(f"{name}: the answers are not those of the rows")


LOOPS = ("plain loop", "plain loop, streamed")


async def round_of(work: Work, url: str) -> dict[str, float]:
    """The wall seconds of the plain loops and of ours, one after the other, their answers checked."""
    found: dict[str, float] = {}
    for variant in (*LOOPS, *VARIANTS):
        began = time.perf_counter()
        answers: Sequence[Finding | None]
        if variant in LOOPS:
            answers = await plain_loop(work, base_url(url), stream="streamed" in variant)
        else:
            answers = await ours(work, f"{url}?native_schema=false", **VARIANTS[variant])
        found[variant] = round(time.perf_counter() - began, 3)
        check(work, answers, variant)
    return found


def measured(work: Work, rounds: Sequence[Mapping[str, float]]) -> dict[str, object]:
    """The measurement that some rounds are, with the ratio of the medians to that of the plain loop."""
    walls = {variant: [each[variant] for each in rounds] for variant in rounds[0]}
    plain = statistics.median(walls[LOOPS[0]])
    ratios = {variant: round(statistics.median(times) / plain, 3) for variant, times in walls.items()}
    return {"work": str(work), "seconds": walls, "ratio": ratios}


async def loop(options: argparse.Namespace) -> object:
    """Wall seconds of the plain loop and of ours, in turn; the first round warms up and does not count."""
    [url] = options.url
    found: dict[str, dict[str, object]] = {}
    for name in options.agents or WORKS:
        rounds = [await round_of(WORKS[name], url) for _ in range(options.repetitions + 1)]
        found[name] = measured(WORKS[name], rounds[1:])
        print(name, found[name]["ratio"], flush=True)
    return found


async def plain_loop(work: Work, url: str, *, stream: bool) -> list[Finding]:
    """The loop of ``benchmarks/gpu.py``, with whole or streamed answers."""
    gate = asyncio.Semaphore(work.inflight)
    system = f"{SYSTEM}\n\nAnswer with JSON of this schema:\n{json.dumps(Finding.model_json_schema())}"
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(messages: list[dict[str, object]]) -> dict[str, object]:
            body: dict[str, object] = {"model": "m", "messages": messages, "stream": stream}
            if work.tool_seconds:
                body["tools"] = [gpu.SEARCH]
            async with gate, session.post(f"{url}/chat/completions", json=body) as response:
                if not stream:
                    return (await response.json())["choices"][0]["message"]  # type: ignore[no-any-return]
                told, rest = StreamedMessage(), b""
                async for data in response.content.iter_any():
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data: {"):
                            told.add(json.loads(line[6:]))
                return told.message()

        async def agent(number: int) -> Finding:
            messages: list[dict[str, object]] = [
                {"role": "system", "content": system},
                {"role": "user", "content": work.prompt(number)},
            ]
            while True:
                message = await ask(messages)
                calls = message.get("tool_calls")
                if not isinstance(calls, list) or not calls:
                    return Finding.model_validate_json(str(message["content"]))
                messages.append({"role": "assistant", "content": message.get("content") or "", "tool_calls": calls})
                for call in calls:
                    await asyncio.sleep(work.tool_seconds)
                    query = json.loads(call["function"]["arguments"])["query"]
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result_of(query)})

        return list(await asyncio.gather(*map(agent, range(work.agents))))


async def schema(options: argparse.Namespace) -> object:
    """Rows whose answers the engine's grammar constrains."""
    [url] = options.url
    work = Work(64, 32, 0.0)
    results = await BatchAgent.run(
        task="{prompt}",
        inputs=[{"prompt": work.prompt(agent)} for agent in range(work.agents)],
        output_schema=Finding,
        backend=url,
        model="m",
        max_tokens=128,
    )
    check(work, [result.output for result in results], "schema")
    return {
        "rows": len(results),
        "valid": sum(result.ok for result in results),
        "turns": [max(r.turns for r in results)],
    }


async def metrics(options: argparse.Namespace) -> object:
    """Names of the engine's metrics, and the load while 16 requests run."""
    [url] = options.url
    async with engine_of(url) as backend, aiohttp.ClientSession() as session:
        async with session.get(f"{base_url(url).removesuffix('/v1')}/metrics") as response:
            text = await response.text()
        facts = await backend.facts("m")
        idle = await backend.load()
        asking = [asyncio.create_task(_speak(backend, f"metrics {n}", 400)) for n in range(16)]
        await asyncio.sleep(1.0)
        busy = await backend.load()
        await asyncio.gather(*asking)
        sharing = await backend.verify_prefix_sharing("m")
        state = await backend.state(sharing)
    names = sorted({line.split("{")[0].split(" ")[0] for line in text.splitlines() if line and line[0] != "#"})
    return {
        "context": facts.context,
        "idle": str(idle),
        "busy": str(busy),
        "sharing": str(sharing),
        "state": str(state),
        "names": [name for name in names if not name.endswith(("_bucket", "_created"))],
    }


async def _speak(backend: EngineBackend, name: str, words: int, **extra: object) -> float:
    """One request whose answer has that many words; returns its seconds."""
    said = json.dumps([f"{name}: " + "tree " * words])
    shape = RequestShape("m", extra_body=extra)  # type: ignore[arg-type]
    request = ModelRequest(shape, Conversation([Message("user", f"Say it. {OPEN}{said}{CLOSE}")]), name)
    began = time.perf_counter()
    await backend.infer(request)
    return time.perf_counter() - began


async def priority(options: argparse.Namespace) -> object:
    """Fill the server, then send requests of two priorities at once: which are answered sooner?"""
    [url] = options.url
    async with engine_of(url) as backend:
        await backend.facts("m")
        filling = [asyncio.create_task(_speak(backend, f"fill {n}", 100, priority=0)) for n in range(options.fill)]
        await asyncio.sleep(1.0)
        pairs = [(sign, n) for n in range(24) for sign in (-9, 9)]
        waits = await asyncio.gather(*(_speak(backend, f"{s} {n}", 20, priority=s) for s, n in pairs))
        filled = await asyncio.gather(*filling)
        by_sign = {
            sign: statistics.mean(w for (s, _), w in zip(pairs, waits, strict=True) if s == sign) for sign in (-9, 9)
        }
        shape = RequestShape("m")
        sent = {}
        for turns_left in (1, 5):
            request = ModelRequest(shape, Conversation([Message("user", "Hi")]), "p", run="run", priority=turns_left)
            sent[turns_left] = backend.own_part(request)[0].get("priority")
    sooner = min(by_sign, key=lambda sign: by_sign[sign])
    clear = max(by_sign.values()) > 1.2 * min(by_sign.values())
    right = None if None in sent.values() else (sent[1] > sent[5]) == (sooner > 0)
    return {
        "mean_wait_s": {str(sign): round(wait, 2) for sign, wait in by_sign.items()},
        "mean_fill_s": round(statistics.mean(filled), 2),
        "sooner": ("higher" if sooner > 0 else "lower") if clear else "no difference",
        "sent_for_turns_left": sent,
        "our_sign_is_right": right if clear else None,
    }


async def cancel(options: argparse.Namespace) -> object:
    """Leave a run whose 32 answers are being written, and read when the server has none left."""
    [url] = options.url
    said = json.dumps(["story: " + "tree " * 3_000])
    inputs = [{"prompt": f"Tell {n}. {OPEN}{said}{CLOSE}"} for n in range(32)]
    async with engine_of(url) as backend:
        await backend.facts("m")
        async with BatchAgent.open(task="{prompt}", inputs=inputs, backend=url, model="m", max_inflight=32) as run:
            reading = asyncio.ensure_future(anext(run.results()))
            await asyncio.sleep(2.0)
            busy = await backend.load()
            left = time.perf_counter()
            reading.cancel()
        seconds = None
        for _ in range(100):
            if (await backend.load()).running == 0:
                seconds = round(time.perf_counter() - left, 2)
                break
            await asyncio.sleep(0.05)
    return {"running_before": busy.running, "seconds_until_none": seconds}


async def outage(options: argparse.Namespace) -> object:
    """Kill the server under a run, start it again, and compare the answers."""
    [url] = options.url
    work = Work(200, 16, 0.2)
    asked = asyncio.ensure_future(ours(work, f"{url}?native_schema=false", timeout_per_turn=60))
    await asyncio.sleep(options.after)
    if asked.done():
        raise SystemExit("outage: the run ended before the server was killed; give a smaller --after")
    os.killpg(options.kill, signal.SIGKILL)
    killed = time.perf_counter()
    await asyncio.sleep(3)
    await asyncio.to_thread(subprocess.run, options.restart, shell=True, check=True)
    back = time.perf_counter()
    answers = await asked
    ended = time.perf_counter()
    check(work, answers, "outage")
    return {"rows": len(answers), "down_s": round(back - killed, 1), "after_restart_s": round(ended - back, 1)}


async def fleet(options: argparse.Namespace) -> object:
    """All servers as one backend, and each alone, with no number given."""
    work = Work(300, 64, 0.8)
    seconds: dict[str, list[float]] = {}
    for _ in range(options.repetitions + 1):
        for name, urls in {**{url: [url] for url in options.url}, "fleet": options.url}.items():
            backend = Fleet([f"{url}?native_schema=false" for url in urls])
            began = time.perf_counter()
            check(work, await ours(work, backend, max_inflight=None), name)
            seconds.setdefault(name, []).append(round(time.perf_counter() - began, 2))
    best = min(statistics.median(times[1:]) for name, times in seconds.items() if name != "fleet")
    ratio = round(statistics.median(seconds["fleet"][1:]) / best, 3)
    return {"work": f"{work}; ours: no number given", "seconds": seconds, "fleet_over_the_best_alone": ratio}


# Answers of questions whose answer depends on what the model wants to say; the others are left to the model.
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {"city": "Tokyo"}}\n</tool_call>'
SPOKEN = {
    "ends": ["yes"],
    "first_token": ["yes"],
    "max_tokens": ["yes"],
    "tool_auto": [CALL],
    "tool_parallel": [f"{CALL}\n{CLOCK}"],
    "tool_result": ["", "It is sunny."],
    "tool_results": ["", "", "It is sunny, and noon."],
    "load_counts": ["tree " * 400],
    "abort": ["tree " * 900],
    "time_limit": ["tree " * 200],
}


def spoken(question: str, prompt: str) -> str:
    """Add what the model shall say. Only for servers that speak scripts."""
    said = SPOKEN.get(question)
    return prompt if said is None else f"{prompt} {OPEN}{json.dumps(said)}{CLOSE}"


async def doctor(options: argparse.Namespace) -> object:
    [url] = options.url
    backend, _ = open_backend(url)
    async with backend:
        found = await examine(backend, "m", wording=spoken if options.scripted else None)
    for line in found.lines():
        print(line, flush=True)
    return found.to_json()


PARTS: dict[str, Part] = {
    "loop": loop,
    "schema": schema,
    "metrics": metrics,
    "priority": priority,
    "cancel": cancel,
    "outage": outage,
    "fleet": fleet,
    "doctor": doctor,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description="The product on a real engine.")
    parser.add_argument("parts", nargs="+", choices=[*PARTS])
    parser.add_argument("--url", action="append", required=True, help="sglang://host:port or vllm://host:port")
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--agents", action="append", choices=[*WORKS], help="of the part loop")
    parser.add_argument("--fill", type=int, default=600, help="requests that fill the server, of the part priority")
    parser.add_argument("--kill", type=int, help="process group of the server, of the part outage")
    parser.add_argument("--restart", help="command that starts it again and returns when it is healthy")
    parser.add_argument("--after", type=float, default=3.0, help="seconds until it is killed")
    parser.add_argument("--scripted", action="store_true", help="the server speaks scripts, for the part doctor")
    parser.add_argument("--hardware", default="", help="what the server runs on, for the record")
    parser.add_argument("--out", type=Path, help="append the results to this file, one line of JSON per part")
    options = parser.parse_args()
    failed = 0
    for part in options.parts:
        began = time.perf_counter()
        line: dict[str, object] = {"part": part, "urls": options.url, "accelerator": options.hardware}
        try:
            line["found"] = asyncio.run(PARTS[part](options))
        except (Exception, SystemExit) as error:  # noqa: BLE001
            line["failed"], failed = f"{type(error).__name__}: {error}", failed + 1
        line["seconds"] = round(time.perf_counter() - began, 1)
        written = json.dumps({**line, "environment": report.environment()})
        print(
            written if part not in ("doctor", "metrics") else f"{part}: {line['seconds']} s {line.get('failed', '')}",
            flush=True,
        )
        if options.out:
            with options.out.open("a") as file:
                file.write(written + "\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
