"""The patterns on real sockets: what is asked of whom, and what becomes of answers that do not come."""

from __future__ import annotations

import inspect

import pytest
from pydantic import BaseModel
from tests.swarm.agents import Agent, Asked, Body, agents, answer, hang, refuse

from batch_agent.errors import SpecError
from batch_agent.swarm import AgentEndpoint, AgentPool, Response, VLLMPool
from batch_agent.swarm.patterns.blackboard import Blackboard
from batch_agent.swarm.patterns.broadcast import broadcast, broadcast_and_reduce
from batch_agent.swarm.patterns.pipeline import Stage, fan_out_fan_in, run_pipeline
from batch_agent.swarm.patterns.scatter_gather import map_gather, scatter_gather
from batch_agent.swarm.patterns.tree_reduce import tree_reduce


class Summary(BaseModel):
    text: str


def failing(*prompts: str) -> Agent:
    return Agent(lambda asked: refuse(500) if asked.prompts[0] in prompts else answer(asked))


@pytest.mark.parametrize(
    ("function", "known"),
    [
        (broadcast, {"prompt": ...}),
        (broadcast_and_reduce, {"prompt": ..., "reduce_prompt": ..., "reducer_agent_index": 0}),
        (scatter_gather, {"prompts": ...}),
        (map_gather, {"items": ..., "prompt_template": ...}),
        (tree_reduce, {"prompt": ..., "reduce_prompt": ..., "fanin": 50, "items": None}),
        (run_pipeline, {"stages": ..., "initial_input": ..., "reuse_agents": True}),
        (fan_out_fan_in, {"prompt": ..., "collect_prompt": ..., "n_workers": None}),
        (Stage, {"prompt_template": ..., "n_agents": ..., "output_transform": None, "output_filter": None}),
        (Blackboard.run, {"pool": ..., "max_rounds": 10, "convergence_fn": None}),
    ],
)
def test_a_pattern_has_the_known_arguments(function: object, known: dict[str, object]) -> None:
    parameters = list(inspect.signature(function).parameters.values())[1:]  # type: ignore[arg-type]
    positional = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert {each.name: ... if each.default is each.empty else each.default for each in positional} == known


async def test_a_broadcast_and_reduce_shows_one_agent_what_all_said() -> None:
    given = [Agent(name="a"), Agent(lambda asked: refuse(500)), Agent(name="c")]
    async with agents(*given) as endpoints, VLLMPool(endpoints, max_tokens=100) as pool:
        assert [response.success for response in await broadcast(pool, "hi")] == [True, False, True]
        response = await broadcast_and_reduce(pool, "hi", "Sum up {responses} {level}", reducer_agent_index=2)
    assert given[2].prompts[-1] == "Sum up a<hi>\n---\nc<hi> {level}"
    assert given[2].asked[-1].body["max_tokens"] == 200
    assert given[2].asked[-1].path == "/v1/chat/completions"
    assert (response.success, response.agent_index) == (True, 2)


async def test_nobody_is_asked_to_sum_up_nothing() -> None:
    agent = Agent(lambda asked: refuse(500, "out of order"))
    async with agents(agent) as endpoints, AgentPool(endpoints) as pool:
        response = await broadcast_and_reduce(pool, "hi", "{responses}")
    assert (response.success, len(agent.asked)) == (False, 1)
    assert "all 1 requests failed" in (response.error or "")
    assert "out of order" in (response.error or "")


async def test_the_schema_of_a_reduction_is_that_of_its_answer() -> None:
    def say(asked: Asked) -> Body:
        said = answer(asked)
        if asked.prompts[0].startswith("Sum"):
            said["choices"][0]["message"]["content"] = '{"text": "all"}'
        return said

    agent = Agent(say)
    async with agents(agent) as endpoints, VLLMPool(endpoints) as pool:
        response = await broadcast_and_reduce(pool, "hi", "Sum up {responses}", schema=Summary, temperature=0.0)
        collected = await fan_out_fan_in(pool, "hi", "Sum up {responses}", schema=Summary, dispatch="balanced")
    assert ["response_format" in asked.body for asked in agent.asked] == [False, True] * 2
    assert ["temperature" in asked.body for asked in agent.asked] == [True, True, False, False]
    assert response.parsed == collected.parsed == Summary(text="all")


async def test_items_are_put_into_the_template_and_their_braces_stay() -> None:
    agent = Agent()
    async with agents(agent) as endpoints, VLLMPool(endpoints) as pool:
        await map_gather(pool, ["{item}", 5], 'Look: {item} {"json": 1}')
        await scatter_gather(pool, ["x"], chat=True)
    assert agent.asked[0].body["prompt"] == ['Look: {item} {"json": 1}', 'Look: 5 {"json": 1}']
    assert agent.asked[1].path == "/v1/chat/completions"


# Trees


