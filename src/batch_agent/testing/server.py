"""Model servers on a real socket: ``ScriptedServer`` answers as its script says and records its requests;
``SimulatedServer`` has the timing and the cache of the simulated engine.

``ModelServer`` is the common part: routes, the checks of a real server, counts of requests in flight, conditions to
wait for. ``wire`` defines how a reply looks on the wire.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from contextlib import contextmanager
from typing import ClassVar, Self

import orjson
from aiohttp import web

from batch_agent.backends.simulated.answers import SimulatedAnswer, chat_answer, text_answer
from batch_agent.backends.simulated.backend import EngineRunner, engine_load, usage_of
from batch_agent.backends.simulated.core import Sequence, SimulatedEngine
from batch_agent.backends.simulated.model import EngineModel
from batch_agent.backends.simulated.tokens import chat_prompt, encode_message, encode_tools, text_prompt
from batch_agent.door import (
    PATIENCE_SECONDS,
    Door,
    Handler,
    RequestRefused,
    json_response,
    read_body,
    read_object,
    routes,
    same_secret,
)
from batch_agent.messages import JsonObject
from batch_agent.observe.exposition import Counter, Gauge, Values, page
from batch_agent.testing.replies import ScriptedReply
from batch_agent.testing.wire import (
    Dropped,
    End,
    Live,
    Piece,
    Request,
    Script,
    TextPiece,
    Wire,
    call_pieces,
    check_request,
    error_object,
    play,
    scripted_reply,
)
from batch_agent.vllm_pin import read_order


class ModelServer(ABC):
    """``async with`` binds the socket and serves until exit; clients still connected are then disconnected."""

    paths: ClassVar[Many[str]] = ("/v1/chat/completions", "/v1/completions")
    request_type: ClassVar[type[Request]] = Request

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        models: Many[str] | None = None,
        api_key: str | None = None,
        fingerprint: str,
    ) -> None:
        self._host, self._port = host, port
        self._door: Door | None = None
        self._models = list(models) if models is not None else None
        self._api_key = api_key
        self._fingerprint = fingerprint
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self.received = 0
        self._open: dict[int, web.BaseRequest] = {}  # being answered, by number
        self.peak_inflight = 0
        self.disconnects = 0  # clients that left before their answer was complete

    @abstractmethod
    async def respond(self, request: Request) -> ScriptedReply | Live: ...

    @abstractmethod
    def metrics(self) -> str: ...

    def model_card(self, name: str) -> JsonObject:
        return {"id": name, "object": "model", "created": 0, "owned_by": self._fingerprint}

    @property
    def inflight(self) -> int:
        return len(self._open)

    @property
    def address(self) -> str:
        """Return ``host:port`` as in a URL."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}/v1"

    @property
    def backend_url(self) -> str:
        return f"vllm://{self.address}"

    async def __aenter__(self) -> Self:
        door = Door(routes(self.table()), self.refuse, host=self._host, port=self._port, unpacks=True)
        await door.__aenter__()
        self._door, self._port = door, door.port
        return self

    def table(self) -> dict[str, Mapping[str, Handler]]:
        """Return the handlers by path and method."""
        return {
            **{path: {"POST": self._complete} for path in self.paths},
            "/v1/models": {"GET": self._list_models},
            "/metrics": {"GET": self._show_metrics},
            "/health": {"GET": self._health},
        }

    async def __aexit__(self, *exception: object) -> None:
        door, self._door = self._door, None
        if door is not None:
            for http in list(self._open.values()):
                if http.transport is not None:
                    http.transport.abort()
            await door.__aexit__()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return once ``condition`` holds; it is checked whenever a request arrives, ends or is abandoned."""
        if condition():
            return
        waiter = (condition, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            await waiter[1]
        finally:
            self._waiters.remove(waiter)

    async def wait_requests(self, count: int) -> None:
        """Wait until ``count`` requests have arrived in total."""
        await self.wait_until(lambda: self.received >= count)

    async def wait_inflight(self, count: int) -> None:
        await self.wait_until(lambda: self.inflight == count)

    async def wait_idle(self) -> None:
        await self.wait_inflight(0)

    async def wait_disconnects(self, count: int) -> None:
        await self.wait_until(lambda: self.disconnects >= count)

    def _changed(self) -> None:
        for condition, future in self._waiters:
            if not future.done() and condition():
                future.set_result(None)

    async def _complete(self, http: web.BaseRequest) -> web.StreamResponse:
        self.check_key(http)
        raw = await read_body(http, PATIENCE_SECONDS)
        request = self.request_type(self.received, http.path, read_object(raw, orjson.loads), http.headers, raw)
        self._open[request.number] = http
        self.arrive(request)
        try:
            return await self._answer(request, http)
        except Dropped:
            if http.transport is not None:
                http.transport.abort()
            return web.Response()  # never sent
        except (asyncio.CancelledError, ConnectionError):
            if self._door is not None:
                self.disconnects += 1
            raise
        finally:
            del self._open[request.number]
            self._changed()

    def arrive(self, request: Request) -> None:
        self.received += 1
        self.peak_inflight = max(self.peak_inflight, self.inflight)
        self._changed()

    async def _answer(self, request: Request, http: web.BaseRequest) -> web.StreamResponse:
        self.check(request)
        return await play(await self.respond(request), http, self.wire(request))

    def check(self, request: Request) -> None:
        """Raise RequestRefused for what a real server would refuse."""
        check_request(request, self._models)

    def wire(self, request: Request) -> Wire:
        return Wire(request, model=request.model, fingerprint=self._fingerprint)

    def error(self, status: int, message: str, param: str | None = None) -> JsonObject:
        return error_object(status, message, param)

    def refuse(self, request: web.BaseRequest, refused: RequestRefused) -> web.Response:
        return json_response(self.error(refused.status, str(refused), refused.param), refused.status)

    def given_key(self, headers: Mapping[str, str]) -> str:
        scheme, _, key = headers.get("Authorization", "").partition(" ")
        return key if scheme == "Bearer" else ""

    def check_key(self, http: web.BaseRequest) -> None:
        if self._api_key is not None and not same_secret(self.given_key(http.headers), self._api_key):
            raise RequestRefused(401, "Unauthorized")

    async def _list_models(self, http: web.BaseRequest) -> web.Response:
        self.check_key(http)
        cards = [self.model_card(name) for name in self._models or [self._fingerprint]]
        return json_response(self.model_list(cards))

    def model_list(self, cards: list[JsonObject]) -> JsonObject:
        return {"object": "list", "data": [*cards]}

    async def _show_metrics(self, http: web.BaseRequest) -> web.Response:
        return web.Response(text=self.metrics(), content_type="text/plain")

    async def _health(self, http: web.BaseRequest) -> web.Response:
        return web.Response()


class ScriptedServer(ModelServer):
    """``ScriptedServer([Say("hello"), Fail(503)])`` answers in order of arrival; ``ScriptedServer(lambda request: …)``
    decides for each. With ``models`` other names get 404, with ``api_key`` other keys get 401. ``metrics`` replaces the
    text of ``/metrics``. An exception in the script is a 500 for the client, and is raised again at exit."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        models: Many[str] | None = None,
        api_key: str | None = None,
        metrics: Callable[[], str] | None = None,
    ) -> None:
        super().__init__(host=host, port=port, models=models, api_key=api_key, fingerprint="scripted")
        self._script = script
        self._metrics = metrics
        self._script_error: Exception | None = None
        self.requests: list[Request] = []

    def arrive(self, request: Request) -> None:
        self.requests.append(request)
        super().arrive(request)

    async def respond(self, request: Request) -> ScriptedReply:
        try:
            return await scripted_reply(self._script, request, self.requests[: request.number])
        except RequestRefused:  # the request cannot be read
            raise
        except Exception as error:
            self._script_error = self._script_error or error
            raise web.HTTPInternalServerError(text=f"the script raised {type(error).__name__}: {error}") from error

    def metrics(self) -> str:
        if self._metrics is not None:
            return self._metrics()
        told = VllmMetrics((self._models or ["scripted"])[0], "scripted")
        told.put("num_requests_running", "Requests in flight", self.inflight)
        return str(told.put("num_requests_waiting", "Requests in a queue; there is none", 0))

    async def __aexit__(self, *exception: object) -> None:
        await super().__aexit__(*exception)
        if self._script_error is not None and exception[1] is None:
            raise self._script_error


