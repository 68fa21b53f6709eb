"""The only way to send a request to a model.

``ask`` takes one question to its answer: it waits for a slot, applies rate limits and budget, sends the request under
a time limit, learns from the outcome, and retries when that is right. Runs, summaries, hedges, ticks, swarms and the
proxy call it. No other code holds a slot, times a request or decides a retry.

A slot is held only while the request is in flight, and is released between two attempts.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from math import inf
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from batch_agent.backends.base import Backend, ModelRequest, OnToolCall
from batch_agent.dispatch.cancellation import cancelled_by_us
from batch_agent.dispatch.control import ControlCall, ControlObserver, OnControl
from batch_agent.dispatch.endpoints import EndpointMonitor, OnHealth, OnLimit
from batch_agent.dispatch.feed import Feed
from batch_agent.dispatch.hedging import SecondRequests, hedged
from batch_agent.dispatch.policy import Observer, Policy, Question, Questions, Replies, TakenBack
from batch_agent.dispatch.probing import Probed
from batch_agent.dispatch.slots import Slots
from batch_agent.dispatch.spending import Call, Spending
from batch_agent.errors import BackendError, Interrupted, JobError, Timeout, Truncated, Unavailable
from batch_agent.events import Ended
from batch_agent.foreign import drop_frames
from batch_agent.messages import Reply, Usage
from batch_agent.scheduler.blame import Scope, Verdict
from batch_agent.scheduler.core import Scheduler, Slot, Ticket
from batch_agent.scheduler.numbers import N
from batch_agent.scheduler.ordering import LAST, AgentForecast
from batch_agent.scheduler.retry import retry_delay
from batch_agent.scheduler.server import Endpoint
from batch_agent.scheduler.server_state import ServerState, Terms

if TYPE_CHECKING:
    from batch_agent.dispatch.members import Following

T = TypeVar("T")
SILENT = Observer()
# Seconds that requests in flight get when the run's time is over: somewhat more than the slowest answer took, within
# these limits.
SHORTEST_GRACE, LONGEST_GRACE, GRACE_FACTOR = 6.0, 30.0, 1.2
MOST_NAMED = 5  # rows in the message about them


class ModelCall:
    """One ModelRequest to one backend, as a Question."""

    __slots__ = ("backend", "on_tool_call", "request")

    def __init__(self, backend: Backend, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> None:
        self.backend, self.request, self.on_tool_call = backend, request, on_tool_call

    @property
    def text(self) -> str:
        return "".join(self.request.said)

    @property
    def heard_at(self) -> float:
        return self.request.heard_at

    def send(self, endpoint: str) -> Awaitable[Reply]:
        request = self.request
        request.endpoint, request.heard_at = endpoint, 0.0
        return self.backend.infer(request, self.on_tool_call)

    def ended(self) -> None:
        self.request.tries += 1
        if self.request.on_begin is not None:
            self.request.on_begin()

    def instead(self, error: BackendError) -> Reply | None:
        if isinstance(error, Truncated):
            return self.shortened(error)
        error.text = error.text or self.text
        return None

    def shortened(self, cut: Truncated) -> Reply | None:
        """Return the answer if it was cut at its token limit and is usable; else None."""
        if self.request.client is None:
            return None
        # A gateway client sets its own token limit, and reads in the answer that the limit was reached.
        return Reply(cut.text, usage=cut.usage or Usage(), finish_reason="length")

    def check(self, reply: Reply) -> None: ...

    def lost(self) -> None: ...

    def again(self) -> ModelCall:
        """Return the same question for another endpoint. Only tools of the first request may start early."""
        return ModelCall(self.backend, replace(self.request, said=[]))


class _Together(Question):
    """Several questions sent as one request. ``answers`` are those of the latest attempt."""

    def __init__(self, questions: Questions) -> None:
        self._questions = questions
        self.answers: Replies = ()

    async def send(self, endpoint: str) -> Reply:
        """Return the total usage of all questions. Raises one of their errors if all failed."""
        self.answers = ()
        self.answers = answers = await self._questions.send(endpoint)
        replies = [answer for answer in answers if isinstance(answer, Reply)]
        if not replies:
            errors = [answer for answer in answers if isinstance(answer, JobError)]
            raise next((error for error in errors if isinstance(error, BackendError)), errors[0])
        return Reply("", usage=sum((reply.usage for reply in replies), Usage()))


class Dispatcher:
    """The endpoints of one backend, for one run or for runs that share them. ``max_inflight`` limits all endpoints
    together, ``terms`` each of them. With ``trust_probes`` an outage is over when a probe finds the endpoint up.
    ``control_requests``: whether they are sent (``control.py``)."""

    def __init__(
        self,
        backend: Probed | None,
        max_inflight: int | None = None,
        max_agents: int | None = None,
        *,
        servers: Mapping[str, ServerState] | None = None,
        terms: Terms | None = None,
        max_outage: float | None = None,
        trust_probes: bool = False,
        control_requests: bool = False,
        on_limit: OnLimit = lambda endpoint, reason: None,
        on_health: OnHealth = lambda endpoint, now: None,
        on_control: OnControl = lambda endpoint, seconds, usage, cost, error: None,
    ) -> None:
        self.backend = backend
        self._standbys = backend.standbys if isinstance(backend, Backend) else {}
        self.terms = Terms(max_inflight) if terms is None else terms
        endpoints = [self._endpoint(name, server) for name, server in (servers or {}).items()]
        self.scheduler = Scheduler(max_inflight, max_agents, endpoints or [Endpoint(None, self.terms)])
        self._on_health, self._on_control = on_health, on_control
        self.endpoints = EndpointMonitor(
            self.scheduler,
            backend,
            max_outage,
            self._health_changed,
            on_limit,
            self._end,
            self._ask_control,
            control_requests=control_requests,
        )
        self.endpoints.trust_probes = trust_probes
        self.seconds = SecondRequests(self)
        self.endpoints.flights.send_beside = self.seconds.start
        self.slots = Slots(self.scheduler, self.endpoints)
        self.endpoints.start(self.slots)
        self.spending: Spending | None = None
        self.follower: Following | None = None  # for a backend whose servers may change
        self.reading = asyncio.Lock()  # held by the task that polls the load of the endpoints
        self.over: tuple[Ended, str] | None = None  # outcome and reason, once the run cannot continue
        self._impatient: set[Ticket] = set()  # tickets that do not wait out an outage
        self._tools_waited_for: set[asyncio.Future[Any]] = set()
        self._chance: Callable[[], float] = random.random
        self._cutting: asyncio.TimerHandle | None = None  # when requests in flight are cancelled
        self._cut_off = ""  # why they were

    def _endpoint(self, name: str, server: ServerState) -> Endpoint:
        return Endpoint(server.lent_to(get_ident()), self.terms_of(server), name, self._standbys.get(name))

    def terms_of(self, server: ServerState) -> Terms:
        """Return the terms for the server. Its own concurrency limit is kept unless the user set one."""
        if self.terms.given or server.default_inflight is None:
            return self.terms
        return replace(self.terms, ceiling=server.default_inflight, start=None)

    # Asking

    async def ask(
        self,
        question: Question,
        policy: Policy,
        *,
        ticket: Ticket | None = None,
        progress: AgentForecast | None = None,
        observer: Observer = SILENT,
    ) -> Reply:
        """Return the complete answer, or raise the final BackendError. ``ticket`` is an existing claim for a slot;
        otherwise ``progress`` makes one. A request with neither belongs to no agent and runs after all turns."""
        clock = self.slots.clock
        queued, attempts, spending = clock(), 0, self.spending
        if ticket is None:
            ticket = self.slots.claim(AgentForecast(LAST) if progress is None else progress, LAST)
        while True:
            slot, call, cost, request = ticket.slot, None, None, question.request
            if slot is None or self.slots.stopped:
                patient = policy.wait_out and (policy.wait_until is None or slot is not None)
                slot = await (self.slots.hold(ticket) if patient else self._hold(ticket, policy))
            if spending is not None and not (spending.is_free and slot.endpoint.server.rates is None):
                call = await self.reserve(slot, request)
            sent, attempts = clock(), attempts + 1
            observer.sent(sent - queued)
            if self.endpoints.controls.unlike:
                self.endpoints.controls.like(slot.endpoint, request)
            try:
                if policy.hedge is None or len(self.scheduler.endpoints) == 1:
                    reply = await self.attempt(question, slot, policy, sent, observer)
                else:
                    reply = await hedged(self, question, slot, policy)
                if spending is not None:
                    cost = self._settle(spending, call, request, reply)
            except BackendError as failure:
                error, queued = failure, clock()
                seconds = queued - sent
                cost = None if spending is None else spending.fail(call, request, error)
                attempt, verdict, scope = self.endpoints.failed(slot, error, question.request)
            except Exception:
                self.endpoints.not_sent(slot)
                raise
            else:
                observer.answered(reply, clock() - sent, cost)
                return reply
            finally:
                if call is not None and not call.settled:
                    call.fail()
                self.slots.release(slot)
            if ticket.control or slot.withdrawn:
                observer.failed(error, seconds, cost, None)
                raise error if ticket.control else self._withdrawn(slot)
            wanted = attempts != policy.max_attempts and (policy.wanted is None or policy.wanted(error))
            step = await self.endpoints.decisions.step(
                slot,
                attempt,
                verdict,
                policy.max_retries,
                retryable=error.retryable or scope in ("confirm", "all"),
                wait=policy.wait_out and wanted,
            )
            gives_up = not wanted or step == "fail" or not self._is_worth(policy, ticket)
            delay = None if gives_up else self._delay(slot, verdict, error, scope)
            observer.failed(error, seconds, cost, delay)
            if delay is None:
                raise error
            drop_frames(error)
            await self.slots.again(slot, delay)

    def _withdrawn(self, slot: Slot) -> Exception:
        """Return why a request that was withdrawn is not sent again here."""
        if slot.taken_back:
            return TakenBack()
        return Interrupted(self._cut_off or "the run was drained before the server began with this job")

    def _settle(
        self, spending: Spending, call: Call | None, request: ModelRequest | None, reply: Reply
    ) -> float | None:
        """Return the cost of an answer. If a second request of this question was sent to a standby, the answer may be
        the standby's."""
        known = self.scheduler.standbys if reply.answered_by else ()
        by = next((each.standby for each in known if each.standby and each.standby.model == reply.answered_by), None)
        return spending.settle(call, request, reply.usage, reply.saved is not None, by)

    async def _ask_control(self, call: ControlCall, ticket: Ticket) -> Reply:
        """Send a control request."""
        assert ticket.pinned is not None
        observer = ControlObserver(ticket.pinned.name, self._on_control)
        return await self.ask(call, Policy(0), ticket=ticket, observer=observer)

    async def ask_many(self, questions: Questions, policy: Policy) -> Replies:
        """Send several questions as one request in one slot. Returns an answer or an error for each.
        Raises BackendError if the whole request failed."""
        together = _Together(questions)
        try:
            await self.ask(together, policy)
        except JobError:
            if not together.answers:
                raise
        return together.answers

    async def attempt(
        self, question: Question, slot: Slot, policy: Policy, began: float | None = None, observer: Observer = SILENT
    ) -> Reply:
        """Send the question once in this slot, and learn from the outcome. ``began``: the time now. A request that may
        be lost is sent a second time meanwhile; then the first answer is returned."""
        if began is None:
            began = self.slots.loop.time()
        if slot.reservation is not None:
            self.endpoints.rate_limits.leaves(slot)
        if self.scheduler.standbys and (request := question.request) is not None:
            request.standby = slot.endpoint.standby
        deadline = self.endpoints.flights.begin(slot, question, policy, observer, began)
        second: Reply | None = None
        try:
            with deadline:
                reply = await question.send(slot.endpoint.name)
        except TimeoutError:
            if not deadline.expired:
                raise
            if (second := self.seconds.answer(slot)) is None:
                raise Timeout(self._too_late(slot, began, policy), text=question.text) from None
            reply = second
        except asyncio.CancelledError:
            if cancelled_by_us():
                raise
            raise Unavailable(f"{self.name} abandoned the call: something it awaited was cancelled") from None
        except BackendError as error:
            if (usable := question.instead(error)) is None:
                raise
            reply = usable
        finally:
            question.ended()
            self.endpoints.flights.end(slot)
            if self.seconds.tasks:
                await self.seconds.end(slot)
        question.check(reply)
        if second is not None:
            return reply  # the second request has reported it to its endpoint
        if reply.saved is None:
            self.endpoints.answered(slot, began, reply)
        else:
            self.endpoints.rate_limits.settle(slot, asked=False)
        return reply

    async def _hold(self, ticket: Ticket, policy: Policy) -> Slot:
        """Wait for the slot. The end of an outage is waited for only for a short time, or not at all. Raises if every
        endpoint is down."""
        timer: asyncio.TimerHandle | None = None
        if self._is_patient(policy):
            assert policy.wait_until is not None
            timer = self.slots.loop.call_at(policy.wait_until, self._lose_patience, ticket)
        elif ticket.slot is None and self._is_down(ticket):
            self.slots.withdraw(ticket)
            raise self._outage(ticket)
        else:
            self._impatient.add(ticket)
        try:
            return await self.slots.hold(ticket)
        finally:
            self._impatient.discard(ticket)
            if timer is not None:
                timer.cancel()

    async def reserve(self, slot: Slot, request: ModelRequest | None) -> Call | None:
        """Wait until rate limits and budget have room for the request, and return its reservation; None if nothing is
        limited. If they never will have room, the slot is released and the error raised."""
        spending = self.spending
        if spending is None or request is None:
            return None
        request.standby = slot.endpoint.standby  # it has prices of its own
        try:
            if slot.endpoint.server.rates is not None:
                await self.endpoints.rate_limits.afford(slot, partial(spending.expect, request))
            if (call := spending.reserve_nowait(request)) is not None:
                return call
            bought = isinstance(self.backend, Backend) and self.backend.has_bought(request)
            return await spending.reserve(request, bought=bought)
        except BaseException:
            self.slots.release(slot)
            raise

    def _is_worth(self, policy: Policy, ticket: Ticket) -> bool:
        return self._is_patient(policy) or not self._is_down(ticket)

    def _delay(self, slot: Slot, verdict: Verdict, error: BackendError, scope: Scope) -> float:
        """Return the seconds until the request joins the queue again."""
        endpoint, row = slot.endpoint, slot.ticket.row
        failures, asked = max(1, row.failures), min(error.retry_after or 0.0, N.longest_hold)
        if self.endpoints.is_endless and (error.retry_after or 0.0) > N.longest_hold:
            asked = N.busy  # the server may answer long before
        if row.crashes and not endpoint.given_up:  # few crashes over a long time, unless a few are enough
            return retry_delay(len(row.crashes) + (0 if row.crashes[-1].proven else 2), 0.0, self._chance())
        if endpoint.given_up or endpoint.health.is_down or verdict.at_once:
            return 0.0
        if scope == "confirm":
            return retry_delay(1, N.moment, self._chance())
        if verdict.soon:  # the endpoint holds back all requests after a Retry-After, or else this one waits alone
            held = endpoint.server.held_until and endpoint.server.held_for == inf
            wait = 0.0 if held or endpoint.server.is_excessive(error) else asked
            refused = max(row.refused, row.passed_over - N.twice)
            delay = retry_delay(1 + min(refused, N.most_doubled), wait, self._chance())
            return min(delay, max(row.until_ripe(self.slots.loop.time()), wait))
        if verdict.move and failures == 1:
            return 0.0
        return retry_delay(failures, 0.0 if verdict.move else asked, self._chance())

    @property
    def name(self) -> str:
        return "the server" if self.backend is None else self.backend.name

    def _too_late(self, slot: Slot, began: float, policy: Policy) -> str:
        seconds = self.slots.loop.time() - began
        if slot.recalled:
            return f"{self.name} did not answer within {seconds:.3g} s; the request was cancelled and is sent again"
        if slot.trial:
            return f"{self.name} gave no complete answer within {seconds:.3g} s in the first request after an outage"
        option = policy.timeout_option and f"{policy.timeout_option}, "
        return f"{self.name} gave no complete answer in {option}{policy.timeout or seconds:g} s"

    # Outages, for requests that do not wait

    def _is_patient(self, policy: Policy) -> bool:
        until = policy.wait_until
        return policy.wait_out and (until is None or self.slots.loop.time() < until)

    def _lose_patience(self, ticket: Ticket) -> None:
        self._impatient.add(ticket)
        self._reject_impatient()

    def _is_down(self, ticket: Ticket) -> bool:
        if ticket.pinned is not None:
            return not ticket.pinned.is_working
        return not any(endpoint.is_working for endpoint in self.scheduler.endpoints)

    def _outage(self, ticket: Ticket) -> Unavailable:
        endpoints = self.scheduler.endpoints if ticket.pinned is None else [ticket.pinned]
        reasons = dict.fromkeys(endpoint.given_up or endpoint.health.reason for endpoint in endpoints)
        why = "; ".join(filter(None, reasons)) or "it does not answer"
        return Unavailable(f"{self.name} is down: {why}", unreached=True)

    def _health_changed(self, endpoint: Endpoint, now: float) -> None:
        self._on_health(endpoint, now)
        if endpoint.health.state == "down":
            self._reject_impatient()

    def _reject_impatient(self) -> None:
        for ticket in tuple(self._impatient):
            if self._is_down(ticket):
                self.slots.reject(ticket, self._outage(ticket))

    # Agents

    def feed(self, on_close: Callable[[], None]) -> Feed:
        return self.slots.feed(on_close)

    def start_agent(self, progress: AgentForecast) -> Ticket:
        """Register a new agent and claim the slot of its first turn now, so that the room it takes is counted."""
        self.scheduler.start_agent()
        progress.live = True
        return self.slots.claim(progress, 0)

    def end_agent(self, progress: AgentForecast, turns: int) -> None:
        scheduler = self.scheduler
        most = scheduler.max_agents
        full = most is not None and scheduler.agents >= most
        scheduler.end_agent(progress, turns)
        # Its last slot was given back before, so that only these limits may let another agent start now.
        if full or scheduler.admission.is_on or len(scheduler.endpoints) > 1 or not turns:
            self.slots.pump()

    async def wait_for_tools(self, ended: asyncio.Future[T]) -> T:
        """Wait until the tools have ended. Raises if the run's time limit ends first."""
        self._tools_waited_for.add(ended)
        try:
            return await ended
        finally:
            self._tools_waited_for.discard(ended)

    # Control

    def drain(self) -> None:
        """Withdraw the first turns of agents that wait in the queue of a server, if the server reports its queue."""
        self.endpoints.flights.draining = True

    def pause(self) -> None:
        """Send nothing until ``resume``. Requests in flight finish."""
        self.slots.pause(True)

    def resume(self) -> None:
        self.slots.pause(False)

    def refuse(self, why: str) -> None:
        """Grant no more slots. Requests in flight finish, unless their endpoint is down."""
        self.slots.refuse(why, self.endpoints.rate_limits.short)
        self.endpoints.interrupt(self.slots.refusal)

    def refuse_now(self, why: str) -> None:
        """Grant no more slots, like ``refuse``, and end agents that wait for their tools."""
        self.refuse(why)
        for ended in tuple(self._tools_waited_for):
            if not ended.done():
                ended.set_exception(Interrupted(self.slots.refusal))

    def cut_off(self, told: Callable[[str], None]) -> None:
        """Cancel the requests that are still in flight after a short grace period, because the time of the run is over.
        ``told`` is called with the rows of these requests."""
        slowest = max(endpoint.health.slowest for endpoint in self.scheduler.endpoints)
        grace = min(LONGEST_GRACE, max(SHORTEST_GRACE, GRACE_FACTOR * slowest))
        self._cutting = self._cutting or self.slots.loop.call_later(grace, self._cut, grace, told)

    def _cut(self, grace: float, told: Callable[[str], None]) -> None:
        now = self.slots.loop.time()
        left = self.endpoints.flights.withdraw(now)
        if left:
            names = ", ".join(list(dict.fromkeys(name for name, _ in left if name))[:MOST_NAMED])
            oldest = max(now - sent_at for _, sent_at in left)
            what = f"{len(left)} requests" if len(left) > 1 else "1 request"
            rows = f" (of {names}{', …' if len(left) > MOST_NAMED else ''})" if names else ""
            self._cut_off = f"{self.slots.refusal}; this request was in flight, and was cancelled after {grace:g} s"
            told(f"{what} in flight{rows} had no answer {grace:g} s later, the oldest after {oldest:.0f} s")

    def _end(self, ended: Ended, why: str) -> None:
        """End the run: no endpoint is usable any more."""
        self.over = (ended, why)
        self.refuse(f"the run ended before this job finished: {why}")

    def set_backlogged(self, backlogged: bool) -> None:
        if backlogged != self.scheduler.backlogged:
            self.scheduler.backlogged = backlogged
            self.slots.pump()

    def set_at_tools(self, agents: int) -> None:
        """Set the number of agents that are blocked on saturated tools."""
        self.scheduler.at_tools = agents
        self.slots.pump()

    def resize(self, max_inflight: int | None) -> None:
        self.endpoints.resize(max_inflight)
        self.grow(max_inflight)

    def grow(self, max_inflight: int | None) -> None:
        """Change the limit over all endpoints. The limit of each endpoint stays."""
        self.scheduler.max_inflight = max_inflight
        self.slots.pump()

    def add(self, name: str, server: ServerState) -> Endpoint:
        """Use a server from now on. Returns its endpoint."""
        endpoint = self._endpoint(name, server)
        self.endpoints.attach(endpoint)
        self.scheduler.add(endpoint)
        self.slots.pump()
        return endpoint

    def retune(self, endpoint: Endpoint) -> None:
        """Apply a change in what the backend reports about the server."""
        terms, capacity = self.terms_of(endpoint.server), endpoint.capacity
        if capacity.search is None and not self.terms.given and terms.ceiling != capacity.ceiling:
            capacity.resize(terms.ceiling)
        self.scheduler.touch(endpoint)

    def leave(self, endpoint: Endpoint) -> None:
        """Send nothing more to the endpoint. If it is down, its requests in flight are cancelled and retried."""
        self.scheduler.leave(endpoint)
        if endpoint.inflight:
            self.endpoints.leave(endpoint)
        self.slots.pump()
        self._reject_impatient()

    def close(self) -> None:
        self.endpoints.close()
        self.slots.close()
        if self._cutting is not None:
            self._cutting.cancel()

    async def wait_closed(self) -> None:
        """Wait for the end of the control requests that ``close`` has cancelled."""
        await self.endpoints.controls.wait_closed()