async def test_a_tree_sums_up_level_by_level_with_chat_requests() -> None:
    agent = Agent(lambda asked: answer(asked) | {"choices": [_chat(_brief(asked.prompts[0]))]})
    async with agents(agent) as endpoints, VLLMPool(endpoints) as pool:
        result = await tree_reduce(
            pool, "do {item}", "L{level}: {responses}", fanin=2, items=["a", "b", "c"], keep_levels=True
        )
    assert agent.prompts == ["do a", "do b", "do c", "L1: A\n---\nB", "L1: C", "L2: L1: A\n---\nB\n---\nL1: C"]
    assert {asked.path for asked in agent.asked} == {"/v1/chat/completions"}
    assert {asked.body["max_tokens"] for asked in agent.asked} == {512}
    assert (result.success, result.agent_index, result.finish_reason) == (True, -1, "stop")
    assert (result.coverage.leaves, result.coverage.included, result.coverage.lost) == (3, (0, 1, 2), {})
    assert [len(level) for level in result.levels] == [3, 2, 1]
    assert result.usage is not None and result.usage.completion_tokens == 5 * 6
    assert isinstance(result, Response)


def _chat(text: str) -> Body:
    return {"index": 0, "message": {"content": text}, "finish_reason": "stop"}


def _brief(prompt: str) -> str:
    return prompt.removeprefix("do ").upper() if prompt.startswith("do ") else prompt


async def test_what_a_tree_loses_it_tells() -> None:
    def say(asked: Asked) -> Body:
        prompt = asked.prompts[0]
        if prompt == "1":
            return refuse(500, "broken")  # type: ignore[return-value]
        if "<4>" in prompt and prompt.startswith("R"):
            return refuse(500, "too much")  # type: ignore[return-value]
        return answer(asked) | {"choices": [_chat(" " if prompt == "2" else f"<{prompt}>")]}

    async with agents(Agent(say)) as endpoints, VLLMPool(endpoints) as pool:
        result = await tree_reduce(pool, "{item}", "R{responses}", fanin=2, items=range(6))
    assert result.success
    assert result.coverage.included == (0, 3)
    assert list(result.coverage.lost) == [1, 2, 4, 5]
    assert "broken" in result.coverage.lost[1]
    assert result.coverage.lost[2] == "the answer was blank"
    assert result.coverage.lost[4].startswith("level 1: ") and "too much" in result.coverage.lost[5]
    assert result.levels == []


async def test_without_items_each_agent_is_a_leaf_and_a_single_one_is_returned_as_it_is() -> None:
    given = [Agent(name="a"), failing("hi")]
    async with agents(*given) as endpoints, AgentPool(endpoints) as pool:
        result = await tree_reduce(pool, "hi", "{responses}")
    assert (result.success, result.text, result.agent_index) == (True, "a<hi>", -1)
    assert (result.coverage.included, list(result.coverage.lost)) == ((0,), [1])
    assert [len(agent.asked) for agent in given] == [1, 1]


async def test_a_tree_without_leaves_is_a_failed_response() -> None:
    async with agents(failing("a", "b")) as endpoints, AgentPool(endpoints) as pool:
        result = await tree_reduce(pool, "{item}", "{responses}", items=["a", "b"])
        nothing = await tree_reduce(pool, "{item}", "{responses}", items=[])
    assert not result.success
    assert "500" in (result.error or "")
    assert (nothing.success, nothing.error) == (False, "no answer was left to summarise")


async def test_what_stands_in_the_data_is_not_taken_for_the_template() -> None:
    agent = Agent(lambda asked: {"response": "{level} {responses}"})
    async with agents(agent) as endpoints, AgentPool(endpoints) as pool:
        await tree_reduce(pool, "{item}", "{level}: {responses}", items=["x", "y"])
    assert agent.prompts[-1] == "1: {level} {responses}\n---\n{level} {responses}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fanin": 1}, "fanin is 1"),
        ({"reduce_prompt": "all"}, "has no {responses}"),
        ({"max_context": 100}, "max_context is 100"),
    ],
)
async def test_a_tree_that_could_never_end_is_an_error(arguments: dict[str, object], message: str) -> None:
    async with AgentPool([("127.0.0.1", 1)]) as pool:
        with pytest.raises(SpecError, match=message):
            await tree_reduce(pool, "x", **({"reduce_prompt": "{responses}"} | arguments))  # type: ignore[arg-type]


async def test_groups_are_no_larger_than_what_fits_the_context() -> None:
    agent = Agent(lambda asked: {"response": asked.prompts[0] if len(asked.prompts[0]) <= 800 else "short"})
    async with agents(agent) as endpoints, AgentPool(endpoints) as pool:
        result = await tree_reduce(pool, "{item}", "{responses}", items=["x" * 800] * 7, max_context=512 + 500)
        too_large = await tree_reduce(pool, "{item}", "{responses}", items=["x" * 800] * 3, max_context=512 + 300)
    assert result.text == "short"
    assert result.coverage.included == tuple(range(7))
    assert max(len(prompt) for prompt in agent.prompts) <= 2000
    assert "no two of 3 answers fit max_context, 812 tokens" in (too_large.error or "")
    assert (too_large.success, list(too_large.coverage.lost)) == (False, [0, 1, 2])