class VllmMetrics:
    """``origin`` is added to every HELP line, so that readers see where the numbers come from."""

    def __init__(self, model_name: str, origin: str) -> None:
        self._model_name, self._origin = model_name, origin
        self._families: dict[str, Values] = {}

    def put(self, name: str, text: str, value: float, **labels: str) -> Self:
        """Add a value: ``name`` without the prefix ``vllm:``; counters end in ``_total``."""
        if name not in self._families:
            make = Counter if name.endswith("_total") else Gauge
            names = ("engine", "model_name", *labels)
            self._families[name] = make(f"vllm:{name}", f"{text} ({self._origin}).", names)
        self._families[name].values["0", self._model_name, *labels.values()] = value
        return self

    def __str__(self) -> str:
        return page(self._families.values())


def engine_metrics(engine: SimulatedEngine) -> str:
    now = asyncio.get_running_loop().time()
    model = engine.model
    counters = engine.reading(now).counters
    load = engine_load(engine, now)
    source, ended = "Prompt tokens by where their KV came from", "Requests that ended, by reason"
    told = VllmMetrics(model.name, "simulated")
    told.put("num_requests_running", "Requests in the running batch", load.running)
    told.put("num_requests_waiting", "Requests waiting in the queue", load.waiting)
    told.put("kv_cache_usage_perc", "Part of the KV cache held by running requests, 0 to 1", load.kv_usage or 0.0)
    told.put("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache", counters.prefix_queries)
    told.put("prefix_cache_hits_total", "Prompt tokens found in the prefix cache", counters.prefix_hits)
    told.put("num_preemptions_total", "Running requests preempted because the KV cache was full", counters.preemptions)
    told.put("prompt_tokens_total", "Prompt tokens of requests that started", counters.prompt_tokens)
    told.put("prompt_tokens_by_source_total", source, counters.prompt_tokens_computed, source="local_compute")
    told.put("prompt_tokens_by_source_total", source, counters.prefix_hits, source="local_cache_hit")
    told.put("generation_tokens_total", "Tokens generated", counters.generated_tokens)
    told.put("request_success_total", ended, counters.finished, finished_reason="stop")
    told.put("request_success_total", ended, counters.aborted, finished_reason="abort")
    told.put(
        "cache_config_info",
        "The KV cache's configuration, in labels",
        1,
        block_size=str(model.block_size),
        num_gpu_blocks=str(model.blocks),
        enable_prefix_caching=str(model.prefix_caching),
        kv_offloading_size=str(model.offload_tokens or None),  # vLLM's is in GiB
    )
    return str(told)


