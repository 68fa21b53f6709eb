"""What every Backend does, on any wire. A backend is finished when a class that inherits BackendContract passes.

The concrete class implements ``peer``: a server (or a stand-in for one) that gives the answers of its script and says
what it heard (``peer.py``), and a Backend that talks to it. Over HTTP inherit HttpContract (``http.py``), which has the
server. The whole contract runs once for each wire; other servers of the same wire, and wrappers of a backend, are
marked ``@smoke`` and run what may differ there.

What a wire cannot express is declared (``ContractTerms``), never skipped, and what is declared is checked too.
"""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import jsonschema_rs
import pytest

from batch_agent.backends.base import ModelRequest, OnToolCall, RequestShape
from batch_agent.errors import (
    BackendError,
    BadResponse,
    ContextOverflow,
    RateLimited,
    Rejected,
    SpecError,
    Truncated,
    Unavailable,
)
from batch_agent.messages import Conversation, Image, Message, Reply, Sealed, ToolCall, ToolSpec, Usage
from batch_agent.testing.contract.peer import BreakOff, Disconnect, ErrorInside, Hang, Heard, Item, Peer, Refuse, Say

__all__ = ["CALLS", "SEARCH", "SHAPE", "BackendContract", "Hang", "Heard", "Item", "Peer", "Refuse", "Say", "ask"]

SEARCH = ToolSpec("search", "Search.", {"type": "object", "properties": {"query": {"type": "string"}}})
LOOK_UP = ToolSpec("look_up", "Look a word up.", {"type": "object", "properties": {"word": {"type": "string"}}})
SHAPE = RequestShape(model="test-model", tools=(SEARCH,))
CALLS = (ToolCall("call_a", "search", '{"query":"x"}'), ToolCall("call_b", "search", '{"query":"}{"}'))
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
HALF = "half a pair \ud83d here"
PICTURE = Image.of(b"\x89PNG", "image/png")
OPTIONS: tuple[tuple[str, Any], ...] = (
    ("max_tokens", 170),
    ("temperature", 0.25),
    ("temperature", 0.0),
    ("top_p", 0.5),
    ("seed", 7),
    ("stop", ("END", "STOP")),
)

UNWRITABLE: tuple[dict[str, Any], ...] = (
    {"extra_body": {"note": HALF}},
    {"extra_body": {"note": 2**70}},
    {"stop": (HALF,)},
    {"tools": (replace(SEARCH, description=HALF),)},
    {"schema": {**SCHEMA, "description": HALF}},
)

T = TypeVar("T")
both = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])

REFUSABLE = frozenset({"max_tokens", "temperature", "top_p", "seed", "stop", "tool_choice", "schema", "extra_body"})
DROPPABLE = REFUSABLE | {
    "tool_name",  # whose a result is
    "call_ids",  # which call a result belongs to: its place says so
}
LACKABLE = frozenset(
    {
        "reasoning",
        "sealed",
        "several_calls",
        "text_beside_calls",
        "call_ids",  # the backend makes them all
        "broken_arguments",  # a call is one only if its arguments can be read
        "broken_whole",  # ... in an answer that is not streamed: they come as an object
        "usage",  # the engine counts for itself, whatever the script says
        "cached_tokens",
        "reasoning_tokens",
        "cache_write_tokens",
        "statuses",  # errors have types and no HTTP status
        "retry_after",
        "errors_inside",  # an answer that began well has no form for an error
        "parsed_arguments",  # the arguments of earlier calls are not parsed again: they go back as they were written
        "holding",  # the peer cannot stop in the middle of an answer
        "faults",  # an engine inside this process: no connection can break
        "keys",  # the wire has no key, or the test class cannot make a backend with one (``keyed``)
        "kept_connections",  # requests are sent on new connections, on purpose
        "combined_schema",  # the peer cannot see the schema of a request that offers tools
        "garbage",  # a stream has no form in which an event can be damaged
    }
)
_PARTS = ("cached_tokens", "reasoning_tokens", "cache_write_tokens")
REFUSALS: Mapping[Refuse, type[BackendError]] = {
    Refuse(429): RateLimited,
    Refuse(500): Unavailable,
    Refuse(503): Unavailable,
    Refuse(400): Rejected,
    Refuse(401): Rejected,
    Refuse(403): Rejected,
    Refuse(404): Rejected,
    Refuse(422): Rejected,
    Refuse(400, overflow=True): ContextOverflow,
}


