"""The contract, tried on backends that are wrong in one thing each: every one of them fails it, where it should."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

import pytest
from tests.backends.test_anthropic_contract import MessagesContract

from batch_agent.backends.anthropic.answer import AnswerStream, read_answer
from batch_agent.backends.anthropic.messages import AnthropicBackend
from batch_agent.backends.anthropic.request import WIRE
from batch_agent.backends.base import Backend, Capabilities, ModelRequest, OnToolCall, Probe, RequestShape
from batch_agent.backends.http.wire import Naming, json_of, report_calls
from batch_agent.errors import BackendError, BadResponse, RateLimited, Rejected, Truncated, Unavailable
from batch_agent.http.connection import Event, SSEParser
from batch_agent.messages import Conversation, Message, Reply, Sealed, ToolCall, Usage, content_text
from batch_agent.testing.contract.backend import BackendContract, ask
from batch_agent.testing.contract.peer import Refuse


class Right(AnthropicBackend):
    """Does all that the contract asks; the others differ from it in what they override."""

    def __init__(self, url: str, capabilities: Capabilities | None = None) -> None:
        super().__init__(url, api_key="sk-ant", capabilities=capabilities)

    def asked(self, request: ModelRequest) -> ModelRequest:
        return request

    def answered(self, reply: Reply) -> Reply:
        return reply

    def failed(self, error: BackendError, request: ModelRequest) -> Reply:
        raise error

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        try:
            return self.answered(await super().infer(self.asked(request), on_tool_call))
        except BackendError as error:
            return self.failed(error, request)


class TestRight(MessagesContract):
    """Passes: what fails the others is what they do wrong."""

    def backend(self, url: str) -> Backend:
        return Right(url)


def without(name: str, value: object) -> type[Right]:
    """Forgets a part of the shape."""

    class Forgetful(Right):
        def asked(self, request: ModelRequest) -> ModelRequest:
            return replace(request, shape=replace(request.shape, **{name: value}))

    return Forgetful


def writing(change: Callable[[Message], Message]) -> type[Right]:
    """Writes its messages otherwise."""

    class Careless(Right):
        def asked(self, request: ModelRequest) -> ModelRequest:
            return replace(request, conversation=Conversation(map(change, request.conversation.messages)))

    return Careless


def giving(**changed: object) -> type[Right]:
    """Forgets a part of the answer."""

    class Deaf(Right):
        def answered(self, reply: Reply) -> Reply:
            return replace(reply, **changed)

    return Deaf


def forgiving(*kinds: type[BackendError]) -> type[Right]:
    """Takes what came before these errors for an answer."""

    class Forgiving(Right):
        def failed(self, error: BackendError, request: ModelRequest) -> Reply:
            if isinstance(error, kinds):
                return Reply("".join(request.said))
            raise error

    return Forgiving


class OverridesExtraBody(Right):
    def asked(self, request: ModelRequest) -> ModelRequest:
        shape = request.shape
        ours = {name for name in shape.extra_body if getattr(shape, name, None) is not None}
        rest = {name: value for name, value in shape.extra_body.items() if name not in ours}
        return replace(request, shape=replace(shape, extra_body=rest))


class TruthyOptions(Right):
    def asked(self, request: ModelRequest) -> ModelRequest:
        return replace(request, shape=replace(request.shape, temperature=request.shape.temperature or None))


class ForgetsTheSystemPrompt(Right):
    def asked(self, request: ModelRequest) -> ModelRequest:
        rest = [message for message in request.conversation.messages if message.role != "system"]
        return replace(request, conversation=Conversation(rest))


class TurnsCallsRound(Right):
    def answered(self, reply: Reply) -> Reply:
        return replace(reply, tool_calls=reply.tool_calls[::-1])


class CountsNoWrites(Right):
    def answered(self, reply: Reply) -> Reply:
        return replace(reply, usage=replace(reply.usage, cache_write_tokens=0))


class CrashesOnSurrogates(Right):
    def asked(self, request: ModelRequest) -> ModelRequest:
        for message in request.conversation.messages:
            content_text(message.content).encode()
        return request


class CrashesOnBrokenArguments(Right):
    def asked(self, request: ModelRequest) -> ModelRequest:
        for message in request.conversation.messages:
            for call in message.tool_calls:
                json.loads(call.arguments)
        return request


class NamesCallsPerAnswer(Right):
    def read_whole(self, body: bytes, naming: Naming) -> Reply:
        return read_answer(body, Naming([], naming.faults))

    def read_stream(self, naming: Naming, *rest: Any) -> AnswerStream:
        return AnswerStream(Naming([], naming.faults), *rest)


class ChecksNothing(Right):
    def check(self, shape: RequestShape) -> None: ...


class TruncatedForFree(Right):
    def failed(self, error: BackendError, request: ModelRequest) -> Reply:
        raise Truncated(str(error), text=error.text) if isinstance(error, Truncated) else error


class ForgetsTheWait(Right):
    def failed(self, error: BackendError, request: ModelRequest) -> Reply:
        raise RateLimited(str(error), status=error.status) if isinstance(error, RateLimited) else error


class ReportsTwice(Right):
    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        reply = await super().infer(request, on_tool_call)
        report_calls(reply, on_tool_call)
        return reply


class ReportsAtTheEnd(Right):
    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        reply = await super().infer(request, on_tool_call and (lambda call: None))
        report_calls(reply, on_tool_call)
        return reply


class NeverStreams(Right):
    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        reply = await super().infer(request)
        report_calls(reply, on_tool_call)
        return replace(reply, first_token=0.0)


class MendsArguments(Right):
    def answered(self, reply: Reply) -> Reply:
        calls = tuple(replace(call, arguments=call.arguments.rstrip('"}') + '"}') for call in reply.tool_calls)
        return replace(reply, tool_calls=calls)


class SendsWhatOthersSealed(Right):
    def asked(self, request: ModelRequest) -> ModelRequest:
        def sealed(message: Message) -> Message:
            return replace(message, sealed=message.sealed and Sealed(WIRE, [message.sealed.value]))

        return replace(request, conversation=Conversation(map(sealed, request.conversation.messages)))


class ChangesItsPrefix(Right):
    turns = 0

    def asked(self, request: ModelRequest) -> ModelRequest:
        self.turns += 1
        note = Message("system", f"This is request {self.turns}.")
        return replace(request, conversation=Conversation([note, *request.conversation.messages]))


class IsBlindAndSilent(Right):
    def __init__(self, url: str) -> None:
        super().__init__(url, Capabilities(native_schema=True))

    def asked(self, request: ModelRequest) -> ModelRequest:
        texts = [replace(message, content=content_text(message.content)) for message in request.conversation.messages]
        return replace(request, conversation=Conversation(texts))


class KeepsWhatAnEarlierTrySaid(Right):
    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        before = list(request.said)
        try:
            return await super().infer(request, on_tool_call)
        finally:
            request.said[:0] = before


class SaysWhatItThinks(Right):
    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        reply = await super().infer(request, on_tool_call)
        request.said.append(reply.reasoning)
        return reply


class TakesOthersWords(Right):
    def failed(self, error: BackendError, request: ModelRequest) -> Reply:
        raise Unavailable(str(error), status=error.status)


class TakesACallForAnAnswer(Right):
    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        calls: list[ToolCall] = []
        try:
            return await super().infer(request, on_tool_call and calls.append)
        except BadResponse:
            if not calls:
                raise
            return Reply("", tuple(calls))


class LetsCancelledRequestsRun(Right):
    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        self.running = asyncio.ensure_future(super().infer(request, on_tool_call))
        return await asyncio.shield(self.running)

    async def __aexit__(self, *exception: Any) -> None:
        self.running.cancel()
        await asyncio.wait([self.running])
        await super().__aexit__(*exception)


class ClosesWithTheFirstWhoLeaves(Right):
    async def __aexit__(self, *exception: Any) -> None:
        while self._http._transport._users:
            await super().__aexit__(*exception)


class DropsKeys(Right):
    def __init__(self, url: str, **given: Any) -> None:
        super().__init__(url)


class DropsHeaders(Right):
    def __init__(self, url: str, api_key: str = "sk-ant", **given: Any) -> None:
        AnthropicBackend.__init__(self, url, api_key=api_key)


class DecodesEachChunk(Right):
    """Text split inside a character becomes another text."""

    def read_stream(self, *given: Any) -> AnswerStream:
        class Reader(AnswerStream):
            def feed(self, chunk: bytes) -> bool:
                return super().feed(chunk.decode("utf-8", "replace").encode())

        return Reader(*given)


class ReadsEventsChunkByChunk(Right):
    """An event that is split between chunks is lost."""

    def read_stream(self, *given: Any) -> AnswerStream:
        class Reader(AnswerStream):
            def feed(self, chunk: bytes) -> bool:
                return super().feed(chunk) if chunk.endswith(b"\n\n") else False

        return Reader(*given)


class SkipsDamagedEvents(Right):
    def read_stream(self, *given: Any) -> AnswerStream:
        class Reader(AnswerStream):
            def _take(self, events: list[Event]) -> None:
                super()._take([event for event in events if json_of(event[1]) is not None])

        return Reader(*given)


class ReadsLinesOfAnyLength(Right):
    def read_stream(self, *given: Any) -> AnswerStream:
        reader = AnswerStream(*given)
        reader._sse = SSEParser(max_event_bytes=2**40)
        return reader


class ReadsAnswersOfAnyLength(Right):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._chat = replace(self._chat, max_bytes=2**40)


class DoesNotSayWhenItHeard(Right):
    def answered(self, reply: Reply) -> Reply:
        self._request.heard_at = 0.0
        return reply

    def asked(self, request: ModelRequest) -> ModelRequest:
        self._request = request
        return request


class DoesNotSayThatItBegan(Right):
    def asked(self, request: ModelRequest) -> ModelRequest:
        request.on_begin = None
        return request


class TakesAClosedPortForARefusal(Right):
    def failed(self, error: BackendError, request: ModelRequest) -> Reply:
        raise Rejected(str(error))


class ListsModelsWithoutCare(Right):
    async def models(self) -> list[str]:
        try:
            return await super().models()
        except BackendError as error:
            raise ConnectionRefusedError(str(error)) from None


class ConnectsForEachRequest(Right):
    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        async with Right(self._http.base_url) as fresh:
            return await fresh.infer(request, on_tool_call)


class SaysUpOfEverything(Right):
    async def probe(self, endpoint: str = "") -> Probe:
        return Probe("up")


class RaisesFromItsProbe(Right):
    async def probe(self, endpoint: str = "") -> Probe:
        await self.models()
        return Probe("up")


class ProbesWithATurn(Right):
    async def probe(self, endpoint: str = "") -> Probe:
        await self.infer(ask())
        return Probe("up")


class MixesShapesOfAModel(Right):
    def write_head(self, shape: RequestShape, streamed: bool) -> Any:
        known = self.__dict__.setdefault("_by_model", {})
        return known.setdefault((shape.model, streamed), super().write_head(shape, streamed))


class ClaimsNotToCombine(Right):
    def __init__(self, url: str) -> None:
        super().__init__(url, Capabilities(native_schema=True, images=True))


class TrimsTexts(Right):
    def answered(self, reply: Reply) -> Reply:
        return replace(reply, text=reply.text.strip())


BROKEN: Mapping[str, tuple[Callable[..., Right], str]] = {
    "the model is not sent": (without("model", "another"), "the_model_and_the_tools"),
    "tools are not sent": (without("tools", ()), "the_model_and_the_tools"),
    "a choice of tools is not sent": (without("tool_choice", None), "a_choice_of_tools_is_sent"),
    "the schema is not sent": (without("schema", None), "a_schema_is_sent"),
    "another schema is sent": (without("schema", {"type": "object"}), "a_schema_is_sent"),
    "max_tokens is not sent": (without("max_tokens", None), "an_option_is_sent"),
    "temperature is not sent": (without("temperature", None), "an_option_is_sent"),
    "a temperature of 0 is not sent": (TruthyOptions, "an_option_is_sent"),
    "top_p is not sent": (without("top_p", None), "an_option_is_sent"),
    "stop is not sent": (without("stop", ()), "an_option_is_sent"),
    "extra_body is not sent": (without("extra_body", {}), "extra_body_is_sent"),
    "a field of ours overrides extra_body": (OverridesExtraBody, "overrides_a_field"),
    "calls are not echoed": (writing(lambda m: replace(m, tool_calls=())), "in_pairs"),
    "a result does not say what it answers": (writing(lambda m: replace(m, tool_call_id="")), "in_pairs"),
    "a stream without its end is an answer": (forgiving(BadResponse, Unavailable), "breaks_off"),
    "an error inside is an answer": (forgiving(Unavailable), "an_error_inside"),
    "half a surrogate pair is a crash": (CrashesOnSurrogates, "halves_of_surrogate_pairs"),
    "broken arguments are a crash": (CrashesOnBrokenArguments, "are_echoed_as_an_empty_object"),
    "broken arguments are mended in silence": (MendsArguments, "reach_the_engine_as_they_are"),
    "ids repeat in every turn": (NamesCallsPerAnswer, "call_ids_are_unique"),
    "check is empty": (ChecksNothing, "check_refuses"),
    "what cannot be sent is found out late": (ChecksNothing, "cannot_be_written"),
    "reasoning is lost": (giving(reasoning=""), "reasoning_comes_apart"),
    "reasoning is part of what was said": (SaysWhatItThinks, "reasoning_comes_apart"),
    "a cut answer has no usage": (TruncatedForFree, "keeps_its_text_and_its_usage"),
    "usage is lost": (giving(usage=Usage()), "a_plain_answer"),
    "texts are trimmed": (TrimsTexts, "a_plain_answer"),
    "the first token is not timed": (giving(first_token=None), "a_plain_answer"),
    "signed parts are lost": (giving(sealed=None), "sent_back_to_it"),
    "another wire's signed parts are sent": (SendsWhatOthersSealed, "another_wire_sealed"),
    "the text beside calls is lost": (giving(text=""), "several_tool_calls"),
    "the wait that a server asks for is lost": (ForgetsTheWait, "the_wait_that_a_server"),
    "every error is tried again": (TakesOthersWords, "a_refusal_is_an_error"),
    "a call is reported twice": (ReportsTwice, "reported_once"),
    "a call is reported late": (ReportsAtTheEnd, "while_the_model_is_still_talking"),
    "it never streams": (NeverStreams, "is_streamed"),
    "the prefix changes": (ChangesItsPrefix, "share_a_prefix"),
    "pictures are left out": (IsBlindAndSilent, "a_picture"),
    "what was said before is said again": (KeepsWhatAnEarlierTrySaid, "breaks_off"),
    "the system prompt is not sent": (ForgetsTheSystemPrompt, "in_pairs"),
    "calls come in another order": (TurnsCallsRound, "several_tool_calls"),
    "a complete call is an answer": (TakesACallForAnAnswer, "does_not_make_an_answer_complete"),
    "a cancelled request goes on": (LetsCancelledRequestsRun, "cancelling"),
    "what a cache took is not counted": (CountsNoWrites, "a_plain_answer"),
    "a complete answer is called cut": (giving(finish_reason="length"), "says_that_it_ended_well"),
    "a key is not sent": (DropsKeys, "the_key_and_the_headers"),
    "a header of the user is not sent": (DropsHeaders, "the_key_and_the_headers"),
    "a character split between chunks is lost": (DecodesEachChunk, "wherever_its_bytes_are_cut"),
    "an event split between chunks is lost": (ReadsEventsChunkByChunk, "wherever_its_bytes_are_cut"),
    "a damaged event is skipped": (SkipsDamagedEvents, "a_damaged_event"),
    "a line has no limit": (ReadsLinesOfAnyLength, "an_answer_without_end"),
    "a whole answer has no limit": (ReadsAnswersOfAnyLength, "an_answer_without_end"),
    "it is not noted when an answer was heard": (DoesNotSayWhenItHeard, "when_it_was_last_heard"),
    "nobody learns that an answer has begun": (DoesNotSayThatItBegan, "when_it_was_last_heard"),
    "a refused connection is a refused request": (TakesAClosedPortForARefusal, "a_request_to_a_closed_port"),
    "the models of a closed port are an error of the client": (ListsModelsWithoutCare, "a_request_to_a_closed_port"),
    "each request has a new connection": (ConnectsForEachRequest, "connections_are_used_again"),
    "a closed port is called up": (SaysUpOfEverything, "a_probe_of_a_closed_port"),
    "a probe raises": (RaisesFromItsProbe, "a_probe_of_a_closed_port"),
    "a probe asks for a turn": (ProbesWithATurn, "a_probe_finds_it_up"),
    "two shapes of one model are mixed": (MixesShapesOfAModel, "two_shapes_of_one_model"),
    "schema and tools are declared wrongly": (ClaimsNotToCombine, "schema_and_tools_are_combined"),
    "the first who leaves closes it": (ClosesWithTheFirstWhoLeaves, "until_its_last_user_leaves"),
}


def cases(contract: type[BackendContract], name: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The tests whose name has these words, as pytest would call them."""
    for test, function in inspect.getmembers(contract, inspect.isfunction):
        if test.startswith("test_") and name in test:
            axes = [_values(mark) for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
            for chosen in product(*axes):
                yield function, {key: value for values in chosen for key, value in values.items()}


def _values(mark: pytest.Mark) -> list[dict[str, Any]]:
    names, rows = mark.args
    names = [names] if isinstance(names, str) else list(names)
    return [dict(zip(names, [row] if len(names) == 1 else row, strict=True)) for row in rows]


async def failures(contract: type[BackendContract], name: str) -> list[str]:
    failed = []
    for function, arguments in cases(contract, name):
        try:
            outcome = function(contract(), **arguments)
            if inspect.isawaitable(outcome):
                await outcome
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001
            failed.append(f"{type(error).__name__}: {error}")
    return failed


@pytest.mark.parametrize("fault", BROKEN)
async def test_a_backend_that_is_wrong_in_one_thing_fails(fault: str) -> None:
    broken, name = BROKEN[fault]

    class Contract(MessagesContract):
        patience = 0.2

        def backend(self, url: str) -> Backend:
            return broken(url)

        def keyed(self, url: str, key: str, headers: Mapping[str, str]) -> Backend:
            return broken(url, api_key=key, headers=headers)

    assert len({function for function, _ in cases(Contract, name)}) == 1, f"one test is about {name}"
    assert await failures(Contract, name), f"the contract does not mind that {fault}"


async def test_a_backend_that_leaves_connections_open_fails() -> None:
    left: list[Right] = []

    class LeavesConnectionsOpen(Right):
        async def __aexit__(self, *exception: object) -> None:
            left.append(self)

    class Contract(MessagesContract):
        patience = 0.5

        def backend(self, url: str) -> Backend:
            return LeavesConnectionsOpen(url)

    assert await failures(Contract, "connections_are_used_again")
    for backend in left:
        await AnthropicBackend.__aexit__(backend)


@pytest.mark.parametrize(
    ("kind", "names", "test"),
    [
        ("drops", {"top_p"}, "an_option_is_sent"),
        ("refuses", {"top_p"}, "an_option_is_sent"),
        ("drops", {"tool_choice"}, "a_choice_of_tools_is_sent"),
        ("drops", {"schema"}, "a_schema_is_sent"),
        ("drops", {"extra_body"}, "extra_body_is_sent"),
        ("lacks", {"reasoning"}, "reasoning_comes_apart"),
        ("lacks", {"sealed"}, "sent_back_to_it"),
        ("lacks", {"several_calls"}, "several_tool_calls"),
        ("lacks", {"cached_tokens"}, "a_plain_answer"),
        ("drops", {"sede"}, "what_is_declared"),
    ],
)
async def test_what_is_declared_and_not_so_fails(kind: str, names: set[str], test: str) -> None:
    declared = {kind: getattr(MessagesContract, kind) | names}
    assert await failures(type("Contract", (TestRight,), declared), test)


async def test_a_schema_that_is_sent_to_a_server_that_cannot_combine_it_with_tools_fails() -> None:
    class Contract(MessagesContract):
        combines = False

        def backend(self, url: str) -> Backend:
            return ClaimsNotToCombine(url)

    [told] = await failures(Contract, "schema_and_tools_are_combined")
    assert "the schema was sent" in told


async def test_a_refusal_of_the_wrong_type_is_told_in_words() -> None:
    class Contract(TestRight):
        refusals: ClassVar[Mapping[Refuse, type[BackendError]]] = {Refuse(429): Unavailable}

    [told, _] = await failures(Contract, "a_refusal_is_an_error")
    assert "is a Unavailable, not RateLimited(" in told
