"""Backends of the user's own: prompts in, texts out, sync or async, one by one or together."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from tests.ticks.worlds import call, move, registered, sources

from batch_agent.errors import SpecError
from batch_agent.testing import Request, Say, ScriptedServer, virtual_clock
from batch_agent.ticks import Action, Agent, AgentRuntime, GenerationResult, TextBackend


class One:
    """Has ``generate`` alone, and is not async."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.options: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._at_work = 0
        self.most_at_work = 0

    def generate(
        self,
        prompt: str,
        temperature: float | None = None,
        max_tokens: int | None = None,
        system_prompt: str | None = None,
    ) -> GenerationResult:
        with self._lock:
            self.prompts.append(prompt)
            self.options.append({"temperature": temperature, "max_tokens": max_tokens, "system": system_prompt})
            self._at_work += 1
            self.most_at_work = max(self.most_at_work, self._at_work)
        threading.Event().wait(0.01)
        with self._lock:
            self._at_work -= 1
        return GenerationResult(call(), 7, "stop", {})

    def is_available(self) -> bool:
        return True


class Many:
    """Answers many at once."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []

    def generate_batch(self, prompts: Sequence[str]) -> list[object]:
        self.batches.append(list(prompts))
        return [call(prompt.partition("You are agent ")[2].partition(".")[0]) for prompt in prompts]


async def test_all_prompts_of_a_tick_are_one_call_of_generate_batch() -> None:
    backend = Many()
    async with registered(AgentRuntime(backend=backend), *"abcde") as runtime:
        for tick in (1, 2):
            actions = await runtime.process_tick(tick, {key: {"tick": tick} for key in "abcde"})
            assert {name: action.parameters["direction"] for name, action in actions.items()} == dict(
                zip("abcde", "abcde", strict=True)
            )
    assert [len(batch) for batch in backend.batches] == [5, 5]
    assert "- move: Walk." in backend.batches[0][0]  # it has no parameter for a system prompt


@virtual_clock
async def test_questions_that_wait_for_a_slot_are_one_call_and_tools_may_differ() -> None:
    calls: list[list[str]] = []

    class Slow:
        async def generate_batch(self, prompts: list[str]) -> list[str]:
            calls.append([prompt.partition("You are agent ")[2][:1] for prompt in prompts])
            await asyncio.sleep(1)
            return [call() for _ in prompts]

    runtime = registered(AgentRuntime(backend=Slow(), max_inflight=1), *"abcd")
    runtime.register_agent(Agent("e", tools=[move, "sing"]))
    async with runtime:
        ticks = []
        for ids in ("ab", "c", "de"):
            ticks.append(asyncio.create_task(runtime.process_tick(1, dict.fromkeys(ids))))
            await asyncio.sleep(0.3)
        for tick in ticks:
            assert set(sources(await tick).values()) == {("answer", 1)}
    assert calls == [["a", "b"], ["c", "d", "e"]]


async def test_a_backend_that_answers_one_by_one_is_asked_by_max_workers_threads() -> None:
    backend = One()
    async with registered(AgentRuntime(3, backend=backend, temperature=0.5), *map(str, range(9))) as runtime:
        actions = await runtime.process_tick(1, {str(number): {} for number in range(9)})
    assert len(actions) == len(backend.prompts) == 9
    assert backend.most_at_work == 3
    assert backend.options[0]["temperature"] == 0.5 and "- move: Walk." in backend.options[0]["system"]


async def test_a_backend_may_be_async_and_return_text_or_mappings() -> None:
    class Async:
        async def generate(self, prompt: str, **options: object) -> dict[str, object]:
            await asyncio.sleep(0)
            return {"text": call(), "tokens_used": 3, "finish_reason": "stop"}

    class AsyncMany:
        async def generate_batch(self, prompts: list[str], **options: object) -> list[str]:
            return [call() for _ in prompts]

    for backend in (Async(), AsyncMany()):
        async with registered(AgentRuntime(backend=backend), "a", "b") as runtime:
            actions = await runtime.process_tick(1, {"a": {}, "b": {}})
        assert set(sources(actions).values()) == {("answer", 1)}


async def test_an_agent_may_have_a_backend_of_its_own() -> None:
    own, shared = Many(), Many()
    runtime = registered(AgentRuntime(backend=shared), "a")
    runtime.register_agent(Agent("b", own, tools=[move]))
    async with runtime:
        await runtime.process_tick(1, {"a": {}, "b": {}})
    assert (len(own.batches), len(shared.batches)) == (1, 1)


async def test_an_error_that_comes_back_as_a_result_is_idling_with_its_reason() -> None:
    class Broken:
        def generate(self, prompt: str) -> GenerationResult:
            return GenerationResult("", 0, "error", {"error": "out of memory"})

    async with registered(AgentRuntime(backend=Broken()), "a") as runtime:
        action = (await runtime.process_tick(1, {"a": {}}))["a"]
    assert action.source == "fallback" and "out of memory" in str(action.reasoning)


async def test_one_bad_prompt_of_a_batch_fails_alone() -> None:
    class Picky(Many):
        def generate_batch(self, prompts: Sequence[str]) -> list[object]:
            if any("agent c." in prompt for prompt in prompts):
                raise ValueError("I do not like c")
            return super().generate_batch(prompts)

    class PickyInPlace(Many):
        def generate_batch(self, prompts: Sequence[str]) -> list[object]:
            return [GenerationResult("no", 0, "error") if "agent c." in p else call() for p in prompts]

    for backend in (Picky(), PickyInPlace()):
        async with registered(AgentRuntime(backend=backend), *"abcd") as runtime:
            for tick in (1, 2):
                actions = await runtime.process_tick(tick, dict.fromkeys("abcd"))
                assert [action.source for action in actions.values()] == ["answer", "answer", "fallback", "answer"]


@pytest.mark.parametrize("answers", [[], ["x"], None, 3])
async def test_a_batch_with_another_number_of_answers_is_nobodys(answers: object) -> None:
    class Short:
        def generate_batch(self, prompts: list[str]) -> object:
            return answers

    async with registered(AgentRuntime(backend=Short()), "a", "b") as runtime:
        actions = await runtime.process_tick(1, {"a": {}, "b": {}})
    assert set(sources(actions).values()) == {("fallback", None)}


async def test_a_backend_that_is_not_available_is_not_asked_until_it_is() -> None:
    class Loading(One):
        ready = False

        def is_available(self) -> bool:
            return self.ready

    backend = Loading()
    runtime = registered(AgentRuntime(backend=backend), "a")
    action = (await runtime.process_tick(1, {"a": {}}))["a"]
    assert "not available" in str(action.reasoning) and backend.prompts == []
    backend.ready = True
    assert sources(await runtime.process_tick(2, {"a": {}})) == {"a": ("answer", 2)}
    await runtime.stop()


async def test_a_thread_that_hangs_holds_no_tick_and_no_exit() -> None:
    free = threading.Event()

    class Hung(One):
        def generate(self, prompt: str, **options: Any) -> GenerationResult:
            if "agent b." in prompt:
                free.wait()
            return super().generate(prompt)

    runtime = registered(AgentRuntime(backend=Hung(), deadline=0.1), "a", "b")
    actions = await runtime.process_tick(1, {"a": {}, "b": {}})
    assert sources(actions) == {"a": ("answer", 1), "b": ("fallback", None)}
    await runtime.stop()
    free.set()


async def test_agents_that_decide_by_themselves_do_so_in_threads_or_as_coroutines() -> None:
    class Simple(Agent):
        def decide_action(self) -> Action | None:
            thread = threading.current_thread().name
            return Action("move", {"direction": self.state.observations[-1].data, "thread": thread})

    class Async(Agent):
        async def decide_action(self) -> Action | None:  # type: ignore[override]
            return Action("wait")

    class Nothing(Agent):
        def decide_action(self) -> Action | None:
            return None

    runtime = AgentRuntime(backend=One())
    for agent in (Simple("simple"), Async("async"), Nothing("nothing")):
        runtime.register_agent(agent)
    async with runtime:
        actions = await runtime.process_tick(1, dict.fromkeys(["simple", "async", "nothing"], "south"))
    assert actions["simple"].parameters["direction"] == "south"
    assert actions["simple"].parameters["thread"] != threading.main_thread().name
    assert sources(actions) == {"simple": ("answer", 1), "async": ("answer", 1), "nothing": ("fallback", None)}
    assert "nothing" in str(actions["nothing"].reasoning)


async def test_an_agent_that_decides_by_itself_may_ask_as_before_and_remembers_once() -> None:
    class Careful(Agent):
        def decide_action(self) -> Action | None:
            action = super().decide_action()
            return action if action is not None and action.tool_name == "move" else Action("wait")

    backend = One()
    runtime = AgentRuntime(backend=backend)
    careful = Careful("a", backend, tools=[move])
    runtime.register_agent(careful)
    async with runtime:
        assert sources(await runtime.process_tick(1, {"a": {}})) == {"a": ("answer", 1)}
    assert careful.backend is backend
    assert len(careful.state.action_history) == 1


def test_decide_action_asks_the_agents_backend_without_a_runtime() -> None:
    agent = Agent("a", One(), tools=[move])
    agent.perceive({"x": 1})
    action = agent.decide_action()
    assert action is not None and (action.tool_name, action.source) == ("move", "answer")
    assert agent.get_state().action_history == [action]
    nobody = Agent("b").decide_action()
    assert nobody is not None and nobody.source == "fallback"


async def test_a_batch_that_comes_late_is_delivered_at_the_next_tick() -> None:
    free = threading.Event()

    class Slow(Many):
        def generate_batch(self, prompts: Sequence[str]) -> list[object]:
            free.wait()
            return super().generate_batch(prompts)

    backend = Slow()
    async with registered(AgentRuntime(backend=backend, deadline=0.1), "a", "b") as runtime:
        assert set(sources(await runtime.process_tick(1, {"a": {}, "b": {}})).values()) == {("fallback", None)}
        free.set()
        assert set(sources(await runtime.process_tick(2, {"a": {}, "b": {}})).values()) == {("late", 1)}
    assert len(backend.batches) == 1


class Talks:
    """Notes the calls of ``generate_batch``, and answers each prompt."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], object]] = []

    def note(self, prompts: Sequence[str], system: object) -> list[object]:
        self.calls.append(([prompt.partition("You are agent ")[2][:1] for prompt in prompts], system))
        return [call(prompt.partition("You are agent ")[2].partition(".")[0]) for prompt in prompts]


