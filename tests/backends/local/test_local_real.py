"""The embedded engine with real weights. One process for the module; the weights are fetched at first use."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import jsonschema_rs
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, Phase, given, settings
from pydantic import BaseModel, Field, JsonValue
from tests.backends.local.schema_strategies import schemas

from batch_agent import AgentResult, BatchAgent
from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.backends.local import LocalBackend, from_url, weights
from batch_agent.backends.local.backend import parse_url
from batch_agent.errors import ContextOverflow, SpecError, Truncated
from batch_agent.messages import Conversation, Message, ToolSpec, Usage

missing = pytest.mark.skipif(
    find_spec("openvino_genai") is None, reason="the embedded engine is not installed: pip install openvino-genai"
)
pytestmark = [missing, pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]
slow = pytest.mark.skipif(not os.environ.get("BATCH_AGENT_TEST_LOCAL"), reason="make test-local runs it")


class Ticket(BaseModel):
    category: Literal["billing", "bug", "account"]
    urgency: int = Field(ge=1, le=5)
    summary: str = Field(max_length=24)


SYSTEM = "You sort support tickets by what they are about and how urgent they are. " * 20
SORT = RequestShape(model="smollm2", schema=Ticket.model_json_schema(), max_tokens=80)


def ticket(number: int, shape: RequestShape = SORT) -> ModelRequest:
    messages = [Message("system", SYSTEM), Message("user", f"Ticket {number}: order {number * 37} was charged twice.")]
    return ModelRequest(shape, Conversation(messages), f"job-{number}")


def say(text: str, shape: RequestShape) -> ModelRequest:
    return ModelRequest(shape, Conversation([Message("user", text)]), text)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[LocalBackend]:
    try:
        weights.fetch()
    except SpecError as error:
        pytest.skip(f"no weights: {error}")
    async with from_url("local://") as backend:
        yield backend


@slow
async def test_every_constrained_agent_gives_a_valid_answer_and_the_prefix_is_computed_once(
    engine: LocalBackend,
) -> None:
    replies = await asyncio.gather(*(engine.infer(ticket(number)) for number in range(8)))
    for reply in replies:
        Ticket.model_validate_json(reply.text)
    usage = sum((reply.usage for reply in replies), Usage())
    assert sum(reply.usage.cached_tokens == 0 for reply in replies) == 1, "one leader"
    assert usage.cached_tokens / usage.prompt_tokens > 0.7


@slow
async def test_a_batch_whose_process_is_killed_has_every_answer(engine: LocalBackend) -> None:
    rows = [{"number": number, "order": number * 37} for number in range(12)]
    pids = [engine.pid]

    def kill_once(result: AgentResult[Ticket]) -> None:
        if len(pids) == 1 and engine.pid is not None:
            os.kill(engine.pid, signal.SIGKILL)
            pids.append(None)

    results = await BatchAgent.run(
        task="Ticket {number}: order {order} was charged twice.",
        inputs=rows,
        system_prompt=SYSTEM,
        output_schema=Ticket,
        backend=engine,
        max_inflight=4,
        max_tokens=80,
        max_retries=0,
        on_result=kill_once,
    )
    assert len(pids) == 2, "it was killed with agents in flight"
    assert engine.pid not in (None, pids[0])
    assert [type(result.output) for result in results] == [Ticket] * 12, [result.error for result in results]


@slow  # tests/backends/test_registry.py has the choice of the backend
async def test_the_command_line_needs_no_backend(engine: LocalBackend, tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(
        """
task: "Which word is a colour: {input}, brick or bread?"
inputs: [red, green, blue]
output_schema: {type: object, properties: {colour: {enum: [red, green, blue]}}, required: [colour]}
max_tokens: 30
"""
    )
    environment = {name: value for name, value in os.environ.items() if name != "BATCH_AGENT_BACKEND"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "batch_agent", "run", "spec.yaml", "--no-run-dir"),
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    answers = [json.loads(line)["output"]["colour"] for line in out.splitlines()]
    assert len(answers) == 3
    assert set(answers) <= {"red", "green", "blue"}


# The engine with a cache of a few blocks, as if the machine had next to no memory.
TINY_CACHE = """
import json, sys; sys.path[:] = json.loads(sys.argv[1])
from types import SimpleNamespace
from batch_agent.backends.local import child
open_pipeline = child.open_pipeline
def open_tiny(genai, path, config):
    def pipeline(path, scheduler, *rest):
        scheduler.cache_size, scheduler.num_kv_blocks = 0, 12
        return genai.ContinuousBatchingPipeline(path, scheduler, *rest)
    return open_pipeline(
        SimpleNamespace(SchedulerConfig=genai.SchedulerConfig, ContinuousBatchingPipeline=pipeline), path, config
    )
