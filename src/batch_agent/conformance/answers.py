"""Questions on the server itself, on whole answers and on streams."""

from __future__ import annotations

from pydantic import JsonValue

from batch_agent.backends.engines.engine import at
from batch_agent.backends.http.backend import HttpBackend
from batch_agent.conformance.finding import Finding, emulated, missing, not_asked, unclear, works
from batch_agent.conformance.subject import SENTENCE, RawAnswer, Subject, flag
from batch_agent.errors import BackendError, ContextOverflow, Rejected, SpecError
from batch_agent.messages import Image, JsonObject, Message
from batch_agent.trust.doubt import doubts_of
from batch_agent.trust.gold import OUTPUT, GoldField

UNKNOWN_MODEL = "batch-agent-no-such-model"
OVERFLOW_TOKENS = 200_000  # the longest prompt that is sent to find the end of a context
UNKNOWN_CONTEXT_TOKENS = 40_000  # ... if the server does not report its context
IMAGE_TOKENS = 8  # a prompt with an image has more tokens than without, by more than this
STORY = "Count from one to thirty in English words."


# The server


async def health(s: Subject) -> Finding:
    probe = await s.backend.probe(next(iter(s.backend.servers)))
    if probe.state == "up":
        return works("a run notices when the server is back after an outage")
    return missing(probe.reason or "it has no page that shows whether it is up")


async def models(s: Subject) -> Finding:
    names = await s.backend.models()
    return works(f"{len(names)} served") if names else missing("it lists none: give model=")


async def context(s: Subject) -> Finding:
    if s.context:
        return works(f"{s.context:,} tokens")
    return missing("it does not report its context", "model_max_context=N in the run")


async def unknown_model(s: Subject) -> Finding:
    try:
        await s.hear("Say hello.", model=UNKNOWN_MODEL, max_tokens=4)
    except Rejected as error:
        return works(f"refused with {error.status}")
    return missing("it answers whatever model is named, so a misspelt name is not noticed")


async def wrong_key(s: Subject) -> Finding:
    try:
        await s.raw("Say hello.", headers={"Authorization": "Bearer batch-agent-wrong-key"}, max_tokens=1)
    except Rejected as error:
        if error.status in (401, 403):
            return works(f"refused with {error.status}")
        raise
    return missing("every client that reaches it may use it", flag(s, "key"))


async def unknown_field(s: Subject) -> Finding:
    try:
        await s.raw("Say hello.", {"batch_agent_unknown": 1}, max_tokens=1)
    except Rejected as error:
        return works(f"refused with {error.status}: a misspelt name in extra_body is an error")
    return missing("ignored: a misspelt name in extra_body is not noticed")


async def connection(s: Subject) -> Finding:
    answer = await s.raw("Say hello.", max_tokens=1)
    kept = {name.lower(): value for name, value in answer.headers.items()}.get("connection", "keep-alive")
    if kept.lower() == "close":
        return missing("it closes each connection after one answer, so every request connects again")
    return works("connections are used again")


async def rate_limits(s: Subject) -> Finding:
    heard = await s.hear("Say hello.", max_tokens=8)
    if heard.quota is None:
        return emulated("no rate-limit headers: the limit is found from 429 answers, or set it in the run")
    return works("its headers report rate limits")


# Whole answers


async def plain(s: Subject) -> Finding:
    heard, seconds = await s.timed("Say hello.")
    return works(f"{seconds:.2f} s") if heard.text.strip() else unclear("the answer is empty")


async def system_prompt(s: Subject) -> Finding:
    await s.hear([Message("system", SENTENCE), Message("user", "Say hello.")], max_tokens=8)
    return works()


async def usage(s: Subject) -> Finding:
    counted = (await s.hear("Say hello.", max_tokens=8)).usage
    if counted.prompt_tokens and counted.completion_tokens:
        return works(f"{counted.prompt_tokens} and {counted.completion_tokens} tokens")
    return missing("tokens, and so costs and token budgets, are not counted")


async def token_limit(s: Subject) -> Finding:
    heard = await s.hear(STORY, max_tokens=6)
    if heard.finish_reason != "length":
        return missing(f"an answer of 6 tokens ended as {heard.finish_reason}: cut answers are taken for complete ones")
    if heard.usage.completion_tokens > 6:
        return missing(f"max_tokens=6 gave {heard.usage.completion_tokens} tokens")
    return works("finish_reason length")


async def ends_by_itself(s: Subject) -> Finding:
    heard = await s.hear("Reply with the single word yes.", max_tokens=256)
    if heard.finish_reason == "length":
        return unclear("the model did not end an answer within 256 tokens")
    return works(f"finish_reason {heard.finish_reason}")