class TakesOne(Talks):
    def generate_batch(self, prompts: Sequence[str], system_prompt: str | None = None) -> list[object]:
        return self.note(prompts, str(system_prompt)[:1])


class TakesAny(Talks):
    async def generate_batch(self, prompts: Sequence[str], **options: str) -> list[object]:
        return self.note(prompts, options["system_prompt"][:1])


class TakesList(Talks):
    def generate_batch(self, prompts: Sequence[str], system_prompts: Sequence[str] = ()) -> list[object]:
        return self.note(prompts, [system[:1] for system in system_prompts])


class TakesNone(Talks):
    def generate_batch(self, prompts: Sequence[str]) -> list[object]:
        return self.note(prompts, [prompt[:1] for prompt in prompts])


@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        (TakesOne, [(["a", "c"], "X"), (["b"], "Y")]),
        (TakesAny, [(["a", "c"], "X"), (["b"], "Y")]),
        (TakesList, [(["a", "b", "c"], ["X", "Y", "X"])]),
        (TakesNone, [(["a", "b", "c"], ["X", "Y", "X"])]),
    ],
)
async def test_agents_of_a_batch_get_their_own_system_prompts(kind: type[Talks], calls: list[object]) -> None:
    backend = kind()
    runtime = AgentRuntime(backend=backend, system_prompt="X general")
    for name, system in (("a", None), ("b", "Y of b"), ("c", None)):
        runtime.register_agent(Agent(name, tools=[move], system_prompt=system))
    async with runtime:
        actions = await runtime.process_tick(1, dict.fromkeys("abc"))
    assert {name: action.parameters["direction"] for name, action in actions.items()} == {"a": "a", "b": "b", "c": "c"}
    assert backend.calls == calls