def ask(*messages: Message, shape: RequestShape = SHAPE, conversation: Conversation | None = None) -> ModelRequest:
    if conversation is None:
        conversation = Conversation(messages or [Message("system", "Be brief."), Message("user", "Hello")])
    return ModelRequest(shape, conversation, "job-0")


def listener(streamed: bool) -> OnToolCall | None:
    return (lambda call: None) if streamed else None


def go_on(request: ModelRequest, reply: Reply, *results: str) -> None:
    """Append the answer and the results of its calls, as an agent does."""
    request.conversation.append(reply.message())
    for call, result in zip(reply.tool_calls, results, strict=True):
        request.conversation.append(Message("tool", result, tool_call_id=call.id, tool_name=call.name))


# What may differ between servers of one wire, or when a backend is wrapped.
SMOKE = (
    "test_a_plain_answer_is_a_reply_with_its_usage",
    "test_an_option_is_sent_or_the_loss_of_it_is_declared",
    "test_a_schema_is_sent_that_means_the_same",
    "test_extra_body_is_sent",
    "test_calls_and_their_results_are_sent_in_pairs",
    "test_the_next_turn_extends_the_conversation_byte_for_byte",
    "test_many_prompts_are_answered_together_and_a_bad_one_fails_alone",
    "test_the_models_are_listed_by_name",
    "test_it_has_a_name_and_a_probe_finds_it_up",
)


def smoke(contract: type[T]) -> type[T]:
    """Leave a class only the tests of SMOKE and its own. Another class runs the whole contract for its wire."""
    for name in dir(contract):
        if name.startswith("test_") and name not in SMOKE and name not in vars(contract):
            setattr(contract, name, None)
    return contract


class ContractTerms:
    """What a test class declares about its wire, by name, and how the contract then compares.

    - ``refuses``: options for which ``check`` raises a SpecError that names them.
    - ``drops``: options and parts of a conversation that are not sent.
    - ``lacks``: what the wire's answers cannot express, or what its peer cannot do; a reply then comes without it.
    - ``combines``: whether the server enforces a schema in a request that also offers tools. False: such a request is
      sent without the schema. None: the server is not known, so both are sent if a caller asks for both.
    """

    model: ClassVar[str] = "test-model"
    refuses: ClassVar[frozenset[str]] = frozenset()
    drops: ClassVar[frozenset[str]] = frozenset()
    lacks: ClassVar[frozenset[str]] = frozenset()
    combines: ClassVar[bool | None] = False
    finishes: ClassVar[tuple[str, str]] = ("stop", "tool_calls")  # of a complete text, and of complete calls
    reserved: ClassVar[Sequence[str]] = ("messages", "stream")  # what extra_body may not set
    refusals: ClassVar[Mapping[Refuse, type[BackendError]]] = REFUSALS  # those that the peer can give
    choices: ClassVar[Sequence[str]] = ("auto", "none", "required", "search")  # of tools, that the wire knows
    patience: ClassVar[float] = 10.0  # seconds, for what would otherwise never end

    def needs(self, name: str) -> None:
        if name in self.lacks:
            pytest.skip(f"declared: this wire has no {name}, and nothing is left to check without")

    def assert_usage(self, usage: Usage, told: Usage) -> None:
        if "usage" in self.lacks:
            assert usage.prompt_tokens > 0
            assert usage.completion_tokens > 0
        else:
            absent = {part: 0 for part in _PARTS if part in self.lacks}
            assert usage == replace(told, **absent)

    def assert_calls(self, calls: Sequence[ToolCall], told: Sequence[ToolCall]) -> None:
        told = told[:1] if "several_calls" in self.lacks else told
        made = (
            "call_ids" in self.lacks
        )  # by the backend; and arguments may come as an object, so only their value counts
        assert [("" if made else call.id, call.name, _value(call.arguments)) for call in calls] == [
            ("" if made else call.id, call.name, _value(call.arguments)) for call in told
        ]

    def assert_heard(self, heard: Heard, request: ModelRequest) -> None:
        """Assert that the server understood the conversation that the engine holds, with its calls and results."""
        told = [self._plain(message) for message in request.conversation.messages]
        assert [_lines(message) for message in heard.messages] == [_lines(message) for message in told]

    def _plain(self, message: Message) -> Message:
        message = replace(message, reasoning="", sealed=None)
        if "tool_name" in self.drops:
            message = replace(message, tool_name="")
        if "call_ids" in self.drops:
            calls = tuple(replace(call, id="") for call in message.tool_calls)
            message = replace(message, tool_call_id="", tool_calls=calls)
        return message