# Boards


def roles(endpoints: list[AgentEndpoint], *names: str) -> list[AgentEndpoint]:
    pairs = zip(endpoints, names, strict=True)
    return [AgentEndpoint(endpoint.host, endpoint.port, {"role": name}) for endpoint, name in pairs]


async def test_a_board_is_written_on_by_section_and_round() -> None:
    given = [Agent(name="h"), Agent(name="c"), failing("critiques 1"), Agent(name="other")]
    seen: list[int] = []
    board = Blackboard(
        ["hypotheses", "critiques", "conclusions"], lambda role, state: f"{role} {len(state['hypotheses'])}"
    )
    assert (board.board, board.round) == ({"hypotheses": [], "critiques": [], "conclusions": []}, 0)
    async with agents(*given) as endpoints:
        pool = AgentPool(roles(endpoints, "hypotheses", "critiques", "critiques", "worker"))
        final = await board.run(pool, 5, lambda state: seen.append(1) is None and len(state["hypotheses"]) == 2)
        await pool.close()
    assert final is board.board
    assert final == {
        "hypotheses": ["h<hypotheses 0>", "h<hypotheses 1>"],
        "critiques": ["c<critiques 1>", "c<critiques 2>", "<critiques 2>"],
        "conclusions": [],
    }
    assert (board.round, len(seen), given[3].asked) == (2, 2, [])
    snapshot = board.snapshot()
    final["critiques"].clear()
    assert (snapshot["round"], len(snapshot["board"]["critiques"])) == (2, 3)


# Pipelines


async def test_a_stage_is_given_what_the_one_before_made() -> None:
    given = [Agent(name="a"), Agent(name="b"), Agent(name="c")]
    async with agents(*given) as endpoints, AgentPool(endpoints) as pool:
        result = await run_pipeline(
            pool,
            [
                Stage("draft", "Draft {input}", 2, output_filter=lambda response: response.text.startswith("b")),
                Stage("count", "Count {input}", 1, output_transform=len),
                Stage("end", "End {input}", 9),
            ],
            {"a": 1},
        )
    assert given[1].prompts[0] == "Draft {'a': 1}"
    assert given[0].prompts[1] == "Count b<Draft {'a': 1}>"
    assert result == "a<End 1>\nb<End 1>\nc<End 1>"


async def test_stages_may_have_agents_of_their_own_and_running_out_of_them_is_an_error() -> None:
    given = [Agent(name="a"), Agent(name="b"), Agent(name="c")]
    two = [Stage("one", "{input}", 2), Stage("two", "{input}", 2)]
    async with agents(*given) as endpoints, AgentPool(endpoints) as pool:
        await run_pipeline(pool, two, "x", reuse_agents=False)
        asked = [len(agent.asked) for agent in given]
        with pytest.raises(SpecError, match="no agent is left for the stage 'three'"):
            await run_pipeline(pool, [*two, Stage("three", "{input}", 1)], "x", reuse_agents=False)
        with pytest.raises(SpecError, match="n_agents of the stage 'none' is 0"):
            await run_pipeline(pool, [Stage("none", "{input}", 0)], "x")
    assert asked == [len(agent.asked) for agent in given] == [1, 1, 1]


async def test_a_fan_out_to_nobody_is_an_error_that_says_so() -> None:
    async with AgentPool([("host", 1)]) as pool:
        with pytest.raises(SpecError, match="n_workers is 0"):
            await fan_out_fan_in(pool, "hi", "All: {responses}", n_workers=0)


async def test_the_first_workers_answer_and_agent_0_collects() -> None:
    given = [Agent(name="a"), Agent(name="b"), Agent(name="c")]
    async with agents(*given) as endpoints, VLLMPool(endpoints) as pool:
        response = await fan_out_fan_in(pool, "hi", "All: {responses}", n_workers=2)
        await fan_out_fan_in(pool, "hi", "All: {responses}")
    assert given[0].prompts[:2] == ["hi", "All: a<hi>\n---\nb<hi>"]
    assert given[0].asked[1].body["max_tokens"] == 1024
    assert given[2].prompts == ["hi"]
    assert response.text == "a<All: a<hi>\n---\nb<hi>>"


async def test_a_deadline_is_for_all_steps_together() -> None:
    agent = Agent(lambda asked: hang(asked) if asked.prompts[0].startswith("All") else answer(asked))
    async with agents(agent) as endpoints, AgentPool(endpoints) as pool:
        response = await fan_out_fan_in(pool, "hi", "All {responses}", deadline=0.1)
    assert not response.success
    assert "deadline" in (response.error or "")