class Result:
    """A result of which one attribute raises."""

    def __init__(self, broken: str) -> None:
        self._broken = broken
        if broken != "text":
            self.text = call()

    def __getattr__(self, name: str) -> object:
        if name == self._broken:
            raise ValueError(f"{name} is gone")
        raise AttributeError(name)


class NoText:
    def __str__(self) -> str:
        raise ValueError("no")


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        *((Result(name), f"{name} raised ValueError: {name} is gone") for name in ("text", "tokens_used", "metadata")),
        (Result("finish_reason"), "finish_reason"),
        ({"text": NoText()}, "without text"),
        ({"text": "", "finish_reason": "error", "metadata": {"error": NoText()}}, "unreadable"),
        (None, "without text"),
    ],
)
@virtual_clock
async def test_a_result_that_cannot_be_read_is_its_own_agents_failure_at_once(broken: object, why: str) -> None:
    class One:
        async def generate(self, prompt: str) -> object:
            return broken if "agent b." in prompt else call()

    class Many:
        async def generate_batch(self, prompts: list[str]) -> object:
            return iter([broken if "agent b." in prompt else call() for prompt in prompts])

    for backend in (One(), Many()):
        async with registered(AgentRuntime(backend=backend), *"abc") as runtime:
            for tick in (1, 2):
                actions = await runtime.process_tick(tick, dict.fromkeys("abc"))
                assert [action.source for action in actions.values()] == ["answer", "fallback", "answer"]
                assert why in str(actions["b"].reasoning)
    assert asyncio.get_running_loop().time() == 0.0