class BackendContract(ContractTerms):
    @abstractmethod
    def peer(self, *script: Item) -> AbstractAsyncContextManager[Peer]:
        """Return a peer whose item n answers request n. Its backend has been entered, and serves ``model``."""

    def ask(self, *messages: Message, conversation: Conversation | None = None) -> ModelRequest:
        """Return a request that offers a tool."""
        return ask(*messages, shape=replace(SHAPE, model=self.model), conversation=conversation)

    def shape(self, **options: Any) -> RequestShape:
        """Return a shape with these options, and with everything else that the wire needs for them."""
        return RequestShape(model=self.model, **options)

    # Answers

    @both
    async def test_a_plain_answer_is_a_reply_with_its_usage(self, streamed: bool) -> None:
        usage = Usage(20, cached_tokens=8, completion_tokens=5, reasoning_tokens=2, cache_write_tokens=3)
        text = "\n  Hello, naïve 🐟.\n"
        async with self.peer(Say(text, usage=usage)) as peer:
            reply = await peer.backend.infer(self.ask(), listener(streamed))
        assert (reply.text, reply.tool_calls) == (text, ())
        self.assert_usage(reply.usage, usage)
        assert not streamed or not peer.backend.capabilities.streaming or (reply.first_token or -1) >= 0, (
            f"a streamed answer tells when its first token came, not {reply.first_token!r}"
        )

    @both
    async def test_several_tool_calls_of_one_answer_come_in_order(self, streamed: bool) -> None:
        async with self.peer(Say("Let me look.", CALLS)) as peer:
            reply = await peer.backend.infer(self.ask(), listener(streamed))
        self.assert_calls(reply.tool_calls, CALLS)
        assert reply.text == ("" if "text_beside_calls" in self.lacks else "Let me look.")

    @both
    async def test_a_complete_answer_says_that_it_ended_well(self, streamed: bool) -> None:
        async with self.peer(Say("Hello."), Say(calls=CALLS[:1])) as peer:
            for _ in range(2):
                reply = await peer.backend.infer(self.ask(), listener(streamed))
                expected = self.finishes if reply.tool_calls else self.finishes[:1]
                assert reply.finish_reason in expected, (
                    f"a complete answer ends as {' or '.join(expected)}, not as {reply.finish_reason!r}; the engine "
                    "takes 'length' for a cut answer"
                )

    async def test_each_tool_call_is_reported_once_and_in_order_and_the_reply_has_the_same_values(self) -> None:
        seen: list[ToolCall] = []
        async with self.peer(Say("Let me look.", CALLS)) as peer:
            reply = await peer.backend.infer(self.ask(), seen.append)
        assert [call.id for call in seen] == [call.id for call in reply.tool_calls], "each call is reported once"
        assert all(a is b for a, b in zip(seen, reply.tool_calls, strict=True)), "the reply has other values"

    async def test_a_tool_call_is_reported_while_the_model_is_still_talking_if_it_streams(self) -> None:
        reported = asyncio.Event()
        hold = None if "holding" in self.lacks else reported
        async with self.peer(Say(calls=CALLS, hold=hold)) as peer, asyncio.timeout(self.patience):
            if not peer.backend.capabilities.streaming:
                reported.set()
            reply = await peer.backend.infer(self.ask(), lambda call: reported.set())
        self.assert_calls(reply.tool_calls, CALLS)

    @both
    async def test_only_a_request_that_somebody_listens_to_is_streamed(self, streamed: bool) -> None:
        async with self.peer(Say("Hello.")) as peer:
            await peer.backend.infer(self.ask(), listener(streamed))
            expected = streamed and peer.backend.capabilities.streaming
        assert peer.heard[0].streamed is expected

    @both
    async def test_an_answer_that_was_cut_is_an_error_that_keeps_its_text_and_its_usage(self, streamed: bool) -> None:
        usage = Usage(prompt_tokens=12, completion_tokens=5)
        async with self.peer(Say("Once upon a", usage=usage, cut=True)) as peer:
            with pytest.raises(Truncated) as caught:
                await peer.backend.infer(ask(shape=self.shape()), listener(streamed))
        assert caught.value.text == "Once upon a"
        assert caught.value.usage is not None, "what was computed is paid for: Truncated has no usage"
        self.assert_usage(caught.value.usage, usage)

    @both
    async def test_a_cut_answer_is_an_error_also_where_calls_came_before_the_cut(self, streamed: bool) -> None:
        async with self.peer(Say("", CALLS, cut=True)) as peer:
            with pytest.raises(Truncated) as caught:
                await peer.backend.infer(self.ask(), listener(streamed))
        assert caught.value.in_call

    @both
    async def test_reasoning_comes_apart_from_the_text(self, streamed: bool) -> None:
        request = self.ask()
        async with self.peer(Say("Hello.", reasoning="They said hello.")) as peer:
            reply = await peer.backend.infer(request, listener(streamed))
        assert reply.text == "Hello."
        assert "They said" not in "".join(request.said), "ModelRequest.said is the text, without the reasoning"
        assert reply.reasoning == ("" if "reasoning" in self.lacks else "They said hello.")

    @both
    async def test_broken_arguments_reach_the_engine_as_they_are(self, streamed: bool) -> None:
        broken = ToolCall("call_a", "search", '{"query": "x')
        async with self.peer(Say(calls=[broken])) as peer:
            reply = await peer.backend.infer(self.ask(), listener(streamed))
        if "broken_arguments" not in self.lacks and (streamed or "broken_whole" not in self.lacks):
            assert [call.arguments for call in reply.tool_calls] == [broken.arguments]

    @both
    async def test_call_ids_are_unique_in_a_conversation_whatever_the_server_sends(self, streamed: bool) -> None:
        one, two = (
            Say(calls=[ToolCall("call_0", "search", f'{{"query":"{turn} {n}"}}') for n in range(2)])
            for turn in ("first", "second")
        )
        async with self.peer(one, two, Say("Done.")) as peer:
            request = self.ask()
            for turn in range(2):
                reply = await peer.backend.infer(request, listener(streamed))
                go_on(request, reply, *(f"result {turn} {n}" for n in range(len(reply.tool_calls))))
            await peer.backend.infer(request, listener(streamed))
        ids = [call.id for message in request.conversation.messages for call in message.tool_calls]
        assert len(ids) >= 2 and all(ids), f"every call has an id: {ids}"
        assert len(set(ids)) == len(ids), f"the server repeats its ids, and the backend lets it: {ids}"
        self.assert_heard(peer.heard[-1], request)

    # Requests

    async def test_the_model_and_the_tools_are_sent(self) -> None:
        async with self.peer(Say("Hello.")) as peer:
            await peer.backend.infer(ask(shape=self.shape(tools=(SEARCH, LOOK_UP))))
        assert peer.heard[0].model == self.model
        assert list(peer.heard[0].tools) == [SEARCH, LOOK_UP]

    async def test_an_option_is_sent_or_the_loss_of_it_is_declared(self) -> None:
        for name, value in OPTIONS:
            shape = self.shape(**{name: value})
            if name in self.refuses:
                await self.assert_refused(shape, name)
            else:
                await self.assert_sent_or_dropped(shape, name, value)

    async def assert_sent_or_dropped(self, shape: RequestShape, name: str, value: object) -> None:
        async with self.peer(Say("Hello."), Say("Hello.")) as peer:
            peer.backend.check(shape)
            await peer.backend.infer(ask(shape=shape))
            await peer.backend.infer(ask(shape=replace(shape, **{name: getattr(RequestShape(""), name)})))
        said, silent = (getattr(heard, name) for heard in peer.heard)
        if name in self.drops:
            assert said == silent, f"{name} is declared as dropped, and something of it was sent: {said!r}"
        else:
            assert (tuple(said or ()) if name == "stop" else said) == value, f"expected {name}={value!r} on the wire"

    async def test_a_choice_of_tools_is_sent(self) -> None:
        for choice in self.choices:
            shape = self.shape(tools=(SEARCH, LOOK_UP), tool_choice=choice)
            if "tool_choice" in self.refuses and choice != "auto":
                await self.assert_refused(shape, "tool_choice")
                continue
            async with self.peer(Say(calls=CALLS[:1])) as peer:
                peer.backend.check(shape)
                await peer.backend.infer(ask(shape=shape))
            allowed = {"auto": ("auto", None)}.get(choice, (choice,))
            heard = peer.heard[0].tool_choice
            assert heard in ((None,) if "tool_choice" in self.drops else allowed), f"{choice} was sent as {heard}"

    async def test_a_choice_without_tools_is_not_sent(self) -> None:
        async with self.peer(Say("Hello.")) as peer:
            await peer.backend.infer(ask(shape=self.shape(tool_choice="required")))
        assert peer.heard[0].tool_choice is None, "there is nothing to choose, and strict servers refuse it"

    async def test_a_schema_is_sent_that_means_the_same(self) -> None:
        shape = self.shape(schema=SCHEMA)
        if "schema" in self.refuses:
            return await self.assert_refused(shape, "schema")
        async with self.peer(Say('{"a": 1}')) as peer:
            peer.backend.check(shape)
            reply = await peer.backend.infer(ask(shape=shape))
        assert json.loads(reply.text) == {"a": 1}
        heard = peer.heard[0].schema
        if "schema" in self.drops:
            assert heard is None
        else:
            assert heard is not None, "expected the answer's schema on the wire"
            values: list[object] = [{"a": 1}, {"a": "x"}, {}, []]
            fits = [jsonschema_rs.is_valid(heard, value) for value in values]
            assert fits == [True, False, False, False], f"the schema on the wire means something else: {heard}"

    async def test_schema_and_tools_are_combined_only_if_the_server_can(self) -> None:
        async with self.peer(Say('{"a": 1}')) as peer:
            able = peer.backend.capabilities
            assert able.schema_with_tools is bool(self.combines), (
                f"capabilities.schema_with_tools is {able.schema_with_tools}, and the class declares combines = "
                f"{self.combines}: the engine sends a schema beside tools if the capability says so"
            )
            assert able.native_schema or not able.schema_with_tools, "schema_with_tools without native_schema"
            if self.combines is None or "schema" in self.refuses:
                return
            await peer.backend.infer(ask(shape=self.shape(tools=(SEARCH,), schema=SCHEMA)))
        if "combined_schema" not in self.lacks:
            assert peer.heard[0].tools, "expected the tools on the wire"
            sent = peer.heard[0].schema is not None
            assert sent is self.combines, f"combines = {self.combines}, and the schema was {'' if sent else 'not '}sent"

    async def test_two_shapes_of_one_model_are_not_mixed(self) -> None:
        one, two = self.shape(tools=(SEARCH,)), self.shape(tools=(LOOK_UP,))
        async with self.peer(Say("a"), Say("b"), Say("c"), Say("d")) as peer:
            for shape in (one, two, one, self.shape()):
                await peer.backend.infer(ask(shape=shape))
        heard = [[tool.name for tool in each.tools] for each in peer.heard]
        assert heard == [["search"], ["look_up"], ["search"], []], f"each request has the tools of its shape: {heard}"

    async def test_extra_body_is_sent(self) -> None:
        extra = self.extra_body()
        shape = self.shape(extra_body=extra)
        if "extra_body" in self.refuses:
            return await self.assert_refused(shape, "extra_body")
        async with self.peer(Say("Hello.")) as peer:
            peer.backend.check(shape)
            await peer.backend.infer(ask(shape=shape))
        sent = {name: peer.heard[0].extra[name] for name in extra if name in peer.heard[0].extra}
        assert sent == ({} if "extra_body" in self.drops else extra), "expected extra_body on the wire"

    async def test_extra_body_overrides_a_field_of_ours(self) -> None:
        if {"extra_body", "max_tokens"} & (self.refuses | self.drops):
            return
        async with self.peer(Say("Hello."), Say("Hello.")) as peer:
            await peer.backend.infer(ask(shape=self.shape(max_tokens=1717)))
            ours = {name: json.dumps(value) for name, value in peer.heard[0].extra.items() if name not in self.reserved}
            theirs = {name: json.loads(text.replace("1717", "1718")) for name, text in ours.items() if "1717" in text}
            await peer.backend.infer(ask(shape=self.shape(max_tokens=1717, extra_body=theirs)))
        sent = {name: peer.heard[1].extra.get(name) for name in theirs}
        assert sent == theirs, "the user's extra_body has the last word"

    def extra_body(self) -> dict[str, Any]:
        """Return fields that the server accepts in addition."""
        return {"top_k": 3, "metadata": {"team": "é"}}

    # Conversations

    async def test_calls_and_their_results_are_sent_in_pairs(self) -> None:
        another = ToolCall("call_c", "search", '{"query":"y"}')
        async with self.peer(Say("Let me look.", CALLS), Say("", [another]), Say("Done.")) as peer:
            request = self.ask()
            reply = await peer.backend.infer(request)
            go_on(request, reply, *(f"result {n}" for n in range(len(reply.tool_calls))))
            reply = await peer.backend.infer(request)
            go_on(request, reply, "found é “it”")
            request.conversation.append(Message("user", "And now?"))
            await peer.backend.infer(request)
        self.assert_heard(peer.heard[-1], request)

    async def test_broken_arguments_are_echoed_as_an_empty_object(self) -> None:
        written = ['{"query": "x', "[1]", "", "null", "not JSON", '{"a": "\\ud83d"}']
        calls = tuple(ToolCall(f"call_{n}", "search", text) for n, text in enumerate(written))
        results = [Message("tool", "not JSON", tool_call_id=c.id, tool_name=c.name) for c in calls]
        async with self.peer(Say("Done.")) as peer:
            request = self.ask(Message("user", "Hello"), Message("assistant", "", calls), *results)
            await peer.backend.infer(request)
        echoed = [call.arguments for message in peer.heard[0].messages for call in message.tool_calls]
        if "parsed_arguments" in self.lacks:
            assert echoed == written
            return
        assert [json.loads(text) for text in echoed] == [{}, {}, {}, {}, {}, {"a": "\ufffd"}], (
            "servers parse the arguments of earlier calls again: what is no JSON object goes back as {}"
        )

    async def test_halves_of_surrogate_pairs_do_not_stop_a_conversation(self) -> None:
        call = ToolCall("call_a", "search", '{"query":"x"}')
        async with self.peer(Say("Done.")) as peer:
            request = self.ask(
                Message("system", f"system {HALF}"),
                Message("user", f"user {HALF}"),
                Message("assistant", f"assistant {HALF}", (call,)),
                Message("tool", f"result {HALF} 😀", tool_call_id="call_a", tool_name="search"),
            )
            await peer.backend.infer(request)
        for role, message in zip(("system", "user", "assistant", "result"), peer.heard[0].messages, strict=True):
            text = str(message.content)
            assert text.startswith(f"{role} half a pair "), f"expected the rest of the text on the wire, not {text!r}"
            assert " here" in text

    async def test_the_next_turn_extends_the_conversation_byte_for_byte(self) -> None:
        async with self.peer(Say("", CALLS[:1]), Say("Done.")) as peer:
            request = self.ask()
            go_on(request, await peer.backend.infer(request), "found é “it”")
            await peer.backend.infer(request)
        first, second = peer.requests
        assert len(second) > len(first)
        assert second.startswith(first)

    async def test_agents_that_share_a_prefix_send_the_same_bytes_for_it(self) -> None:
        shared = Conversation([Message("system", "Be brief. é")])
        async with self.peer(Say("a"), Say("b")) as peer:
            for word in ("vermilion", "ultramarine"):
                await peer.backend.infer(self.ask(conversation=Conversation([Message("user", word)], shared)))
        first, second = peer.requests
        assert first[: first.index(b"vermilion")] == second[: second.index(b"ultramarine")]

    @both
    async def test_what_only_the_wire_can_read_is_sent_back_to_it(self, streamed: bool) -> None:
        async with self.peer(Say("", CALLS[:1], reasoning="Hm.", sealed="sig-1"), Say("Done.")) as peer:
            request = self.ask()
            reply = await peer.backend.infer(request, listener(streamed))
            if reply.sealed is not None:  # it is recorded on its way
                assert json.loads(json.dumps(reply.sealed.value)) == reply.sealed.value
            go_on(request, reply, "found")
            await peer.backend.infer(request, listener(streamed))
        if "sealed" in self.lacks:
            assert reply.sealed is None
        assert list(peer.heard[1].seals) == ([] if "sealed" in self.lacks else ["sig-1"])
        self.assert_heard(peer.heard[1], request)

    async def test_what_another_wire_sealed_is_not_sent(self) -> None:
        sealed = Sealed("another wire", {"type": "thinking", "thinking": "Hm.", "signature": "sig-foreign"})
        async with self.peer(Say("Done.")) as peer:
            answer = Message("assistant", "Hello.", sealed=sealed)
            await peer.backend.infer(self.ask(Message("user", "Hello"), answer, Message("user", "Continue")))
        assert b"sig-foreign" not in peer.requests[0]

    async def test_a_picture_is_sent_or_refused_in_words(self) -> None:
        request = self.ask(Message("user", ("What is this?", PICTURE)))
        async with self.peer(Say("A picture.")) as peer:
            if peer.backend.capabilities.images:
                await peer.backend.infer(request)
                assert peer.heard[0].messages[-1].content == ("What is this?", PICTURE)
            else:
                with pytest.raises(Rejected, match="image"):
                    await peer.backend.infer(request)
                assert not peer.requests, "it was sent nevertheless"

    # What cannot be sent

    async def test_check_refuses_what_extra_body_may_not_set(self) -> None:
        for name in self.reserved:
            await self.assert_refused(self.shape(extra_body={name: []}), name)

    async def test_what_cannot_be_written_is_refused_before_the_first_request(self) -> None:
        for options in UNWRITABLE:
            shape = self.shape(**options)
            async with self.peer(Say("Hello.")) as peer:
                try:
                    peer.backend.check(shape)
                except SpecError:
                    continue
                await peer.backend.infer(ask(shape=shape))  # check let it through: then it can be sent

    # Faults

    @both
    async def test_a_refusal_is_an_error_of_its_type(self, streamed: bool) -> None:
        for refusal, kind in self.refusals.items():
            async with self.peer(refusal) as peer:
                with pytest.raises(BackendError) as caught:
                    await peer.backend.infer(self.ask(), listener(streamed))
            assert type(caught.value) is kind, f"{refusal} is a {kind.__name__}, not {caught.value!r}"
            if "statuses" not in self.lacks:
                assert caught.value.status == refusal.status
                assert refusal.message in str(caught.value), "what the server said is not in the error"

    async def test_the_wait_that_a_server_asks_for_is_on_the_error(self) -> None:
        if "retry_after" in self.lacks:
            assert not any(refusal.status == 429 for refusal in self.refusals), (
                "a limit of rates tells how long to wait"
            )
            return
        async with self.peer(Refuse(429, retry_after="7")) as peer:
            with pytest.raises(RateLimited) as caught:
                await peer.backend.infer(self.ask())
        assert caught.value.retry_after == 7.0

    @both
    @pytest.mark.parametrize("clean", [False, True], ids=["lost", "closed"])
    async def test_an_answer_that_breaks_off_is_an_error_and_leaves_its_text(self, streamed: bool, clean: bool) -> None:
        self.needs("faults")
        request = self.ask()
        request.said.append("what an earlier try said")
        async with self.peer(BreakOff("Once upon a", clean)) as peer, asyncio.timeout(self.patience):
            streams = streamed and peer.backend.capabilities.streaming
            with pytest.raises((BadResponse, Unavailable)) as caught:
                await peer.backend.infer(request, listener(streamed))
        assert caught.value.retryable
        if streams:
            assert "".join(request.said) == "Once upon a", "ModelRequest.said is what came of this try"

    @both
    async def test_a_complete_call_does_not_make_an_answer_complete(self, streamed: bool) -> None:
        self.needs("faults")
        async with self.peer(BreakOff("", True, CALLS[:1])) as peer, asyncio.timeout(self.patience):
            with pytest.raises((BadResponse, Unavailable)):
                await peer.backend.infer(self.ask(), listener(streamed))

    @both
    async def test_an_error_inside_a_good_answer_is_an_error_of_its_type(self, streamed: bool) -> None:
        self.needs("faults")
        self.needs("errors_inside")
        async with self.peer(ErrorInside(message="the engine is tired")) as peer, asyncio.timeout(self.patience):
            with pytest.raises(Unavailable, match="the engine is tired"):
                await peer.backend.infer(self.ask(), listener(streamed))

    @both
    async def test_a_server_that_hangs_up_is_unavailable(self, streamed: bool) -> None:
        self.needs("faults")
        async with self.peer(Disconnect()) as peer, asyncio.timeout(self.patience):
            with pytest.raises(Unavailable):
                await peer.backend.infer(self.ask(), listener(streamed))

    @both
    async def test_cancelling_ends_the_request_at_the_server(self, streamed: bool) -> None:
        async with self.peer(Hang()) as peer, asyncio.timeout(self.patience):
            task = asyncio.create_task(peer.backend.infer(self.ask(), listener(streamed)))
            await peer.wait_until_asked()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await peer.wait_until_left()

    # The rest of the protocol

    async def test_two_requests_at_once_get_each_its_answer(self) -> None:
        held = asyncio.Event()
        async with self.peer(Say("", CALLS[:1], hold=held), Say("second")) as peer, asyncio.timeout(self.patience):
            first = asyncio.create_task(peer.backend.infer(self.ask(), lambda call: None))
            await peer.wait_until_asked()
            second = await peer.backend.infer(self.ask())
            held.set()
            assert second.text == "second"
            self.assert_calls((await first).tool_calls, CALLS[:1])

    async def test_many_prompts_are_answered_together_and_a_bad_one_fails_alone(self) -> None:
        refusal = next(iter(self.refusals))
        async with self.peer(Say("a"), refusal, Say("c")) as peer:
            outcomes = await peer.backend.generate_batch(["one", "two", "three"], self.shape())
        assert sorted(outcome.text for outcome in outcomes if isinstance(outcome, Reply)) == ["a", "c"]
        assert [type(outcome) for outcome in outcomes if isinstance(outcome, BackendError)] == [self.refusals[refusal]]

    async def test_it_stays_open_until_its_last_user_leaves_and_opens_again(self) -> None:
        async with self.peer(Say("a"), Say("b"), Say("c")) as peer:
            async with peer.backend:
                assert (await peer.backend.infer(self.ask())).text == "a"
            assert (await peer.backend.infer(self.ask())).text == "b"
        async with self.peer(Say("a")) as peer:
            await peer.backend.__aexit__(None, None, None)
            await peer.backend.__aenter__()
            assert (await peer.backend.infer(self.ask())).text == "a"

    async def test_the_models_are_listed_by_name(self) -> None:
        async with self.peer(Say("a")) as peer:
            assert self.model in await peer.backend.models()

    async def test_it_has_a_name_and_a_probe_finds_it_up(self) -> None:
        async with self.peer(Say("a")) as peer:
            assert peer.backend.name
            [endpoint] = peer.backend.servers
            assert (await peer.backend.probe(endpoint)).state != "down"
        assert not peer.requests, "a probe is free: it asks for no turn"

    def test_what_is_declared_has_a_name_that_the_contract_knows(self) -> None:
        assert self.refuses <= REFUSABLE
        assert self.drops <= DROPPABLE
        assert self.lacks <= LACKABLE
        assert not self.refuses & self.drops, "what is refused cannot be dropped as well"

    async def assert_refused(self, shape: RequestShape, name: str) -> None:
        async with self.peer(Say("a")) as peer:
            with pytest.raises(SpecError, match=name):
                peer.backend.check(shape)


def _lines(message: Message) -> list[str]:
    """Return a message in words, so that a difference can be read."""
    lines = [f"{message.role}: {message.content}"]
    if message.role == "tool":
        lines.append(f"is the result of {message.tool_call_id!r}, of the tool {message.tool_name!r}")
    lines += [f"calls {c.name!r} as {c.id!r} with {_value(c.arguments)}" for c in message.tool_calls]
    return lines


def _value(arguments: str) -> object:
    try:
        return json.loads(arguments)
    except ValueError:
        return f"what is not JSON: {arguments}"
