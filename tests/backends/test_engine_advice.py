"""What is advised, by what an engine was seen to have."""

from __future__ import annotations

import pytest

from batch_agent.backends.engines.engine import FLAGS, EngineState, advice


@pytest.mark.parametrize("engine", FLAGS)
def test_an_engine_that_has_everything_or_says_nothing_gets_no_advice(engine: str) -> None:
    assert not list(advice(EngineState(engine), agents=10, context_tokens=10))
    state = EngineState(engine, True, True, True, True, True, 1_000)
    assert not list(advice(state, agents=10, context_tokens=100))


@pytest.mark.parametrize("engine", FLAGS)
def test_each_lack_has_its_flag_the_most_valuable_first(engine: str) -> None:
    state = EngineState(engine, False, False, False, False, kv_tokens=999)
    flags = [each.flag for each in advice(state, agents=10, context_tokens=100)]
    names = ("prefix_caching", "kv_tokens", "reports_cached", "offloads", "by_priority")
    assert flags == [FLAGS[engine][name] for name in names]
