"""Our backends under the names that simulations call theirs by."""

from __future__ import annotations

import asyncio

import pytest
from tests.ticks.worlds import call, move, says, sources

from batch_agent.testing import Fail, Request, Say, ScriptedServer
from batch_agent.ticks import Action, Agent, AgentRuntime, GenerationResult, TextBackend


def script(request: Request) -> Say | Fail:
    return Fail(400) if "bad" in request.text else Say(f"echo {request.text}")


async def test_it_generates_one_and_many_and_errors_are_results() -> None:
    async with ScriptedServer(script, models=["m"]) as server:

        def use() -> None:
            with TextBackend(server.backend_url) as backend:
                assert backend.is_available()
                one = backend.generate("hello", temperature=0.1, max_tokens=9, system_prompt="Be kind.")
                assert (one.text, one.finish_reason) == ("echo hello", "stop") and one.tokens_used > 0
                many = backend.generate_batch(["a", "bad", "c"])
                assert [result.finish_reason for result in many] == ["stop", "error", "stop"]
                assert "400" in many[1].error

        await asyncio.to_thread(use)
        body = server.requests[0].body
        assert (body["temperature"], body["max_tokens"], body["model"]) == (0.1, 9, "m")
        assert body["messages"][0] == {"role": "system", "content": "Be kind."}  # type: ignore[index]


async def test_it_generates_with_tools_what_is_a_call_of_one() -> None:
    async with ScriptedServer(lambda request: says(), models=["m"]) as server:

        def use() -> str:
            with TextBackend(server.backend_url) as backend:
                return backend.generate_with_tools("Where to?", [move]).text

        assert await asyncio.to_thread(use) == call()
        assert server.requests[0].schema is not None


@pytest.mark.parametrize("model", [None, "m"])
def test_one_that_cannot_be_reached_is_not_available_and_says_why(model: str | None) -> None:
    with TextBackend("vllm://127.0.0.1:9", model=model, timeout=5.0) as backend:
        assert not backend.is_available()
        result = backend.generate("hello")
        assert result.finish_reason == "error" and "127.0.0.1:9" in result.error


async def test_one_that_refuses_the_key_is_not_available() -> None:
    async with ScriptedServer(script, models=["m"], api_key="right") as server:

        def are_available() -> list[bool]:
            with (
                TextBackend(server.backend_url, model="m", api_key="wrong") as one,
                TextBackend(server.backend_url, model="m", api_key="right") as other,
            ):
                return [one.is_available(), other.is_available()]

        assert await asyncio.to_thread(are_available) == [False, True]


async def test_an_agent_that_decides_by_itself_finds_the_runtimes_backend() -> None:
    class Asks(Agent):
        def decide_action(self) -> Action | None:
            said = self.backend.generate("Which way?", system_prompt="Be short.")  # type: ignore[attr-defined]
            return Action("go", {"to": said.text})

    async with ScriptedServer(lambda request: Say("north"), models=["m"]) as server:
        runtime = AgentRuntime(backend=server.backend_url)
        runtime.register_agent(Asks("a"))
        runtime.register_agent(Agent("plain", tools=[move]))
        async with runtime:
            actions = await runtime.process_tick(1, {"a": {}})
            assert actions["a"].parameters == {"to": "north"}

            class AsksInTheLoop(Agent):
                async def decide_action(self) -> Action | None:  # type: ignore[override]
                    self.backend.generate("x")  # type: ignore[attr-defined]
                    return None

            runtime.register_agent(AsksInTheLoop("b"))
            actions = await runtime.process_tick(2, {"b": {}})
            assert sources(actions) == {"b": ("fallback", None)}
            assert "call it in a thread" in str(actions["b"].reasoning)


async def test_closing_it_ends_the_call_of_another_thread() -> None:
    asked = asyncio.Event()

    async def hangs(request: Request) -> Say:
        asked.set()
        await asyncio.Event().wait()
        return Say("")

    async with ScriptedServer(hangs, models=["m"]) as server:
        backend = TextBackend(server.backend_url)
        asking = asyncio.create_task(asyncio.to_thread(backend.generate, "hello"))
        await asked.wait()
        await asyncio.to_thread(backend.close)
        [outcome] = await asyncio.gather(asking, return_exceptions=True)
        assert "closed" in (outcome.error if isinstance(outcome, GenerationResult) else str(outcome))


@pytest.mark.parametrize("method", ["generate", "generate_batch"])
def test_the_names_and_their_parameters_are_those_that_simulations_use(method: str) -> None:
    import inspect

    parameters = list(inspect.signature(getattr(TextBackend, method)).parameters)
    assert parameters[2:5] == ["temperature", "max_tokens", "system_prompt"]
