"""The simulated engine as pure code: invariants under any order of events, and each mechanism on its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from batch_agent.backends.simulated.core import Sequence, SimulatedEngine, SimulatedStep
from batch_agent.backends.simulated.model import EngineModel
from batch_agent.backends.simulated.tokens import TOKEN_BYTES, count_tokens
from batch_agent.errors import ContextOverflow, Unavailable
from batch_agent.vllm_pin import Order

SMALL = EngineModel(
    kv_tokens=96, block_size=4, context_tokens=64, max_num_seqs=4, max_batched_tokens=16, step_seconds=1.0
)


def tokens(count: int, kind: str = "a") -> bytes:
    """``count`` tokens, all different, the same for the same kind."""
    return b"".join(f"{kind}{index:03d}".encode() for index in range(count))


def run(engine: SimulatedEngine) -> list[SimulatedStep]:
    steps = []
    while (step := engine.schedule()) is not None:
        engine.complete(step)
        steps.append(step)
        assert len(steps) < 10_000
    return steps


def run_one(engine: SimulatedEngine, prompt: bytes, output: bytes) -> Sequence:
    sequence = engine.add(prompt, output)
    run(engine)
    return sequence


requests = st.tuples(st.integers(1, 40), st.integers(1, 24), st.sampled_from("abc"), st.integers(-2, 2))
actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), requests),
        st.tuples(st.just("step"), st.integers(1, 5)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
    ),
    max_size=40,
)


def check_blocks(engine: SimulatedEngine) -> None:
    """Held blocks are exactly those of running sequences, enough for each, and shared only by equal histories."""
    size = engine.model.block_size
    held: dict[int, bytes] = {}
    for sequence in engine.running:
        assert len(sequence.blocks) * size >= sequence.computed
        text = sequence.prompt + sequence.output
        for index, block in enumerate(sequence.blocks):
            history = text[: (index + 1) * size * TOKEN_BYTES]
            assert held.setdefault(block, history) == history
    assert len(held) == engine.pool.held <= engine.pool.num_gpu_blocks


def play(model: EngineModel, script: list[tuple[str, object]]) -> list[object]:
    """Carries the script out, checks what must always hold, and returns all that could be seen."""
    engine = SimulatedEngine(model)
    added: list[Sequence] = []
    finished: list[int] = []
    trace: list[object] = []

    def step() -> bool:
        planned = engine.schedule()
        check_blocks(engine)
        assert len(engine.running) <= model.max_num_seqs
        if planned is None:
            return False
        assert 0 < sum(planned.shares.values()) <= model.max_batched_tokens
        advanced = engine.complete(planned)
        finished.extend(sequence.arrival for sequence in advanced if sequence.ended)
        trace.append((planned.seconds, [(each.arrival, tokens) for each, tokens in planned.shares.items()]))
        return True

    for kind, value in script:
        if kind == "add":
            prompt, output, text, priority = value  # type: ignore[misc]
            added.append(engine.add(tokens(prompt, text), tokens(output, "o"), priority))
        elif kind == "abort" and added:
            engine.abort(added[value % len(added)])  # type: ignore[operator]
        elif kind == "step":
            for _ in range(value):  # type: ignore[call-overload]
                step()
    while step():
        assert len(trace) < 20_000

    aborted = [s.arrival for s in added if s.arrival not in finished]
    assert sorted(finished + aborted) == list(range(len(added)))
    assert engine.counters.finished == len(finished)
    assert engine.counters.aborted == len(aborted)
    assert all(s.ended for s in added)
    assert all(s.generated == s.output_tokens for s in added if s.arrival in finished)
    assert (engine.pool.held, engine.waiting, engine.running) == (0, 0, [])
    trace.append((engine.counters, [s.cached_tokens for s in added], finished))
    return trace


@settings(max_examples=examples(150), deadline=None)
@given(actions, st.sampled_from(["fcfs", "priority"]), st.booleans())
def test_whatever_happens_memory_is_kept_and_every_request_ends_once_and_the_same_way_again(
    script: list[tuple[str, object]], policy: str, caching: bool
) -> None:
    model = replace(SMALL, policy=policy, prefix_caching=caching)
    assert play(model, script) == play(model, script)


def test_a_prompt_seen_before_is_found_in_whole_blocks_and_its_last_token_is_computed() -> None:
    engine = SimulatedEngine(SMALL)
    first = run_one(engine, tokens(16), tokens(1, "o"))
    again = run_one(engine, tokens(16), tokens(1, "o"))
    longer = run_one(engine, tokens(16) + tokens(6, "b"), tokens(1, "o"))
    assert (first.cached_tokens, again.cached_tokens, longer.cached_tokens) == (0, 12, 16)
    assert (engine.counters.prefix_queries, engine.counters.prefix_hits) == (16 + 16 + 22, 28)


def test_what_the_model_said_is_found_when_it_comes_back_as_history() -> None:
    engine = SimulatedEngine(SMALL)
    run_one(engine, tokens(10), tokens(11, "o"))
    # The last token said was never an input: its KV does not exist.
    second = run_one(engine, tokens(10) + tokens(11, "o") + tokens(3, "b"), tokens(1, "p"))
    assert second.cached_tokens == 20


def test_requests_that_start_together_compute_their_shared_prefix_once() -> None:
    engine = SimulatedEngine(replace(SMALL, max_batched_tokens=64))
    first = engine.add(tokens(16) + tokens(4, "b"), tokens(1, "o"))
    second = engine.add(tokens(16) + tokens(4, "c"), tokens(1, "o"))
    run(engine)
    assert (first.cached_tokens, second.cached_tokens) == (0, 16)


def test_the_same_text_behind_another_history_is_not_found() -> None:
    engine = SimulatedEngine(SMALL)
    run_one(engine, tokens(8, "a") + tokens(8, "b"), tokens(1, "o"))
    run_one(engine, tokens(8, "c") + tokens(8, "d"), tokens(1, "o"))
    assert run_one(engine, tokens(8, "a") + tokens(8, "d") + tokens(1, "e"), tokens(1, "o")).cached_tokens == 8


def test_a_cached_prefix_that_nobody_holds_still_takes_room_when_it_is_used() -> None:
    engine = SimulatedEngine(replace(SMALL, max_batched_tokens=64))  # 24 blocks
    run_one(engine, tokens(32, "b"), tokens(1, "o"))  # leaves 8 idle blocks behind
    long = engine.add(tokens(60), tokens(4, "o"))  # takes 15, of those that are not cached
    step = engine.schedule()
    assert step is not None
    engine.complete(step)
    engine.add(tokens(32, "b") + tokens(20, "c"), tokens(1, "o"))  # 8 cached and 5 fresh: 4 too many for now
    step = engine.schedule()
    assert step is not None
    assert [*step.shares] == [long]
    engine.complete(step)
    run(engine)
    assert engine.counters.finished == 3


def test_without_prefix_caching_nothing_is_found() -> None:
    engine = SimulatedEngine(replace(SMALL, prefix_caching=False))
    run_one(engine, tokens(16), tokens(1, "o"))
    assert run_one(engine, tokens(16), tokens(1, "o")).cached_tokens == 0
    assert engine.counters.prefix_queries == 0


def test_a_full_cache_evicts_what_was_used_longest_ago() -> None:
    engine = SimulatedEngine(SMALL)  # 24 blocks
    for kind in "abc":
        run_one(engine, tokens(32, kind), tokens(1, "o"))  # 8 blocks each
    run_one(engine, tokens(32, "a"), tokens(1, "o"))  # a is now younger than b
    run_one(engine, tokens(32, "d"), tokens(1, "o"))
    assert run_one(engine, tokens(32, "a"), tokens(1, "o")).cached_tokens == 28
    assert run_one(engine, tokens(32, "b"), tokens(1, "o")).cached_tokens == 0


def test_the_tail_of_a_conversation_is_evicted_before_its_shared_prefix() -> None:
    engine = SimulatedEngine(SMALL)
    run_one(engine, tokens(32) + tokens(16, "b"), tokens(1, "o"))  # 12 of 24 blocks
    run_one(engine, tokens(63, "c"), tokens(1, "o"))  # 16 blocks: 4 of the first must go
    assert run_one(engine, tokens(32) + tokens(16, "b"), tokens(1, "o")).cached_tokens == 32


def test_a_running_request_never_loses_its_blocks_to_a_new_one() -> None:
    engine = SimulatedEngine(replace(SMALL, max_batched_tokens=64))
    long = engine.add(tokens(60), tokens(4, "o"))
    step = engine.schedule()
    assert step is not None
    engine.complete(step)
    waiting = engine.add(tokens(60, "b"), tokens(1, "o"))
    step = engine.schedule()
    assert step is not None
    assert [*step.shares] == [long]
    assert (engine.waiting, waiting.computed) == (1, 0)
    engine.complete(step)
    run(engine)
    assert long.ended and waiting.ended


def test_when_memory_runs_out_the_last_is_preempted_and_still_gives_its_whole_answer() -> None:
    engine = SimulatedEngine(replace(SMALL, max_batched_tokens=96))
    sequences = [engine.add(tokens(40, kind), tokens(20, "o")) for kind in "ab"]
    ends = []
    while (step := engine.schedule()) is not None:
        ends += [s.arrival for s in engine.complete(step) if s.ended]
    assert engine.counters.preemptions > 0
    assert ends == [0, 1]
    assert [s.generated for s in sequences] == [20, 20]


def test_first_come_first_served_ignores_priorities() -> None:
    assert order("fcfs") == [0, 1, 2]


def test_with_priorities_the_lower_number_goes_sooner_and_ties_by_arrival() -> None:
    assert order("priority") == [1, 0, 2]


def order(policy: str) -> list[int]:
    engine = SimulatedEngine(replace(SMALL, max_num_seqs=1, policy=policy))
    for kind, priority in zip("abc", (5, -1, 5), strict=True):
        engine.add(tokens(4, kind), tokens(2, "o"), priority)
    started: list[int] = []
    for step in run(engine):
        started += [each.arrival for each in step.shares if each.arrival not in started]
    return started


def test_a_step_takes_a_base_and_a_part_for_each_sequence_and_for_each_prompt_token() -> None:
    model = replace(SMALL, step_seconds=1.0, sequence_seconds=0.25, prefill_tokens_per_second=16.0)
    engine = SimulatedEngine(model)
    engine.add(tokens(24), tokens(2, "o"))
    engine.add(tokens(4, "b"), tokens(2, "o"))
    # 16 of the first prompt; its other 8 and the second prompt; both decode.
    assert [step.seconds for step in run(engine)] == [2.0, 1.0 + 12 / 16, 1.5]


def test_a_step_with_a_prefill_may_take_longer() -> None:
    plain = replace(SMALL, sequence_seconds=0.0, prefill_tokens_per_second=float("inf"))
    engine = SimulatedEngine(replace(plain, prefill_step_seconds=0.5))
    engine.add(tokens(8), tokens(3, "o"))
    assert [step.seconds for step in run(engine)] == [1.5, 1.0, 1.0]


def test_more_sequences_share_a_step_than_run_one_after_the_other() -> None:
    model = EngineModel()
    alone, together = SimulatedEngine(model), SimulatedEngine(model)
    run_one(alone, tokens(100), tokens(50, "o"))
    for kind in "abcdefgh":
        together.add(tokens(100, kind), tokens(50, "o"))
    assert sum(step.seconds for step in run(together)) < 2 * 50 * (model.step_seconds + model.sequence_seconds)
    assert alone.counters.steps == 50


def test_too_long_a_request_is_refused_like_a_real_server_would() -> None:
    with pytest.raises(ContextOverflow, match="maximum context length is 64 tokens") as caught:
        SimulatedEngine(SMALL).add(tokens(60), tokens(5, "o"))
    assert caught.value.status == 400


def test_a_full_queue_refuses_with_503_and_takes_more_when_it_has_emptied() -> None:
    engine = SimulatedEngine(replace(SMALL, max_queued=1))
    waiting = engine.add(tokens(4), tokens(1, "o"))
    with pytest.raises(Unavailable) as caught:
        engine.add(tokens(4), tokens(1, "o"))
    assert caught.value.status == 503
    engine.abort(waiting)
    assert count_tokens(engine.add(tokens(4), tokens(1, "o")).prompt) == 4


def test_aborting_twice_or_after_the_end_changes_nothing() -> None:
    engine = SimulatedEngine(SMALL)
    done = run_one(engine, tokens(4), tokens(1, "o"))
    left = engine.add(tokens(4), tokens(1, "o"))
    engine.abort(done)
    engine.abort(left)
    engine.abort(left)
    assert (engine.counters.finished, engine.counters.aborted, engine.waiting) == (1, 1, 0)
    assert engine.schedule() is None


def test_a_pinned_context_stays_until_its_time_is_over() -> None:
    engine = SimulatedEngine(SMALL)  # 24 blocks
    engine.add(tokens(16), tokens(1, "o"), order=Order("a", 60.0))
    run(engine)
    for kind in "bcdefgh":
        run_one(engine, tokens(16, kind), tokens(1, "o"))
    assert run_one(engine, tokens(16), tokens(1, "o")).cached_tokens == 12
    engine.now = 61.0
    for kind in "bcdefgh":
        run_one(engine, tokens(16, kind), tokens(1, "o"))
    assert run_one(engine, tokens(16), tokens(1, "o")).cached_tokens == 0


def test_pins_give_way_to_a_request_that_needs_their_blocks() -> None:
    engine = SimulatedEngine(SMALL)
    for kind in "abc":
        engine.add(tokens(20, kind), tokens(1, "o"), order=Order(kind, 60.0))
        run(engine)
    assert engine.pool.held > 0
    assert run_one(engine, tokens(60, "d"), tokens(2, "o")).ended
    assert engine.counters.preemptions == 0


def test_what_the_cache_evicted_is_loaded_from_the_slower_memory() -> None:
    model = replace(SMALL, max_batched_tokens=64, prefill_tokens_per_second=1.0, offload_tokens_per_second=4.0)
    for size, cached, seconds in ((0, 0, 40.0), (400, 36, 9.0 + 4.0), (16, 0, 40.0)):
        engine = SimulatedEngine(replace(model, offload_tokens=size))
        run_one(engine, tokens(40), tokens(1, "x"))
        for other in "bc":
            run_one(engine, tokens(60, other), tokens(1, "x"))
        again = engine.add(tokens(40), tokens(1, "x"))
        [step] = run(engine)
        assert (again.cached_tokens, step.seconds) == (cached, 1.0 + seconds)
