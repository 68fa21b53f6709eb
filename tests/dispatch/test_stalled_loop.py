"""An event loop that stalls: what arrived meanwhile is not lost, and a server that answered is not blamed."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from batch_agent import BatchAgent
from batch_agent.backends.base import Probe
from batch_agent.dispatch.probing import PROBE_SECONDS, probe
from batch_agent.dispatch.slots import MOST_EXTENSIONS, Deadlines
from batch_agent.testing import Request, Say, ScriptedBackend, VirtualClockLoop, virtual_clock


def clock() -> VirtualClockLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualClockLoop)
    return loop


async def waits(deadlines: Deadlines, seconds: float, answer_after: float | None) -> str:
    answer: asyncio.Future[str] = clock().create_future()
    if answer_after is not None:
        clock().call_later(answer_after, answer.set_result, "answer")
    try:
        with deadlines.after(seconds):
            return await answer
    except TimeoutError:
        return "too late"


@pytest.mark.parametrize("seconds", [1.5, 3.0, 4.999], ids=["early in it", "in the middle", "at its end"])
def test_an_answer_that_came_during_a_stall_is_in_time_wherever_the_deadline_lies(seconds: float) -> None:
    @virtual_clock
    async def scenario() -> None:
        clock().call_later(1.0, clock().stall, 4.0)
        assert await waits(Deadlines(), seconds, answer_after=1.4) == "answer"

    scenario()


@virtual_clock
async def test_a_request_that_hangs_ends_after_a_stall_when_it_had_its_time() -> None:
    clock().call_later(1.0, clock().stall, 4.0)
    assert await waits(Deadlines(), 2.0, answer_after=None) == "too late"
    assert 5.0 < clock().time() <= 10.0


@virtual_clock
async def test_a_loop_that_is_always_late_does_not_keep_a_request_for_ever() -> None:
    deadlines = Deadlines()
    waiting = asyncio.create_task(waits(deadlines, 1.0, answer_after=None))
    for _ in range(2 * MOST_EXTENSIONS):
        clock().stall(2.0)
        await asyncio.sleep(0)
    assert await waiting == "too late"


@virtual_clock
async def test_a_cancellation_from_outside_is_no_timeout() -> None:
    waiting = asyncio.create_task(waits(Deadlines(), 1.0, answer_after=None))
    await asyncio.sleep(0.5)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@virtual_clock
async def test_a_probe_that_a_stall_interrupted_is_made_again() -> None:
    class Server(ScriptedBackend):
        probes = 0

        async def probe(self, endpoint: str = "") -> Probe:
            self.probes += 1
            await asyncio.sleep(1.0)
            return Probe("up")

    server = Server()
    clock().call_later(0.5, clock().stall, 2 * PROBE_SECONDS)
    assert (await probe(server, "")).state == "up"


@virtual_clock
async def test_silence_during_a_stall_is_not_the_servers() -> None:
    def script(request: Request) -> Say:
        return Say("ok", latency=0.1)

    events: list[object] = []
    backend = ScriptedBackend(script)
    for at in (3.0, 30.0):
        clock().call_later(at, clock().stall, 20.0)
    inputs = [str(n) for n in range(600)]
    async with BatchAgent.open(
        task="{input}", inputs=inputs, backend=backend, max_inflight=4, timeout_per_turn=5, sinks=[events.append]
    ) as run:
        results = [result async for result in run.results()]
    assert all(result.ok and result.attempts == 1 for result in results)
    assert not any(type(event).__name__ == "HealthChanged" for event in events)


class Answers(BaseHTTPRequestHandler):
    """Chat completions from other threads. They are sent while the event loop stalls."""

    protocol_version = "HTTP/1.1"
    asked, answered = threading.Semaphore(0), threading.Semaphore(0)
    stalled = threading.Event()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.release()
        self.stalled.wait(60)
        message = {"role": "assistant", "content": "ok"}
        body = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": {}}
        self._send(json.dumps(body).encode())
        self.answered.release()

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "m"}]}).encode())

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class ThreadedServer(ThreadingHTTPServer):
    request_queue_size = 64  # with fewer a connection may have to be tried again after a second


@pytest.fixture
def threaded() -> Iterator[str]:
    server = ThreadedServer(("127.0.0.1", 0), Answers)
    Answers.asked, Answers.answered = threading.Semaphore(0), threading.Semaphore(0)
    Answers.stalled = threading.Event()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"vllm://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_a_real_loop_that_stalls_for_longer_than_a_turn_may_take_loses_no_answer(threaded: str) -> None:
    rows, most = 4, 2.0

    async def stall() -> None:
        """Block the loop from the last request on, until every answer was sent and no request has time left."""
        for _ in range(rows):
            while not Answers.asked.acquire(blocking=False):
                await asyncio.sleep(0.001)
        ends = time.monotonic() + 1.2 * most
        Answers.stalled.set()
        for _ in range(rows):
            assert Answers.answered.acquire(timeout=60)
        time.sleep(max(0.0, ends - time.monotonic()))

    stalling = asyncio.create_task(stall())
    inputs = [str(n) for n in range(rows)]
    results = await BatchAgent.run(task="{input}", inputs=inputs, backend=threaded, model="m", timeout_per_turn=most)
    await stalling
    assert all(result.ok and result.attempts == 1 for result in results), "no answer was lost and asked for again"
