"""What a proxy reads of a request, and where it sends it, without a socket."""

from __future__ import annotations

import json

from batch_agent.fleet.balance import Balance, Followed, Place, read_ask
from batch_agent.fleet.hostfile import parse_hosts


def balance(*lines: str, max_inflight: int = 64) -> Balance:
    """All endpoints are up."""
    made = Balance(max_inflight)
    follow(made, *lines)
    return made


def follow(made: Balance, *lines: str) -> Followed:
    followed = made.follow(parse_hosts("\n".join(lines), "test"))
    for place in followed.came:
        made.came_up(place, None, 0.0)
    return followed


def key_of(**fields: object) -> str:
    return read_ask({}, json.dumps(fields).encode())[0]


def chosen(made: Balance, key: str, model: str = "") -> Place:
    place = made.choose(key, model)
    assert place is not None
    return place


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


def test_one_endpoint_less_moves_only_its_share() -> None:
    made = balance(*(f"host-{number}" for number in range(10)))
    keys = [f"key {number}" for number in range(500)]
    before = {key: chosen(made, key) for key in keys}
    gone = chosen(made, keys[0])
    made.went_down(gone, "gone", 1.0)
    moved = [key for key in keys if chosen(made, key) is not before[key]]
    assert set(moved) == {key for key in keys if before[key] is gone}


def test_a_new_conversation_goes_to_the_least_busy_endpoint_and_home_where_all_are_equal() -> None:
    made = balance("a", "b", "c")
    home = chosen(made, "key")
    assert {chosen(made, f"key {number}").host.host for number in range(50)} == {"a", "b", "c"}
    made.take(home, "other", 0.0)
    assert chosen(made, "key") is not home
    for number, place in enumerate(made.places):
        if place is not home:
            made.take(place, f"another {number}", 0.0)
    assert chosen(made, "key") is home


def test_a_conversation_stays_where_it_was_answered() -> None:
    made = balance("a", "b", "c")
    home = chosen(made, "key")
    for number in range(20):
        made.take(home, f"other {number}", 0.0)
    elsewhere = chosen(made, "key")
    assert elsewhere is not home
    made.take(elsewhere, "key", 0.0)
    made.release(elsewhere)
    for number in range(20):
        made.release(home)
        assert home.endpoint.inflight == 19 - number
    assert chosen(made, "key") is elsewhere


def test_full_endpoints_have_no_slot_and_weights_give_more() -> None:
    made = balance("a weight=2", "b", max_inflight=2)
    taken = []
    while (place := made.choose("", "")) is not None:
        made.take(place, "", 0.0)
        taken.append(place.host.host)
    assert sorted(taken) == ["a"] * 4 + ["b"] * 2


def test_an_endpoint_that_leaves_gets_nothing_more_and_is_dropped_when_it_is_idle() -> None:
    made = balance("a", "b")
    leaving = next(place for place in made.places if place.host.host == "a")
    made.take(leaving, "key", 0.0)
    followed = follow(made, "b", "c")
    assert [place.host.host for place in followed.came] == ["c"]
    assert followed.gone == [leaving]
    assert {chosen(made, f"key {number}").host.host for number in range(50)} == {"b", "c"}
    assert chosen(made, "key") is not leaving
    made.release(leaving)
    assert chosen(made, "key") is not leaving


def test_models_and_the_tag_model_decide_who_may_answer() -> None:
    made = balance("a", "b model=y")
    first = made.places[0]
    made.came_up(first, {"x": {"id": "x"}}, 1.0)
    assert {chosen(made, f"key {number}", "y").host.host for number in range(20)} == {"b"}
    assert {chosen(made, f"key {number}", "x").host.host for number in range(20)} == {"a"}


def test_after_an_outage_an_endpoint_is_filled_step_by_step() -> None:
    made = balance("a")
    [place] = made.places
    made.take(place, "", 0.0)
    made.went_down(place, "gone", 1.0)
    made.release(place)
    assert made.choose("", "") is None
    made.came_up(place, None, 2.0)
    assert place.endpoint.capacity.limit == 1
    made.take(place, "", 2.0)
    assert made.choose("", "") is None
    made.answered(place, 0.1, 2.1)
    made.release(place)
    assert place.endpoint.capacity.limit == 2


def test_the_one_to_avoid_is_taken_where_no_other_could_answer() -> None:
    made = balance("a model=x", "b model=y", "c model=y")
    first, second, third = made.places
    assert made.choose("key", "x", avoid=first) is first
    assert made.choose("key", "y", avoid=second) is third
    assert made.choose("key", "y", avoid=third) is second


def test_an_unknown_endpoint_is_chosen_only_while_none_is_up() -> None:
    made = Balance(2)
    first, second = made.follow(parse_hosts("a\nb", "test")).came
    made.take(first, "", 0.0)
    assert made.choose("key", "") is second
    made.came_up(first, None, 1.0)
    assert {made.choose(f"key {number}", "") for number in range(20)} == {first}
    made.take(first, "", 1.0)
    assert made.choose("", "") is None
    made.went_down(first, "gone", 2.0)
    assert made.choose("", "") is second
    made.went_down(second, "gone", 2.0)
    assert made.is_hopeless


def test_a_line_whose_tags_change_is_the_same_endpoint_with_other_facts() -> None:
    made = balance("a", "b model=x", max_inflight=10)
    first, second = made.places
    made.came_up(second, {"x": {"id": "x"}, "y": {"id": "y"}}, 1.0)
    made.take(first, "key", 0.0)
    followed = follow(made, "a weight=2 role=worker", "b")
    assert (followed.came, followed.gone, followed.updated) == ([], [], 2)
    assert made.places == [first, second]
    assert (first.endpoint.weight, first.endpoint.capacity.limit, first.endpoint.inflight) == (2.0, 20, 1)
    assert first.host.tags == {"weight": "2", "role": "worker"}
    assert second.endpoint.models == {"x", "y"}
    assert follow(made, "a weight=2 role=worker", "b").updated == 0
