"""Pins without vLLM: what they hold of a pool of blocks, and the orders that a client sends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_agent import vllm_pin
from batch_agent.backends.base import ModelRequest, RequestShape
from batch_agent.backends.engines.vllm import VllmBackend
from batch_agent.backends.registry import open_backend
from batch_agent.errors import Rejected
from batch_agent.messages import Conversation, Message
from batch_agent.testing.contract.wire import Exchange, WireServer, answer
from batch_agent.vllm_pin import Order, Pins, read_order


class PooledBlock:
    def __init__(self, number: int) -> None:
        self.block_id, self.ref_cnt, self.is_null = number, 0, number == 0
        self.block_hash: object | None = f"hash {number}"


class Pool:
    """Counts references as vLLM's pool does."""

    def __init__(self, size: int) -> None:
        self.num_gpu_blocks = size
        self.blocks = [PooledBlock(number) for number in range(size)]
        self.freed: list[int] = []

    def touch(self, blocks: object) -> None:
        for block in blocks:  # type: ignore[attr-defined]
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: object) -> None:
        for block in ordered_blocks:  # type: ignore[attr-defined]
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0
            self.freed.append(block.block_id)

    def get_num_free_blocks(self) -> int:
        return sum(not block.ref_cnt for block in self.blocks[1:])


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def pins_of(pool: Pool, **options: float) -> tuple[Pins, Time]:
    clock = Time()
    return Pins(pool, clock=clock, **options), clock  # type: ignore[arg-type]


def test_a_pin_keeps_its_blocks_until_its_time_is_over() -> None:
    pool = Pool(20)
    pins, clock = pins_of(pool)
    assert pins.pin("a", [1, 2, 3], 5.0) == 3
    clock.now = 4.9
    pins.expire()
    assert pool.get_num_free_blocks() == 16
    clock.now = 5.0
    pins.expire()
    assert pool.get_num_free_blocks() == 19
    assert pool.freed == [3, 2, 1]  # the end of a context is evicted first


def test_the_next_turn_of_an_agent_replaces_its_pin_and_never_frees_what_both_have() -> None:
    pool = Pool(20)
    pins, _ = pins_of(pool)
    pins.pin("a", [1, 2], 5.0)
    pins.pin("a", [1, 2, 3], 5.0)
    assert [pool.blocks[number].ref_cnt for number in (1, 2, 3)] == [1, 1, 1]


def test_pins_hold_no_more_than_their_share_and_a_shared_prefix_counts_once() -> None:
    pool = Pool(20)
    pins, _ = pins_of(pool, share=0.5)
    assert pins.pin("a", [1, 2, 3, 4, 5], 5.0) == 5
    assert pins.pin("b", [1, 2, 3, 6, 7], 5.0) == 5
    assert pins.pin("c", [1, 2, 3, 8, 9, 10, 11, 12], 5.0) == 6  # as far as the share goes
    assert pins.blocks == 10


def test_blocks_that_cannot_be_hit_again_are_not_pinned() -> None:
    pool = Pool(20)
    pins, _ = pins_of(pool)
    pool.blocks[2].block_hash = None
    assert pins.pin("a", [0, 1, 2], 5.0) == 1


def test_a_request_that_does_not_fit_otherwise_gets_the_blocks_of_the_pins_that_end_last() -> None:
    pool = Pool(20)
    pins, _ = pins_of(pool, share=0.9)
    pins.pin("soon", [1, 2, 3, 4, 5], 2.0)
    pins.pin("later", [6, 7, 8, 9, 10], 9.0)
    pins.make_room(12)
    assert pool.get_num_free_blocks() == 14
    assert pins.blocks == 5
    pins.make_room(19)
    assert pins.blocks == 0


def test_pins_are_kept_where_releasing_them_would_not_make_enough_room() -> None:
    pool = Pool(20)
    pins, _ = pins_of(pool, share=0.9)
    pins.pin("a", [1, 2, 3], 2.0)
    pool.touch(pool.blocks[4:16])  # running requests
    pins.make_room(10, whole=True)
    assert pins.blocks == 3
    pins.make_room(10)  # for the running ones: what can be had is better than nothing
    assert pins.blocks == 0


def test_the_pin_of_an_agent_that_is_in_the_queue_again_does_not_expire() -> None:
    pool = Pool(20)
    pins, clock = pins_of(pool)
    pins.pin("a", [1], 1.0)
    pins.hold("a")
    clock.now = 30.0
    pins.expire()
    assert pins.blocks == 1


