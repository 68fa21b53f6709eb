"""Questions that do not wait for a server that is down, and questions that are one request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf

import pytest

from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.dispatch.dispatcher import Dispatcher
from batch_agent.dispatch.policy import Policy, Question, Replies
from batch_agent.errors import BackendError, JobError, Unavailable, WorkerFailed
from batch_agent.messages import Conversation, Message, Reply
from batch_agent.scheduler.server_state import ServerState
from batch_agent.testing import Fail, ScriptedBackend, virtual_clock

NOW = Policy(2, wait_out=False, timeout=60.0)


def now() -> float:
    return asyncio.get_running_loop().time()


def unreachable() -> Reply:
    raise Unavailable("connection refused", unreached=True)


class Scripted(Question):
    def __init__(self, answer: Callable[[], Reply]) -> None:
        self._answer = answer

    async def send(self, endpoint: str) -> Reply:
        return self._answer()


async def ask(dispatcher: Dispatcher, answer: Callable[[], Reply]) -> str:
    try:
        return (await dispatcher.ask(Scripted(answer), NOW)).text
    except JobError as error:
        return str(error)


@virtual_clock
async def test_a_policy_limits_the_requests_whatever_the_cause_of_failures() -> None:
    sent = 0

    def overloaded() -> Reply:
        nonlocal sent
        sent += 1
        raise Unavailable("busy", status=503, overload=True)

    dispatcher = Dispatcher(None, 8, max_outage=inf)
    with pytest.raises(Unavailable, match="busy"):
        await dispatcher.ask(Scripted(overloaded), Policy(9, max_attempts=4))
    assert sent == 4


@virtual_clock
async def test_a_failure_that_its_caller_does_not_want_retried_is_final_at_once() -> None:
    failures = iter([Unavailable("reset"), Unavailable("broken", status=500), Unavailable("never sent")])

    def fail() -> Reply:
        raise next(failures)

    policy = Policy(9, wanted=lambda error: error.status is None)
    with pytest.raises(Unavailable, match="broken"):
        await Dispatcher(None, 8, max_outage=inf).ask(Scripted(fail), policy)
    assert str(next(failures)) == "never sent"


@virtual_clock
async def test_a_question_that_asks_when_a_trial_is_due_is_the_trial_and_others_fail_at_once() -> None:
    dispatcher = Dispatcher(None, 8, max_outage=inf)
    assert await ask(dispatcher, unreachable) == "connection refused"
    assert "is down: connection refused" in await ask(dispatcher, lambda: Reply("yes"))
    await asyncio.sleep(0.5)
    hung: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    class Slow(Question):
        async def send(self, endpoint: str) -> Reply:
            return await hung

    trial = asyncio.create_task(dispatcher.ask(Slow(), NOW))
    await asyncio.sleep(0)
    assert "is down" in await ask(dispatcher, lambda: Reply("yes"))
    hung.set_result(Reply("it is back"))
    assert (await trial).text == "it is back"
    assert await ask(dispatcher, lambda: Reply("yes")) == "yes"
    dispatcher.close()


@virtual_clock
async def test_without_an_end_of_patience_a_server_that_was_never_reached_is_tried_after_an_hour() -> None:
    dispatcher = Dispatcher(None, 8, max_outage=inf)
    for _ in range(60):
        await ask(dispatcher, unreachable)
        await asyncio.sleep(60)
    assert dispatcher.over is None
    assert await ask(dispatcher, lambda: Reply("yes")) == "yes"
    dispatcher.close()


@virtual_clock
async def test_a_trial_that_could_not_be_made_is_left_to_the_next_question() -> None:
    def raises() -> Reply:
        raise WorkerFailed("no prompt")

    dispatcher = Dispatcher(None, 8, max_outage=inf)
    await ask(dispatcher, unreachable)
    await asyncio.sleep(0.5)
    assert await ask(dispatcher, raises) == "no prompt"
    assert await ask(dispatcher, lambda: Reply("yes")) == "yes"
    dispatcher.close()


@virtual_clock
async def test_a_question_that_does_not_wait_fails_after_its_retries_whoever_is_to_blame() -> None:
    backend = ScriptedBackend(lambda request: Fail(500))
    dispatcher = Dispatcher(backend, 8, servers=backend.servers, max_outage=inf)
    request = ModelRequest(RequestShape("m"), Conversation([Message("user", "hello")]), "a")

    class Plain(Question):
        async def send(self, endpoint: str) -> Reply:
            return await backend.infer(request)

    with pytest.raises(Unavailable, match="500"):
        await dispatcher.ask(Plain(), NOW)
    assert len(backend.requests) == 3 and now() < 3
    dispatcher.close()


@virtual_clock
async def test_who_waits_for_a_slot_fails_when_the_last_server_leaves_the_fleet() -> None:
    dispatcher = Dispatcher(None, 1, servers={"one": ServerState("one"), "two": ServerState("two")}, max_outage=inf)

    class Hangs(Question):
        async def send(self, endpoint: str) -> Reply:
            return await asyncio.get_running_loop().create_future()

    hanging = asyncio.create_task(dispatcher.ask(Hangs(), NOW))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(ask(dispatcher, lambda: Reply("yes")))
    await asyncio.sleep(0)
    for endpoint in tuple(dispatcher.scheduler.endpoints):
        dispatcher.leave(endpoint)
    assert "is down" in await waiting
    hanging.cancel()
    await asyncio.wait([hanging])
    assert dispatcher.scheduler.inflight == 0
    dispatcher.close()


async def test_dispatchers_of_two_threads_at_one_server_do_not_disturb_each_other() -> None:
    server = ServerState("one")
    waits = Policy(2)

    async def finds_it_down() -> None:
        dispatcher = Dispatcher(None, 2, servers={"": server})
        assert await ask(dispatcher, unreachable) == "connection refused"
        dispatcher.close()

    dispatcher = Dispatcher(None, 2, servers={"": server})
    await asyncio.to_thread(asyncio.run, finds_it_down())
    async with asyncio.timeout(30):  # an alarm in the event loop of the other thread would never ring
        assert (await dispatcher.ask(Scripted(lambda: Reply("yes")), waits)).text == "yes"
    dispatcher.close()


class Together:
    def __init__(self, *answers: Reply | JobError) -> None:
        self._answers = answers
        self.sent = 0

    async def send(self, endpoint: str) -> Replies:
        self.sent += 1
        await asyncio.sleep(1)
        return self._answers


@virtual_clock
async def test_questions_of_one_request_take_one_slot_and_an_error_stays_in_its_place() -> None:
    dispatcher = Dispatcher(None, 1, max_outage=inf)
    error = BackendError("not this one")
    questions = Together(Reply("a"), error, Reply("c"))
    asking = asyncio.create_task(dispatcher.ask_many(questions, NOW))
    await asyncio.sleep(0.5)
    assert dispatcher.scheduler.inflight == 1
    assert await asking == (Reply("a"), error, Reply("c"))
    only_errors = Together(error, error)
    assert await dispatcher.ask_many(only_errors, NOW) == (error, error)
    with pytest.raises(BackendError, match=r"no complete answer in patience, 0\.5 s"):
        await dispatcher.ask_many(questions, Policy(0, wait_out=False, timeout=0.5, timeout_option="patience"))
    assert (questions.sent, only_errors.sent) == (2, 1)
    dispatcher.close()
