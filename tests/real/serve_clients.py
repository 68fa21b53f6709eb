"""Unchanged programs of ``openai`` and ``anthropic``, the batch modes of inspect_ai and curator, and our own batch
backends, against ``batch-agent serve``.

Run by ``make test-serve``, which installs the clients; curator is in ``.venv-curator``, because it needs other versions
of them. The model is a scripted server; the server of batches is a process of its own, which is killed once in the
middle.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson

from batch_agent import BatchAgent
from batch_agent.serve.webhooks import new_secret, signed
from batch_agent.testing import Request, Say, ScriptedServer
from batch_agent.testing.replies import ScriptedReply

PORT = 8799
URL = f"http://127.0.0.1:{PORT}"
LINES = 200
GPT, CLAUDE = "gpt-4o", "claude-sonnet-4-20250514"  # names by which tools choose what they send
TOOL_SECONDS = 120.0
CURATOR = Path(".venv-curator/bin/python")

EVALUATION = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes

@task
def echoes():
    return Task([Sample(input=f"say {n}", target=f"echo say {n}") for n in range(8)], scorer=includes())
"""
CURATION = """
import sys
from bespokelabs import curator

model, backend, url = sys.argv[1:]
params = {"base_url": url, "batch_check_interval": 1}
llm = curator.LLM(model_name=model, backend=backend, batch=True, backend_params=params)
answers = llm([f"say {n}" for n in range(8)]).dataset["response"]
assert sorted(answers) == [f"echo say {n}" for n in range(8)], answers
"""


async def main() -> None:
    def script(request: Request) -> ScriptedReply:
        return Say(f"echo {request.text}", latency=0.02)

    async with ScriptedServer(script, models=["m", GPT, CLAUDE]) as model:
        with tempfile.TemporaryDirectory() as data:
            process, key = await start(data, model.backend_url)
            try:
                await asyncio.to_thread(interactive, key)
                batch = await asyncio.to_thread(create, key)
                await asyncio.sleep(0.5)
                os.kill(process.pid, signal.SIGKILL)
                await process.wait()
                process, key = await start(data, model.backend_url)
                await asyncio.to_thread(finish, key, batch)
                await asyncio.to_thread(message_batch, key)
                await own_backends(key)
                await inspect_ai(key)
                await curator(key)
                webhook()
            finally:
                process.terminate()
                await process.wait()
    print("openai, anthropic, inspect_ai, curator and the batch backends work against batch-agent serve")


