"""What a proxy reads of a request, and where it sends it, without a socket."""

from __future__ import annotations

import json

from batch_agent.fleet.proxy import Homes, read_ask
from batch_agent.scheduler.routing import Router
from batch_agent.scheduler.server import Endpoint
from batch_agent.scheduler.server_state import ServerState, Terms


def endpoints(*names: str) -> tuple[Router, Homes, list[Endpoint]]:
    made = [Endpoint(ServerState(name), Terms(64), name) for name in names]
    router = Router(made)
    return router, Homes(router), made


def take(router: Router, endpoint: Endpoint, times: int = 1) -> None:
    for _ in range(times):
        endpoint.take(0.0)
    router.touch(endpoint)


def key_of(**fields: object) -> str:
    return read_ask({}, json.dumps(fields).encode())[0]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_the_key_is_what_the_client_names_before_what_it_says() -> None:
    body = json.dumps({"messages": [user("hi")], "user": "me", "prompt_cache_key": "mine"}).encode()
    assert read_ask({"X-Session-Id": "this"}, body)[0] == "this"
    assert read_ask({}, body)[0] == "mine"
    assert key_of(messages=[user("hi")], user="me") == "me"


def test_the_key_is_the_same_for_all_turns_and_for_one_long_beginning() -> None:
    system = {"role": "system", "content": "be brief"}
    first = [system, user("why?")]
    assert key_of(messages=first) == key_of(messages=[*first, {"role": "assistant", "content": "so"}, user("and?")])
    assert key_of(messages=first) != key_of(messages=[system, user("how?")])
    document = "word " * 1000
    assert key_of(messages=[user(f"{document} why?")]) == key_of(messages=[user(f"{document} how?")])
    assert key_of(prompt=f"{document} why?") == key_of(prompt=f"{document} how?")
    assert key_of(prompt="why?") != key_of(prompt="how?")
    assert key_of(input="why?", instructions="x")


def test_what_cannot_be_read_has_no_key_and_no_model() -> None:
    for body in (b"", b"\xff\x00", b"[1]", b'{"messages": 3, "model": 4}', b'{"messages": [1, {"role": 2}]}'):
        assert read_ask({}, body)[1] == ""
    assert read_ask({}, b"\xff\x00") == ("", "")
    assert read_ask({}, b'{"model": "m"}') == ("", "m")


def test_a_new_conversation_begins_at_its_home_unless_another_endpoint_is_less_busy() -> None:
    router, homes, made = endpoints("a", "b", "c")
    home = homes.find("key", "")
    assert {homes.find(f"key {number}", "") for number in range(50)} == set(made)
    assert home is not None
    take(router, home)
    assert homes.find("key", "") is not home
    for endpoint in made:
        if endpoint is not home:
            take(router, endpoint)
    assert homes.find("key", "") is home


def test_a_conversation_stays_where_it_was_sent_until_that_is_clearly_busier() -> None:
    router, homes, made = endpoints("a", "b", "c")
    home = homes.find("key", "")
    last = next(endpoint for endpoint in made if endpoint is not home)
    homes.remember("key", last)
    assert homes.find("key", "") is last
    take(router, last, 7)
    assert homes.find("key", "") is last
    take(router, last)
    assert homes.find("key", "") is not last
    for endpoint in made:
        if endpoint is not last:
            take(router, endpoint, 4)
    assert homes.find("key", "") is last


def test_a_conversation_goes_elsewhere_when_its_endpoint_is_down_or_serves_another_model() -> None:
    router, homes, [first, second] = endpoints("a", "b")
    homes.remember("key", first)
    first.server.models = frozenset({"x"})
    second.server.models = frozenset({"y"})
    router.touch(first)
    router.touch(second)
    assert homes.find("key", "y") is second
    assert homes.find("key", "x") is first
    first.health.go_down(0.0)
    router.touch(first)
    assert homes.find("key", "") is second
