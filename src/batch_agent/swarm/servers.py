"""The servers of a pool: their connections, one dispatcher for a tree of pools, the forms of requests and answers, and
the selection of sub-pools.

``Servers.ask`` sends one request to one server. The dispatcher grants its slot, applies the time limit, counts and
judges its attempts, and knows which servers are down. The outcome, errors included, is an Exchange.

A sub-pool counts its servers from 0 and shares everything else with its pool: connections, the request limit, and what
is known about each server. Closing the pool closes them; leaving a sub-pool closes nothing.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import inf
from typing import Self

from pydantic import JsonValue

from batch_agent.backends.base import Probe
from batch_agent.backends.http.backend import HttpClient, Route, probe_server, read_entries
from batch_agent.backends.http.wire import Faults, object_of, written
from batch_agent.backends.openai.chat import ABORTED, read_usage, text_in
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.dispatch.policy import Policy, Question
from batch_agent.dispatch.slots import Slots
from batch_agent.errors import BackendError, ContextOverflow, Interrupted, Rejected, SpecError, Timeout, Unavailable
from batch_agent.fleet.backend import OneLoop
from batch_agent.fleet.hostfile import AgentEndpoint
from batch_agent.http.transport import Transport
from batch_agent.messages import JsonObject, Reply, Usage
from batch_agent.scheduler.core import Ticket
from batch_agent.scheduler.ordering import LAST, AgentForecast
from batch_agent.scheduler.server import Endpoint
from batch_agent.scheduler.server_state import ServerState
from batch_agent.swarm.options import Response, above_zero, whole

ATTEMPTS = 5  # of one request, if the connection breaks or the server is overloaded
LONGEST_PAUSE = 10.0  # seconds; a server that requests more is not retried
PATIENCE_SECONDS = 10.0  # for a server that is down: it may be starting
REFUSED = (400, 413, 422)  # statuses that one item of a list may cause; others concern the whole list
CLOSED = "the pool was closed before the answer arrived"
DEFAULT_CONTEXT = 131_072  # tokens, of a server that does not report its context
CONTEXT_SECONDS, CONTEXT_SHARE = 10.0, 0.25  # for the question about the context; part of a request's time limit

Item = tuple[int, str]  # a prompt or text of a list, after its number in the call


class PoolServer:
    """One server of a tree of pools."""

    def __init__(self, endpoint: AgentEndpoint, transport: Transport, api_key: str | None) -> None:
        self.endpoint = endpoint
        self.lane: Endpoint  # of the dispatcher, while the pool is open
        self.answered_at = -inf  # on the event loop's clock
        self.waiting: set[Ticket] = set()  # requests that wait for a slot or are in flight
        self.takes_chat_lists = True  # until it answers that it has no such route
        self.context: int | None = None  # in tokens, once it is known
        self.context_asked = 0  # how often it was asked for
        self.context_lock: asyncio.Lock  # held while it is asked for
        self._transport, self._api_key = transport, api_key
        self.route = cache(self._route)  # by method and path

    @cached_property
    def client(self) -> HttpClient:
        """The client, created on first use, so that a pool of thousands of servers is ready at once."""
        base = self.endpoint.url.removesuffix("/v1") + "/v1"
        return HttpClient(base, api_key=self._api_key, transport=self._transport)

    def _route(self, method: str, path: str) -> Route:
        return self.client.route(method, path.removeprefix("/v1"), beside=not path.startswith("/v1"))


class Exchange(Question):
    """One request to one server and its outcome: ``body``, or ``error``. Without a body to send it is a GET. ``limit``
    is the seconds of one attempt."""

    def __init__(self, slots: Slots, server: PoolServer, path: str, body: JsonObject | None, limit: float) -> None:
        self._slots = slots
        self._server = server
        self._limit = limit
        self._route = server.route("GET" if body is None else "POST", path)
        self._data = None if body is None else written(body)
        self._timed_out = False
        self.faults = self._route.faults  # creates the error for an unreadable body
        self.body = b""
        self.error: BackendError | None = None
        self.latency = 0.0
        self.attempts = 0

    async def run(self, dispatcher: Dispatcher, policy: Policy, ticket: Ticket) -> Self:
        """Send the request. An error is an outcome; only a cancellation is raised."""
        try:
            await dispatcher.ask(self, policy, ticket=ticket)
        except BackendError as raised:
            self.error = raised
        except Interrupted as closed:
            self.error = Unavailable(str(closed))
        if self.error is not None:
            self.attempts = max(1, self.attempts)
            if self.faults.where not in str(self.error):  # an error of the dispatcher, which names no address
                self.error.args = (f"{self.faults.where}: {self.error}",)
        return self

    async def send(self, endpoint: str) -> Reply:
        server, clock = self._server, asyncio.get_running_loop().time
        sent_at = clock()
        self.attempts += 1
        try:
            self.body = await server.client.send(self._route, self._data) or b""
        except (asyncio.CancelledError, Timeout) as error:
            # The dispatcher cancels it at its time limit, or earlier to send it again.
            self._timed_out = isinstance(error, Timeout) or clock() - sent_at >= 0.99 * self._limit
            if self._timed_out and self._data is not None and server.answered_at < sent_at:
                self._give_up()
            raise
        server.answered_at = clock()
        self.latency = server.answered_at - sent_at
        return Reply("")

    def _give_up(self) -> None:
        """Fail the requests that wait for the server: it has answered nothing since this request was sent."""
        why = f"{self.faults.where}: not sent, because the server gave no complete answer in {self._limit:g} s"
        for ticket in tuple(self._server.waiting):
            self._slots.reject(ticket, Timeout(why, unreached=True))

    def is_worth_retrying(self, error: BackendError) -> bool:
        """Return whether to retry at the same server: it is starting or overloaded, or the connection broke."""
        if self._timed_out or (error.retry_after or 0.0) > LONGEST_PAUSE:
            return False
        broken = isinstance(error, Timeout | Unavailable) and (error.unreached or error.status is None)
        return broken or error.overload

    def refuses_one_of(self, items: Sequence[Item]) -> bool:
        """Return whether the list was refused and one of its items may be the only reason."""
        error = self.error
        return len(items) > 1 and error is not None and (error.status in REFUSED or isinstance(error, ContextOverflow))

    @cached_property
    def document(self) -> JsonObject:
        """Return the JSON object of the answer. Raises the BackendError of a failed answer, or of one without a JSON
        object."""
        if self.error is not None:
            raise self.error
        document = object_of(self.body, self.faults)
        if error := document.get("error"):
            raise self.faults.reported(error)
        return document

    def listed(self, name: str) -> dict[int, JsonObject]:
        """Return the entries of a list in the answer by their ``index``, or by their place if they have none."""
        items = self.document.get(name)
        if not isinstance(items, list) or not items:
            raise self.faults.bad(f"the answer has no {name}")
        found: dict[int, JsonObject] = {}
        for place, item in enumerate(items):
            if isinstance(item, dict):
                index = item.get("index")
                found.setdefault(index if type(index) is int else place, item)
        return found


class _Unjudged(Exchange):
    """A request whose caller judges the outcome, such as a run of the engine. The dispatcher learns nothing from it."""

    async def send(self, endpoint: str) -> Reply:
        try:
            async with asyncio.timeout(self._limit):
                await super().send(endpoint)
        except TimeoutError:
            self.error = Timeout(f"{self.faults.where}: no complete answer in {self._limit:g} s")
        except BackendError as error:
            self.error = error
        return Reply("", saved=Usage())


class Servers:
    """All servers of a tree of pools. ``limit`` is the maximum of their requests in flight."""

    def __init__(self, concurrency: int, connector_limit: int, api_key: str | None = None) -> None:
        self._sockets = whole("connector_limit", connector_limit)
        # Every request has its own connection, so the smaller limit counts.
        self.limit = min(whole("concurrency", concurrency), self._sockets)
        self._transport = Transport(proxies=False, connections=self._sockets)
        self._api_key = api_key
        self._all: list[PoolServer] = []
        self._loop = OneLoop("pool", self._forget)
        self._dispatcher: Dispatcher | None = None  # while it is open
        self._unjudged: Endpoint  # for requests that are judged elsewhere

    @property
    def name(self) -> str:
        return "the server"

    def add(self, endpoint: AgentEndpoint) -> PoolServer:
        server = PoolServer(endpoint, self._transport, self._api_key)
        self._all.append(server)
        return server

    async def open(self) -> Dispatcher:
        """Open the connections in the running event loop. Raises SpecError if they are open in another loop."""
        self._loop.bind()
        if self._dispatcher is None:
            await self._transport.__aenter__()
            servers = {str(place): ServerState(server.endpoint.url) for place, server in enumerate(self._all)}
            self._dispatcher = Dispatcher(self, self.limit, servers={**servers, "": ServerState()}, max_outage=inf)
            *endpoints, self._unjudged = self._dispatcher.scheduler.endpoints
            for server, endpoint in zip(self._all, endpoints, strict=True):
                server.lane = endpoint
                server.context_lock = asyncio.Lock()
                endpoint.health.patient = True  # prompts differ in length: how long others took is no evidence
        return self._dispatcher

    def _forget(self) -> None:
        self._dispatcher = None  # resources of a closed loop cannot be closed any more

    async def close(self) -> None:
        self._loop.bind()
        dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is not None:
            dispatcher.refuse(CLOSED)
            await self._transport.__aexit__(None, None, None)
            dispatcher.close()
        self._loop.release()

    async def ask(
        self, server: PoolServer, path: str, body: JsonObject | None, limit: float, *, once: bool = False
    ) -> Exchange:
        """Post the body, or GET without one. ``limit`` is the seconds of one attempt.

        A server that refuses connections is retried for ``PATIENCE_SECONDS``, or for ``limit`` if that is less; a
        broken connection and an overloaded server a few times; other failures are final. ``once``: it is sent once, for
        a caller that judges failures itself, and does not affect the server's health here.
        """
        dispatcher = await self.open()
        if once:
            ticket = dispatcher.slots.claim(AgentForecast(LAST), LAST, pinned=self._unjudged)
            return await _Unjudged(dispatcher.slots, server, path, body, limit).run(dispatcher, Policy(0), ticket)
        exchange = Exchange(dispatcher.slots, server, path, body, limit)
        policy = Policy(
            ATTEMPTS - 1,
            max_attempts=ATTEMPTS,
            wait_until=asyncio.get_running_loop().time() + min(limit, PATIENCE_SECONDS),
            timeout=limit,
            wanted=exchange.is_worth_retrying,
        )
        ticket = dispatcher.slots.claim(AgentForecast(LAST), LAST, pinned=server.lane)
        server.waiting.add(ticket)
        try:
            return await exchange.run(dispatcher, policy, ticket)
        finally:
            server.waiting.discard(ticket)

    async def ask_list(
        self,
        server: PoolServer,
        path: str,
        items: Sequence[Item],
        write: Callable[[list[str]], JsonObject],
        limit: float,
        take: Callable[[Sequence[Item], Exchange], Awaitable[None]],
    ) -> None:
        """Post a list; ``write`` makes the body, ``take`` gets the outcome. If a list is refused because of one of its
        items, it is sent again in halves, so that this item fails alone."""
        exchange = await self.ask(server, path, write([text for _, text in items]), limit)
        if not exchange.refuses_one_of(items):
            return await take(items, exchange)
        middle = len(items) // 2
        halves = items[:middle], items[middle:]
        await asyncio.gather(*(self.ask_list(server, path, half, write, limit, take) for half in halves))

    async def context_of(self, server: PoolServer, model: str, limit: float) -> int:
        """Return the context of a server in tokens. Concurrent callers share one question, which is repeated after the
        server was unreachable. A server that does not report it, or not in time, is not asked again. Raises Unavailable
        if the pool is closed meanwhile."""
        if server.context is None:
            dispatcher, asked = await self.open(), server.context_asked
            async with server.context_lock:
                if server.context_asked == asked:  # no other caller has asked meanwhile
                    server.context = await self._ask_context(server, model, min(limit * CONTEXT_SHARE, CONTEXT_SECONDS))
                    server.context_asked += 1
            if self._dispatcher is not dispatcher:
                raise Unavailable(CLOSED)
        return server.context or DEFAULT_CONTEXT

    async def _ask_context(self, server: PoolServer, model: str, limit: float) -> int | None:
        """Request the context. Returns None if the server was unreachable."""
        exchange = await self.ask(server, "/v1/models", None, limit, once=True)
        if exchange.error is not None:
            silent = isinstance(exchange.error, Timeout) and not exchange.error.unreached
            return DEFAULT_CONTEXT if exchange.error.status is not None or silent else None
        entries = read_entries(exchange.body) or {}
        entry = entries.get(model) or (next(iter(entries.values())) if len(entries) == 1 else {})
        length = entry.get("max_model_len")
        return length if type(length) is int and length > 0 else DEFAULT_CONTEXT

    async def probe(self, endpoint: str = "") -> Probe:
        return await self.probe_server(self._all[int(endpoint)]) if endpoint else Probe("unknown")

    async def probe_server(self, server: PoolServer) -> Probe:
        dispatcher = await self.open()
        found = await probe_server(server.client)
        if found.state == "down" and dispatcher.scheduler.inflight >= self._sockets:
            return Probe("unknown", "no connection was free for a probe")
        return found


@dataclass(frozen=True, slots=True)
class Form:
    """How prompts are written in a request: in which field, and how one choice is read."""

    path: str
    field: str
    write: Callable[[Sequence[str], str | None], JsonValue]  # of the prompts and the system prompt
    text_of: Callable[[JsonObject, Faults], str]  # of a choice


def _messages(prompt: str, system: str | None) -> list[JsonValue]:
    said: list[JsonValue] = [] if system is None else [{"role": "system", "content": system}]
    return [*said, {"role": "user", "content": prompt}]


def _chat_text(choice: JsonObject, faults: Faults) -> str:
    """Return the content of a choice, else its reasoning, else ""."""
    message = choice.get("message")
    if not isinstance(message, dict):
        raise faults.bad("the answer's choice has no text")
    for name in ("content", "reasoning_content", "reasoning"):
        value = message.get(name)
        if isinstance(value, str | list) and (text := text_in(value, faults)):
            return text
    return ""


def _text(value: JsonValue, faults: Faults) -> str:
    if not isinstance(value, str):
        raise faults.bad("the answer's choice has no text")
    return value


def _generated_text(document: JsonObject, faults: Faults) -> str:
    return _text(document.get("response", document.get("text", "")), faults)


def _completed_text(choice: JsonObject, faults: Faults) -> str:
    return _text(choice.get("text"), faults)


GENERATE = Form("/generate", "prompt", lambda prompts, _: prompts[0], _generated_text)
CHAT = Form("/v1/chat/completions", "messages", lambda prompts, system: _messages(prompts[0], system), _chat_text)
CHAT_LIST = Form(
    f"{CHAT.path}/batch", "messages", lambda prompts, system: [_messages(each, system) for each in prompts], _chat_text
)
COMPLETIONS = Form("/v1/completions", "prompt", lambda prompts, _: list(prompts), _completed_text)


def read_answers(exchange: Exchange, agent_index: int, prompts: Sequence[str], n: int, form: Form) -> list[Response]:
    """Return ``n`` answers for each prompt, in order. Choices are matched by ``index``; a prompt without a choice fails
    alone. The server reports one usage for a list, and each prompt gets its share."""
    try:
        # The answer of /generate is written like one choice.
        document = exchange.document
        choices = {0: document} if form is GENERATE else exchange.listed("choices")
    except BackendError as error:
        return [Response.failed(error, agent_index, exchange.attempts) for _ in range(len(prompts) * n)]
    responses = []
    for place in range(len(prompts) * n):
        try:
            response = _read_choice(choices.get(place), exchange, form)
        except BackendError as error:
            response = Response.failed(error, agent_index, exchange.attempts)
        response.agent_index = agent_index
        responses.append(response)
    if isinstance(usage := document.get("usage"), dict):
        _share(read_usage(usage), [prompt for prompt in prompts for _ in range(n)], responses)
    return responses


def _read_choice(choice: JsonObject | None, exchange: Exchange, form: Form) -> Response:
    faults = exchange.faults
    if choice is None:
        raise faults.bad("the answer to the list has no choice for this prompt")
    if error := choice.get("error"):
        raise faults.reported(error)
    text, reason = form.text_of(choice, faults), choice.get("finish_reason")
    if reason in ABORTED:
        raise faults.bad(f"the server aborted the answer (finish_reason {reason})", text=text)
    response = Response(True, text, latency=exchange.latency, attempts=exchange.attempts)
    response.finish_reason = reason if isinstance(reason, str) else None
    return response


def _share(usage: Usage, prompts: Sequence[str], responses: Sequence[Response]) -> None:
    """Divide prompt tokens by the prompts' lengths and completion tokens by the texts' lengths. Sums stay exact."""
    asked = _shares(usage.prompt_tokens, [len(prompt) for prompt in prompts])
    cached = _shares(usage.cached_tokens, [len(prompt) for prompt in prompts])
    said = _shares(usage.completion_tokens, [len(response.text) for response in responses])
    for response, *counts in zip(responses, asked, cached, said, strict=True):
        response.usage = Usage(*counts)


def _shares(total: int, weights: Sequence[int]) -> list[int]:
    whole = sum(weights)
    shares = []
    given = 0
    passed = 0
    for place, weight in enumerate(weights, start=1):
        passed += weight
        upto = total * passed // whole if whole else total * place // len(weights)
        shares.append(upto - given)
        given = upto
    return shares


class Members:
    """The servers of a pool or a sub-pool."""

    def __init__(self, endpoints: Sequence[AgentEndpoint | tuple[str, int]], servers: Servers, timeout: float) -> None:
        self._net = servers
        self._servers = [servers.add(_endpoint(given)) for given in endpoints]
        self.timeout = above_zero("timeout", timeout)
        self._owns = True  # False: a sub-pool

    @property
    def size(self) -> int:
        return len(self._servers)

    @property
    def concurrency(self) -> int:
        """Return the maximum of requests in flight of the whole tree of pools."""
        return self._net.limit

    @property
    def endpoints(self) -> list[AgentEndpoint]:
        return [server.endpoint for server in self._servers]

    def by_tag(self, key: str, value: str) -> Self:
        return self._part(server for server in self._servers if server.endpoint.tags.get(key) == value)

    def sample(self, n: int) -> Self:
        """Return a pool of ``n`` agents chosen at random, or of all if there are fewer."""
        return self._part(random.sample(self._servers, min(max(whole("n", n, None), 0), self.size)))

    def select(self, indices: Sequence[int]) -> Self:
        for index in indices:
            if not -self.size <= whole("an index", index, None) < self.size:
                raise SpecError(f"there is no agent {index}: the pool has {self.size}, counted from 0")
        return self._part(self._servers[index] for index in indices)

    def slice(self, start: int, stop: int) -> Self:
        return self._part(self._servers[start:stop])

    def _part(self, servers: Iterable[PoolServer]) -> Self:
        part = copy.copy(self)
        part._servers = list(servers)
        part._owns = False
        return part

    def turn(self, index: int) -> int:
        """Return the agent to which text ``index`` goes; -1 if the pool is empty."""
        return index % self.size if self.size else -1

    def turns(self, texts: Iterable[str]) -> dict[int, list[Item]]:
        """Return the texts of each agent."""
        found: defaultdict[int, list[Item]] = defaultdict(list)
        for index, text in enumerate(texts):
            found[self.turn(index)].append((index, text))
        return found

    def url(self, agent_index: int) -> str:
        return self._servers[agent_index].endpoint.url

    async def probe(self, agent_index: int) -> Probe:
        return await self._net.probe_server(self._servers[agent_index])

    def _missing(self, agent_index: int) -> Rejected | None:
        """Return the error for a missing agent; None if it exists."""
        if 0 <= whole("agent_index", agent_index, None) < self.size:
            return None
        if not self.size:
            return Rejected("the pool has no agents: is the hostfile empty, or does no endpoint have that tag?")
        return Rejected(f"there is no agent {agent_index}: the pool has {self.size}, counted from 0")

    async def close(self) -> None:
        if self._owns:
            await self._net.close()

    async def __aenter__(self) -> Self:
        await self._net.open()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


def _endpoint(given: AgentEndpoint | tuple[str, int]) -> AgentEndpoint:
    try:
        host, port = (given.host, given.port) if isinstance(given, AgentEndpoint) else given
        if not host or not 0 < int(port) < 65536:
            raise ValueError("no host, or no port")
    except (TypeError, ValueError):
        raise SpecError(f"{given!r} is not an endpoint: give an AgentEndpoint, or (host, port)") from None
    return given if isinstance(given, AgentEndpoint) else AgentEndpoint(host, int(port))
