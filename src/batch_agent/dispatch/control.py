"""Control requests: a few tokens that do not depend on any row, to find out whether a row or a server is bad.

A control request has the model and the settings of the request that failed, but neither its messages nor tools nor a
schema. It holds a slot, is counted by rate limits and budget, and is judged like any other request. At most one is in
flight per server.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from batch_agent.backends.base import Backend, ModelRequest
from batch_agent.dispatch.policy import Observer, Question
from batch_agent.dispatch.probing import Probed
from batch_agent.errors import BackendError, JobError, Truncated
from batch_agent.messages import Conversation, Message, Reply, Usage
from batch_agent.scheduler.blame import outcome_of
from batch_agent.scheduler.core import Ticket
from batch_agent.scheduler.server import Endpoint

if TYPE_CHECKING:
    from batch_agent.dispatch.slots import Slots

logger = logging.getLogger("batch_agent")

CONTROL_TOKENS = 16  # of the answer: the least that all providers allow
CONTROL_JOB = "control"  # instead of a row's id
CONTROL_WORDS = "Answer with the word OK."
WITHOUT_MESSAGES = frozenset({"embeddings", "completions"})  # wires of models that may take no messages

Ask = Callable[["ControlCall", Ticket], Awaitable[Reply]]
OnControl = Callable[[str, float, Usage, float | None, str], None]  # endpoint, seconds, usage, cost, error or ""


class ControlCall(Question):
    """A question that any server with the model can answer. An answer that was cut by its token limit counts as an
    answer."""

    def __init__(self, backend: Backend, failed: ModelRequest) -> None:
        shape = replace(
            failed.shape, max_tokens=CONTROL_TOKENS, tools=(), tool_choice=None, schema=None, stop=(), seed=None
        )
        # The number keeps caches from answering.
        said = Conversation([Message("user", f"Request {secrets.token_hex(4)}. {CONTROL_WORDS}")])
        self._backend, self._request = backend, ModelRequest(shape, said, CONTROL_JOB, run=failed.run)

    @property
    def request(self) -> ModelRequest:
        return self._request

    async def send(self, endpoint: str) -> Reply:
        self._request.endpoint = endpoint
        try:
            return await self._backend.infer(self._request)
        except Truncated as cut:
            return Reply(cut.text, usage=cut.usage or Usage(), finish_reason="length")


class ControlObserver(Observer):
    """Passes the end of a control request to ``on_control``."""

    __slots__ = ("_endpoint", "_on_control")

    def __init__(self, endpoint: str, on_control: OnControl) -> None:
        self._endpoint, self._on_control = endpoint, on_control

    def failed(self, error: BackendError, seconds: float, cost: float | None, delay: float | None) -> None:
        self._on_control(self._endpoint, seconds, error.usage or Usage(), cost, str(error))

    def answered(self, reply: Reply, seconds: float, cost: float | None) -> None:
        self._on_control(self._endpoint, seconds, reply.usage, cost, "")


class ControlRequests:
    """The control requests of one dispatcher. ``ask`` sends one in the slot of its ticket. ``give_up`` is called with
    an endpoint whose control request gave no evidence, because it could not be sent or the server refused it."""

    def __init__(self, backend: Probed | None, ask: Ask, give_up: Callable[[Endpoint], None], *, enabled: bool) -> None:
        self._backend = backend if enabled and isinstance(backend, Backend) else None
        self._ask, self._give_up = ask, give_up
        # The latest requests that a control request to an endpoint could be like: those that failed, and the first.
        self._like: dict[Endpoint, ModelRequest] = {}
        self.unlike = True  # no such request is known
        self._tasks: dict[Endpoint, asyncio.Task[bool | None]] = {}
        self._tickets: dict[Endpoint, Ticket] = {}  # of their latest requests

    def like(self, endpoint: Endpoint, request: ModelRequest | None) -> None:
        """Make the next control request to the endpoint from this request, which failed or is the first one."""
        if request is None or (request.client is not None and request.client.wire in WITHOUT_MESSAGES):
            return
        before = self._like.get(endpoint)
        if before is not None and before.shape.model != request.shape.model:
            endpoint.server.takes_controls = True  # it may have refused those for another model
        self._like[endpoint] = request
        self.unlike = False

    def is_like(self, endpoint: Endpoint) -> bool:
        """Return whether a request is known from which a control request to the endpoint can be made."""
        return self._like_at(endpoint) is not None

    def _like_at(self, endpoint: Endpoint) -> ModelRequest | None:
        """Return a request that was sent to the endpoint; if there is none, one that was sent to another endpoint with
        the same models; else None."""
        same = (like for other, like in self._like.items() if other.server.models == endpoint.server.models)
        return self._like.get(endpoint) or next(same, None)

    def can_ask(self, endpoint: Endpoint) -> bool:
        """Return whether a control request can be sent to the endpoint, now or later."""
        if self._backend is None or self.unlike or endpoint.health.patient or endpoint.given_up:
            return False
        if not self.is_like(endpoint):
            return False
        return endpoint.server.takes_controls and (endpoint in self._tasks or not endpoint.server.controlled)

    def start(self, endpoint: Endpoint, slots: Slots) -> asyncio.Task[bool | None] | None:
        """Return the running control request of this endpoint, or start one; None if none can be sent. Its result is
        whether it was answered; None if it gave no evidence."""
        task, backend, like = self._tasks.get(endpoint), self._backend, self._like_at(endpoint)
        if task is None and backend is not None and like is not None and self.can_ask(endpoint):
            endpoint.server.controlled = True
            self._tickets[endpoint] = slots.claim_control(endpoint)
            task = asyncio.get_running_loop().create_task(self._control(endpoint, ControlCall(backend, like)))
            self._tasks[endpoint] = task
            task.add_done_callback(partial(self._done, endpoint, slots))
        return task

    def renew(self, endpoint: Endpoint, slots: Slots) -> None:
        """Send another control request after the one that fails now, in its slot."""
        self._tickets[endpoint] = slots.claim_control(endpoint)

    def stop(self, endpoint: Endpoint) -> None:
        self._like.pop(endpoint, None)
        if endpoint in self._tasks:
            self._tasks[endpoint].cancel()

    def close(self) -> None:
        self._backend = None  # no request is sent any more
        for task in self._tasks.values():
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _control(self, endpoint: Endpoint, call: ControlCall) -> bool | None:
        ticket = self._tickets[endpoint]
        try:
            reply = await self._ask(call, ticket)
            return True if reply.saved is None else None
        except BackendError as error:
            if self._tickets[endpoint] is not ticket:
                return await self._control(endpoint, call)
            if outcome_of(error) != "refused":
                return outcome_of(error) == "flawed"
            endpoint.server.takes_controls = False
        except JobError:
            self._backend = None  # the run is over, or its budget is
        except Exception:  # by a user's own backend, or our bug
            logger.exception("control requests to %s end here", endpoint.name)
            endpoint.server.takes_controls = False
        return None

    def _done(self, endpoint: Endpoint, slots: Slots, task: asyncio.Task[bool | None]) -> None:
        del self._tasks[endpoint]
        endpoint.server.controlled = False
        slots.withdraw(self._tickets.pop(endpoint))  # if the task was cancelled before it began
        if not task.cancelled() and task.result() is None:
            self._give_up(endpoint)