@virtual_clock
async def test_a_finish_reason_that_is_no_text_costs_nothing() -> None:
    class Odd:
        async def generate(self, prompt: str) -> object:
            return {"text": call(), "finish_reason": NoText()}

    async with registered(AgentRuntime(backend=Odd()), "a") as runtime:
        assert sources(await runtime.process_tick(1, {"a": {}})) == {"a": ("answer", 1)}


@virtual_clock
async def test_a_batch_that_never_comes_back_is_asked_again_and_its_call_is_cancelled() -> None:
    under_way: list[int] = []
    calls: list[int] = []

    class Swallows:
        async def generate_batch(self, prompts: list[str]) -> list[str]:
            under_way.append(len(prompts))
            calls.append(len(prompts))
            try:
                if len(calls) == 2:
                    await asyncio.Event().wait()
                await asyncio.sleep(0.1)
                return [call() for _ in prompts]
            finally:
                under_way.remove(len(prompts))

    async with registered(AgentRuntime(backend=Swallows(), deadline=0.5), *"abc") as runtime:
        found = [sources(await runtime.process_tick(tick, dict.fromkeys("abc"))) for tick in range(1, 8)]
        assert under_way == []
    assert found[-1] == dict.fromkeys("abc", ("answer", 7))
    assert calls[:4] == [3, 3, 1, 3]


async def test_a_text_backend_gives_each_agent_of_a_batch_its_own_system_prompt() -> None:
    def script(request: Request) -> Say:
        return Say(call(str(request.messages[0]["content"])[:1]))

    async with ScriptedServer(script, models=["m"]) as server:
        backend = TextBackend(server.backend_url)
        runtime = AgentRuntime(backend=backend)
        for name in "ab":
            runtime.register_agent(Agent(name, tools=[move], system_prompt=f"{name} it is."))
        async with runtime:
            actions = await runtime.process_tick(1, {"a": {}, "b": {}})
        assert {name: action.parameters["direction"] for name, action in actions.items()} == {"a": "a", "b": "b"}
        with pytest.raises(SpecError, match="1 system_prompts for 2 prompts"):
            await asyncio.to_thread(lambda: backend.generate_batch(["x", "y"], system_prompts=["z"]))
        await asyncio.to_thread(backend.close)