async def serve_simulated(
    *, host: str = "127.0.0.1", port: int = 8000, engine: EngineModel, ready: Callable[[str], None]
) -> None:
    """Serve until cancelled; ``ready`` gets the URL once requests can arrive. A port in use raises SpecError."""
    async with SimulatedServer(engine, host=host, port=port) as server:
        ready(server.url)
        await asyncio.get_running_loop().create_future()


class SimulatedServer(ModelServer):
    def __init__(self, engine: EngineModel | None = None, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.model = engine if engine is not None else EngineModel()
        super().__init__(host=host, port=port, models=[self.model.name], fingerprint="simulated")
        self.runner = EngineRunner(self.model)

    async def __aexit__(self, *exception: object) -> None:
        await super().__aexit__(*exception)
        self.runner.close()

    async def respond(self, request: Request) -> Live:
        if any(not isinstance(message.content, str) for message in request.conversation()):
            raise RequestRefused(400, f"{self.model.name} is not a multimodal model")
        return Live(lambda: self._generate(request))

    def metrics(self) -> str:
        return engine_metrics(self.runner.engine)

    def model_card(self, name: str) -> JsonObject:
        return {**super().model_card(name), "max_model_len": self.model.context_tokens}

    @contextmanager
    def _generate(self, request: Request) -> Iterator[AsyncIterator[Piece]]:
        work = [*self._work(request)]
        tokens: asyncio.Queue[tuple[Sequence, int]] = asyncio.Queue()
        priority = request.body.get("priority")
        params = request.body.get("kv_transfer_params")
        sequences = self.runner.start(
            [(prompt, answer.output) for prompt, answer in work],
            lambda sequence: tokens.put_nowait((sequence, sequence.generated)),
            priority if isinstance(priority, int) else 0,
            read_order(params if isinstance(params, dict) else None),
        )
        try:
            yield _pieces(sequences, [answer for _, answer in work], tokens)
        finally:
            self.runner.abort(sequences)

    def _work(self, request: Request) -> Iterator[tuple[bytes, SimulatedAnswer]]:
        if not request.messages:
            for text in request.prompts:
                prompt = text_prompt(text)
                yield prompt, text_answer(self.model, prompt, max_tokens=request.max_tokens)
            return
        messages = request.conversation()
        prompt = chat_prompt(encode_tools(request.tools), map(encode_message, messages))
        yield prompt, chat_answer(self.model, prompt, messages, request.shape)


async def _pieces(
    sequences: list[Sequence], answers: list[SimulatedAnswer], tokens: asyncio.Queue[tuple[Sequence, int]]
) -> AsyncIterator[Piece]:
    """Yield what the answers' tokens reveal, as they are generated."""
    choices = {sequence: choice for choice, sequence in enumerate(sequences)}
    said = [""] * len(sequences)
    called = [0] * len(sequences)
    unfinished = len(sequences)
    while unfinished:
        sequence, generated = await tokens.get()
        choice = choices[sequence]
        answer = answers[choice]
        text, calls = answer.text_until(generated), answer.calls_until(generated)
        if text != said[choice]:
            yield TextPiece(text[len(said[choice]) :], choice)
        for index in range(called[choice], calls):
            for piece in call_pieces(index, answer.calls[index], choice):
                yield piece
        said[choice], called[choice] = text, calls
        if generated == sequence.output_tokens:
            unfinished -= 1
            yield End(answer.finish_reason, choice)
    yield usage_of(sequences)