child.open_pipeline = open_tiny
child.main()
"""


@slow
async def test_requests_that_the_kv_cache_cannot_hold_together_wait_and_one_too_large_says_so(
    engine: LocalBackend,
) -> None:
    async with LocalBackend(parse_url("local://"), program=TINY_CACHE) as tiny, asyncio.timeout(120):
        for times in (40, 48):
            own = [" ".join(f"{word}{number}" for word in ("cat", "dog", "fox") * times) for number in range(3)]
            for reply in await asyncio.gather(*(tiny.infer(say(text, SORT)) for text in own)):
                Ticket.model_validate_json(reply.text)
        with pytest.raises(ContextOverflow, match="kv_gb"):
            await tiny.infer(say("word " * 2000, SORT))


async def test_a_small_model_calls_a_tool_reads_its_result_and_answers(engine: LocalBackend) -> None:
    parameters: dict[str, JsonValue] = {
        "type": "object",
        "properties": {"number": {"type": "integer", "minimum": 0}},
        "required": ["number"],
    }
    lookup = ToolSpec("get_order", "Looks up an order by its number.", parameters)
    shape = RequestShape(model="smollm2", tools=(lookup,), schema=Ticket.model_json_schema(), max_tokens=80)
    first = RequestShape(model="smollm2", tools=(lookup,), tool_choice="required", schema=shape.schema, max_tokens=80)
    request = say("Sort the ticket about order 1221. " * 8, first)
    call = await engine.infer(request)
    assert call.tool_calls[0].name == "get_order"
    assert jsonschema_rs.is_valid(parameters, json.loads(call.tool_calls[0].arguments))
    known = call.usage.prompt_tokens + call.usage.completion_tokens
    reply = call
    for turns_left in (3, 2, 1):
        request.conversation.append(Message("assistant", reply.text, reply.tool_calls))
        request.conversation.append(Message("tool", "two charges of $20", tool_call_id=reply.tool_calls[0].id))
        reply = await engine.infer(ModelRequest(shape, request.conversation, request.job_id, turns_left))
        assert reply.usage.cached_tokens >= known - 64, "each turn extends the one before token for token"
        if not reply.tool_calls:
            break
    Ticket.model_validate_json(reply.text)


@slow
async def test_a_cancelled_request_gives_its_place_up(engine: LocalBackend) -> None:
    async with from_url("local://?max_seqs=1") as narrow:
        endless = RequestShape(model="smollm2", max_tokens=4000)
        hog = asyncio.create_task(narrow.infer(say("Write a long story.", endless)))
        short = asyncio.create_task(narrow.infer(say("Sort this.", SORT)))
        await asyncio.wait([short], timeout=0.5)
        assert not short.done()
        hog.cancel()
        Ticket.model_validate_json((await short).text)
        assert hog.cancelled()


@slow
async def test_a_seed_repeats_a_sample_and_no_temperature_is_greedy(engine: LocalBackend) -> None:
    def sampled(seed: int | None) -> RequestShape:
        return RequestShape(
            model="smollm2", max_tokens=200, schema={"type": "string", "maxLength": 40}, temperature=1.0, seed=seed
        )

    shapes = [sampled(7), sampled(7), sampled(8), RequestShape(model="smollm2", schema=sampled(1).schema)]
    texts = [(await engine.infer(say("Name an animal.", shape))).text for shape in [*shapes, shapes[-1]]]
    assert texts[0] == texts[1] != texts[2]
    assert texts[3] == texts[4]


async def test_a_stop_string_ends_the_answer(engine: LocalBackend) -> None:
    prompt = "Repeat after me: 1 2 3 4 5 6 7 8 9"
    with pytest.raises(Truncated) as caught:
        await engine.infer(say(prompt, RequestShape(model="smollm2", max_tokens=8)))
    word = caught.value.text.split()[1]
    stopped = await engine.infer(say(prompt, RequestShape(model="smollm2", max_tokens=60, stop=(word,))))
    assert word not in stopped.text


async def test_a_prompt_beyond_the_context_is_refused(engine: LocalBackend) -> None:
    with pytest.raises(ContextOverflow, match=r"8,192 tokens or more \(45,\d+ characters\)"):
        await engine.infer(say("word " * 9000, SORT))


@slow
async def test_the_engine_takes_every_grammar_the_compiler_writes(engine: LocalBackend) -> None:
    found: list[dict[str, JsonValue]] = []

    @settings(
        max_examples=25,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(schema=schemas(longest=16))
    def collect(schema: dict[str, JsonValue]) -> None:
        found.append(schema)

    collect()
    pid = engine.pid
    for schema in found:
        try:
            reply = await engine.infer(say("Go.", RequestShape(model="smollm2", schema=schema, max_tokens=40)))
        except Truncated:
            continue
        assert jsonschema_rs.is_valid(schema, json.loads(reply.text)), (schema, reply.text)
    assert engine.pid == pid, "none of them ended the engine"


PARENT = """
import asyncio
from batch_agent.backends.local import from_url
from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.messages import Conversation, Message
async def main():
    async with from_url("local://") as backend:
        print(backend.pid, flush=True)
        shape = RequestShape(model="smollm2", max_tokens=4000)
        await backend.infer(ModelRequest(shape, Conversation([Message("user", "Write a long story.")]), "j"))
asyncio.run(main())
"""


@slow
@pytest.mark.skipif(sys.platform != "linux", reason="watches the process by its pidfd")
async def test_the_engine_dies_with_its_parent_in_the_middle_of_an_answer(engine: LocalBackend) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    try:
        poll = select.poll()
        poll.register(child)
        assert poll.poll(10_000)
    finally:
        os.close(child)


@slow
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
async def test_the_engine_reads_the_architectures_of_the_models_that_can_be_fetched(
    tmp_path: Path, architecture: str
) -> None:
    from tests.backends.local.made_gguf import write_gguf

    path = write_gguf(tmp_path / "tiny.gguf", architecture)
    shape = RequestShape(str(path), schema=Ticket.model_json_schema(), max_tokens=80)
    async with from_url(f"local://{path}") as backend:
        reply = await backend.infer(ticket(1, shape))
    Ticket.model_validate_json(reply.text)