@given(st.data())
def test_after_any_orders_every_reference_is_given_back(data: st.DataObject) -> None:
    pool = Pool(12)
    pins, clock = pins_of(pool, share=0.5)
    for _ in range(data.draw(st.integers(0, 12))):
        key = data.draw(st.sampled_from("abc"))
        match data.draw(st.sampled_from(["pin", "release", "wait", "room", "hold"])):
            case "pin":
                pins.pin(key, data.draw(st.lists(st.integers(0, 11), unique=True)), data.draw(st.floats(0.1, 9)))
            case "release":
                pins.release(key)
            case "wait":
                clock.now += 3.0
            case "room":
                pins.make_room(data.draw(st.integers(0, 12)))
            case _:
                pins.hold(key)
        assert pins.blocks <= 6
        assert pool.get_num_free_blocks() == 11 - pins.blocks
    pins.clear()
    assert not any(block.ref_cnt for block in pool.blocks)


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"do_remote_prefill": True},
        {"batch_agent": "pin"},
        {"batch_agent": {"pin": 7}},
        {"batch_agent": {"pin": "a", "seconds": "5"}},
        {"batch_agent": {"pin": "a", "seconds": True}},
        {"batch_agent": {"pin": "a", "seconds": float("nan")}},
        {"batch_agent": {"pin": "a" * 1_000, "seconds": 5}},
        {"batch_agent": {"release": "a"}},
        {"batch_agent": {"release": [1]}},
    ],
)
def test_a_malformed_order_is_none(params: dict[str, object] | None) -> None:
    assert read_order(params) is None


def test_an_order_is_read() -> None:
    assert read_order({"batch_agent": {"pin": "a", "seconds": 5, "release": ["b"]}}) == Order("a", 5.0, ("b",))


def test_the_module_is_imported_without_vllm_and_says_what_it_lacks() -> None:
    with pytest.raises(ModuleNotFoundError, match="vllm"):
        vllm_pin.PinConnector  # noqa: B018
    with pytest.raises(AttributeError, match="Other"):
        vllm_pin.Other  # noqa: B018


# The client's side

CALL = b"""{"choices": [{"message": {"content": "", "tool_calls": [{"id": "c", "type": "function",
"function": {"name": "look", "arguments": "{}"}}]}, "finish_reason": "tool_calls"}]}"""
DONE = b'{"choices": [{"message": {"content": "done"}, "finish_reason": "stop"}]}'
REFUSED = b'{"error": {"message": "Unknown field: kv_transfer_params", "type": "BadRequestError", "code": 400}}'


def pinning(server: WireServer) -> VllmBackend:
    backend, _ = open_backend(f"vllm://127.0.0.1:{server.port}", model="m", api_key=None, environ={})
    assert isinstance(backend, VllmBackend)
    return backend


def turn(number: int, agent: int = 7, seconds: float = 6.0) -> ModelRequest:
    conversation = Conversation([Message("user", "hello")])
    return ModelRequest(RequestShape("m"), conversation, "job", agent=agent, run="r", turn=number, pin_seconds=seconds)


def order_of(exchange: Exchange) -> object:
    params = exchange.json.get("kv_transfer_params")
    return params and params["batch_agent"]


async def test_a_turn_orders_its_pin_and_the_next_request_releases_that_of_an_ended_agent() -> None:
    async with WireServer(answer(CALL), answer(DONE), answer(DONE)) as server, pinning(server) as backend:
        await backend.infer(turn(1))
        await backend.infer(turn(2))
        await backend.infer(turn(1, agent=8))
    assert list(map(order_of, server.requests)) == [
        {"pin": "r-7", "seconds": 6.0},
        {"pin": "r-7", "seconds": 6.0},
        {"pin": "r-8", "seconds": 6.0, "release": ["r-7"]},
    ]


async def test_the_last_turn_of_an_agent_releases_its_pin() -> None:
    async with WireServer(answer(CALL), answer(DONE), answer(DONE)) as server, pinning(server) as backend:
        await backend.infer(turn(1))
        await backend.infer(turn(2, seconds=0.0))
        await backend.infer(turn(1, agent=8, seconds=0.0))
    assert list(map(order_of, server.requests)) == [{"pin": "r-7", "seconds": 6.0}, {"pin": "r-7"}, None]


async def test_a_server_that_refuses_orders_is_asked_without_and_gets_no_more() -> None:
    async with WireServer(answer(REFUSED, 400), answer(CALL), answer(DONE)) as server, pinning(server) as backend:
        assert (await backend.infer(turn(1))).tool_calls
        assert (await backend.infer(turn(2))).text == "done"
    assert [order_of(exchange) is not None for exchange in server.requests] == [True, False, False]


async def test_another_refusal_is_not_taken_for_one_of_the_order() -> None:
    said = b'{"error": {"message": "no such thing", "type": "BadRequestError", "code": 400}}'
    async with WireServer(answer(said, 400)) as server, pinning(server) as backend:
        with pytest.raises(Rejected, match="no such thing"):
            await backend.infer(turn(1))