async def stop_sequence(s: Subject) -> Finding:
    text = (await s.hear(STORY)).text
    middle = text[len(text) // 2 :]
    mark = next((word for word in middle.split() if word.isalnum() and text.index(word) > 0), "")
    if not mark:
        return unclear("the model's answer has no word to stop at")
    heard = await s.hear(STORY, stop=(mark,))
    if mark not in heard.text:
        return works(f"stopped before {mark!r}")
    return missing(f"the answer has {mark!r}, which stop names")


async def repeatable(s: Subject) -> Finding:
    first, second = [(await s.hear(STORY)).text for _ in range(2)]
    return works() if first == second else missing("temperature 0 gave two different answers")


async def seed(s: Subject) -> Finding:
    try:
        s.backend.check(s.shape(seed=7))
    except SpecError as error:
        return missing(str(error))
    first, second = [(await s.hear("Invent a name.", seed=7, temperature=1.0, max_tokens=24)).text for _ in range(2)]
    return works() if first == second else missing("one seed gave two different answers", flag(s, "seed"))


async def logprobs(s: Subject) -> Finding:
    instead = "samples=3 in the run: votes tell the doubt"
    if not s.backend.capabilities.logprobs:
        return missing("its wire has none", instead)
    heard = await s.hear("Name a colour.", logprobs=True, max_tokens=48)
    if heard.finish_reason == "length":
        return unclear("the model's answer was cut")
    if heard.tokens is None:
        return missing("it reports none, although they were requested", instead)
    doubts = doubts_of(heard.text, heard.tokens, [GoldField(OUTPUT, "text")], [], reasoned=bool(heard.reasoning))
    if doubts.get(OUTPUT, 0.0) is None:
        return missing("its tokens, joined, are not its answer, so that no doubt is known", instead)
    if not any(len(token.others) > 1 for token in heard.tokens):
        return works("without alternatives: doubts are those of the tokens alone")
    return works("with alternatives: doubts are those among the allowed values of a field")


async def overflow(s: Subject) -> Finding:
    tokens = (s.context or UNKNOWN_CONTEXT_TOKENS) + 1_000
    if tokens > OVERFLOW_TOKENS:
        return not_asked(f"the context of {s.context:,} tokens is too long to fill for a trial")
    try:
        heard = await s.hear("tree " * tokens, max_tokens=1)
    except ContextOverflow as error:
        return works(f"refused with {error.status}, as too long")
    except Rejected as error:
        return missing(f"refused, but not as too long, so no run shortens its context: {error}")
    except BackendError as error:
        if error.status is None:
            raise
        return missing(f"a prompt that is too long is an error of the server ({error.status}), not a refusal")
    if heard.usage.prompt_tokens and heard.usage.prompt_tokens < tokens:
        note = f"it cut a prompt of about {tokens:,} tokens to {heard.usage.prompt_tokens:,} and reported no error"
        return missing(note, flag(s, "overflow") or "model_max_context=N in the run")
    return unclear(f"it accepted a prompt of {heard.usage.prompt_tokens:,} tokens")


async def too_many_tokens(s: Subject) -> Finding:
    if s.context is None:
        return not_asked("it does not report its context")
    try:
        await s.hear("Reply with the single word yes.", max_tokens=s.context + 1)
    except ContextOverflow:
        return works("refused as too long")
    except Rejected as error:
        return works(f"refused with {error.status}")
    return emulated("accepted: the answer may have fewer tokens than max_tokens")


async def reasoning(s: Subject) -> Finding:
    heard = await s.hear("Is 17 a prime number?", max_tokens=64)
    if "<think>" in heard.text or "</think>" in heard.text:
        return missing("the model's reasoning is in its text", flag(s, "reasoning"))
    return works("apart from the text") if heard.reasoning else not_asked("the model shows no reasoning")


# Streams


async def stream_form(s: Subject) -> Finding:
    answer = await s.raw(STORY, streamed=True)
    if not answer.events:
        return missing("a stream was requested, and one document came")
    if not any(at(choice, "finish_reason") for event in answer.events for choice in _choices(event)):
        return missing("a stream has no finish_reason, so a complete answer looks like one that broke off")
    if not answer.done:
        return emulated("the stream has no [DONE]; finish_reason ends it")
    return works(f"{len(answer.events)} events, [DONE]")


async def stream_pieces(s: Subject) -> Finding:
    answer = await s.raw(STORY, streamed=True)
    pieces = [when for event, when in zip(answer.events, answer.times, strict=True) if _delta(event).get("content")]
    if len(pieces) < 2:
        return missing("the whole text comes in one event")
    return works(f"{len(pieces)} pieces, over {pieces[-1] - pieces[0]:.2f} s")


async def stream_usage(s: Subject) -> Finding:
    heard = await s.hear(STORY, streamed=True)
    if heard.usage.prompt_tokens and heard.usage.completion_tokens:
        return works("with the last event")
    return missing("streamed answers are not counted: costs and token budgets are too low")


async def stream_same(s: Subject) -> Finding:
    whole, streamed = await s.hear(STORY), await s.hear(STORY, streamed=True)
    if whole.text == streamed.text:
        return works()
    return unclear(f"the streamed text differs: {whole.text[:30]!r} and {streamed.text[:30]!r}")


async def stream_limit(s: Subject) -> Finding:
    heard = await s.hear(STORY, streamed=True, max_tokens=6)
    if heard.finish_reason == "length":
        return works("finish_reason length")
    return missing(f"a cut stream ended as {heard.finish_reason}: cut answers are taken for complete ones")


async def first_token(s: Subject) -> Finding:
    if not s.backend.capabilities.streaming:
        return not_asked("the backend does not stream")
    heard = await s.hear("Reply with the single word yes.", streamed=True, max_tokens=64)
    if heard.first_token is not None:
        return works(f"{heard.first_token:.3f} s")
    return (
        unclear("the answer was cut") if heard.finish_reason == "length" else missing("the whole answer comes at once")
    )


def _choices(event: JsonObject) -> list[JsonValue]:
    choices = event.get("choices")
    return choices if isinstance(choices, list) else []


def _delta(event: JsonObject) -> JsonObject:
    delta = at(next(iter(_choices(event)), None), "delta")
    return delta if isinstance(delta, dict) else {}


def call_pieces(answer: RawAnswer) -> list[JsonObject]:
    """Return the parts of tool calls in a stream, in their order."""
    found: list[JsonObject] = []
    for event in answer.events:
        parts = _delta(event).get("tool_calls")
        found += [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return found


# Other routes


async def embeddings(s: Subject) -> Finding:
    try:
        told = await s.post("/embeddings", {"model": s.model, "input": ["a tree", "a rock"]})
    except BackendError as error:
        return missing(f"refused with {error.status}: this model or server has none", flag(s, "embeddings"))
    data = told.get("data")
    vectors = [at(entry, "embedding") for entry in data] if isinstance(data, list) else []
    if len(vectors) == 2 and all(isinstance(vector, list) and vector for vector in vectors):
        return works(f"{len(vectors[0])} numbers")  # type: ignore[arg-type]
    return missing("the answer has no vector for each text", flag(s, "embeddings"))


async def responses(s: Subject) -> Finding:
    try:
        told = await s.post("/responses", {"model": s.model, "input": "Say hello.", "max_output_tokens": 16})
    except BackendError as error:
        return missing(f"refused with {error.status}: ?api=responses does not work here")
    return works("?api=responses") if told.get("output") else missing("the answer has no output")


async def lists(s: Subject) -> Finding:
    asked: JsonObject = {"role": "user", "content": "Say hello."}
    try:
        told = await s.post(
            "/chat/completions/batch", {"model": s.model, "messages": [[asked], [asked]], "max_tokens": 4}
        )
    except BackendError as error:
        return emulated(f"refused with {error.status}: generate_batch sends single requests")
    choices = told.get("choices")
    if isinstance(choices, list) and len(choices) == 2:
        return works("several conversations in one request")
    return emulated("generate_batch sends single requests")


async def tokenizer(s: Subject) -> Finding:
    for fields in ({"model": s.model, "prompt": "a tree"}, {"content": "a tree"}):
        try:
            told = await s.post("/tokenize", {**fields}, beside=True)
        except BackendError:
            continue
        if isinstance(told.get("tokens"), list) or isinstance(told.get("count"), int):
            return works("/tokenize")
    return emulated("tokens are estimated at four bytes each before a request, and counted by its answer")


async def picture(s: Subject) -> Finding:
    if not s.backend.capabilities.images:
        return missing("this backend sends no images")
    words = "What is this?"
    try:
        shown = await s.hear([Message("user", (words, Image.of(_PNG, "image/png")))], max_tokens=4)
    except Rejected as error:
        return missing(f"refused with {error.status}: the model reads no images")
    except BackendError as error:
        if not isinstance(s.backend, HttpBackend):
            raise
        return missing(f"an image is an error of the server ({error.status}), not a refusal: {error}")
    blind = await s.hear(words, max_tokens=4)
    if not shown.usage.prompt_tokens:
        return unclear("accepted; tokens are not counted, so it is not known whether the model sees it")
    if shown.usage.prompt_tokens <= blind.usage.prompt_tokens + IMAGE_TOKENS:
        return missing("it accepted an image and ignored it: the prompt has no more tokens with it")
    return works(f"{shown.usage.prompt_tokens - blind.usage.prompt_tokens} tokens")


# A grey square of 32 pixels.
_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000020000000200802000000fc18eda3000000264944415478daedcd310d00000c03a04aaff4aad8b1"
    "040c901e8b402010080402814020f8120c2dde005b050f37af0000000049454e44ae426082"
)