async def start(data: str, backend: str) -> tuple[asyncio.subprocess.Process, str]:
    command = [sys.executable, "-m", "batch_agent", "serve", "--data", data, "--backend", backend]
    process = await asyncio.create_subprocess_exec(
        *command, "--port", str(PORT), "--reserve", "1MB", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.readline()
    return process, (await process.stdout.readline()).decode().rpartition("=")[2].strip()


def openai_client(key: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{URL}/v1", api_key=key)


def anthropic_client(key: str) -> Any:
    from anthropic import Anthropic

    return Anthropic(base_url=URL, api_key=key)


def interactive(key: str) -> None:
    client, other = openai_client(key), anthropic_client(key)
    asked = [{"role": "user", "content": "hello"}]
    served = ["m", GPT, CLAUDE]
    assert [model.id for model in client.models.list()] == served == [model.id for model in other.models.list()]
    assert client.chat.completions.create(model="m", messages=asked).choices[0].message.content == "echo hello"
    stream = client.chat.completions.create(model="m", messages=asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == "echo hello"
    assert client.responses.create(model="m", input="hello").output_text == "echo hello"
    with client.responses.stream(model="m", input="hello") as events:
        assert events.get_final_response().output_text == "echo hello"
    assert other.messages.create(model="m", max_tokens=9, messages=asked).content[0].text == "echo hello"
    with other.messages.stream(model="m", max_tokens=9, messages=asked) as pieces:
        assert "".join(pieces.text_stream) == "echo hello"


def create(key: str) -> str:
    client, url = openai_client(key), "/v1/chat/completions"
    bodies = [{"model": "m", "messages": [{"role": "user", "content": str(number)}]} for number in range(LINES)]
    lines = [{"custom_id": str(n), "method": "POST", "url": url, "body": body} for n, body in enumerate(bodies)]
    content = b"\n".join(map(orjson.dumps, lines))
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    return str(client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h").id)


def finish(key: str, id: str) -> None:
    client = openai_client(key)
    while (batch := client.batches.retrieve(id)).status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.2)
    assert batch.status == "completed" and batch.request_counts.completed == LINES, batch
    lines = [orjson.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(int(line["custom_id"]) for line in lines) == list(range(LINES))
    assert id in [each.id for each in client.batches.list()]


def message_batch(key: str) -> None:
    client = anthropic_client(key)
    params = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
    batch = client.messages.batches.create(requests=[{"custom_id": f"r{n}", "params": params} for n in range(5)])
    while client.messages.batches.retrieve(batch.id).processing_status != "ended":
        time.sleep(0.2)
    results = list(client.messages.batches.results(batch.id))
    assert [each.result.type for each in results] == ["succeeded"] * 5


async def run_tool(key: str, folder: str, *command: str) -> str:
    """Run a tool in a folder, and return what it printed. Only its addresses and keys are ours."""
    ours = {"OPENAI_BASE_URL": f"{URL}/v1", "OPENAI_API_KEY": key, "ANTHROPIC_BASE_URL": URL, "ANTHROPIC_API_KEY": key}
    quiet = {"CURATOR_CACHE_DIR": folder, "TELEMETRY_ENABLED": "false", "CURATOR_DISABLE_RICH_DISPLAY": "1"}
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env={**os.environ, **ours, **quiet},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        printed, _ = await asyncio.wait_for(process.communicate(), TOOL_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    assert process.returncode == 0, printed.decode()
    return printed.decode()


async def inspect_ai(key: str) -> None:
    program = str(Path(sys.executable).with_name("inspect"))
    for model in (f"openai/{GPT}", f"anthropic/{CLAUDE}"):
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "echoes.py").write_text(EVALUATION)
            Path(folder, "batch.json").write_text('{"size": 8, "send_delay": 1, "tick": 0.5}')
            options = ("--batch", "batch.json", "--model", model, "--display", "plain", "--log-dir", "logs")
            printed = await run_tool(key, folder, program, "eval", "echoes.py", *options)
        assert "Created batch" in printed and "accuracy  1.000" in printed, printed
        print(f"inspect_ai: a batch of {model}")


async def curator(key: str) -> None:
    for model, backend, url in ((GPT, "openai", f"{URL}/v1"), (CLAUDE, "anthropic", URL)):
        with tempfile.TemporaryDirectory() as folder:
            await run_tool(key, folder, str(CURATOR.absolute()), "-c", CURATION, model, backend, url)
        print(f"curator: a batch of {model}")


async def own_backends(key: str) -> None:
    for url in (f"openai-batch://127.0.0.1:{PORT}?tls=false", f"anthropic-batch://127.0.0.1:{PORT}?tls=false"):
        rows = [{"x": number} for number in range(5)]
        backend = {"url": url, "api_key": key}
        results = await BatchAgent.run(task="hello {x}", inputs=rows, backend=backend, model="m", max_tokens=9)
        assert [result.output for result in results] == [f"echo hello {number}" for number in range(5)], url


def webhook() -> None:
    secret, now = new_secret(), int(time.time())
    event = {"id": "evt_1", "object": "event", "created_at": now, "type": "batch.completed", "data": {"id": "batch_1"}}
    body = orjson.dumps(event)
    told = openai_client("-").webhooks.unwrap(body.decode(), signed(secret, "evt_1", now, body), secret=secret)
    assert told.type == "batch.completed"


if __name__ == "__main__":
    asyncio.run(main())
