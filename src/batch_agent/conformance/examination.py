"""An examination: each question in turn, within limits of time, and the report of what was found."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from batch_agent.backends.base import Backend
from batch_agent.conformance import answers, serving, tools
from batch_agent.conformance.finding import Answered, Finding, Report, missing, not_asked, unclear
from batch_agent.conformance.subject import NotChat, Subject, Wording, engine_name, identify
from batch_agent.errors import BackendError, Rejected, SpecError
from batch_agent.messages import Usage

QUESTION_SECONDS, TOTAL_SECONDS = 60.0, 900.0


@dataclass(frozen=True, slots=True)
class Check:
    """A question. ``prompt_tokens`` and ``answer_tokens`` are upper limits of what all of its requests use at a usual
    server."""

    id: str
    group: str
    text: str
    ask: Callable[[Subject], Awaitable[Finding]]
    prompt_tokens: int = 0
    answer_tokens: int = 0
    essential: bool = False  # without it the other questions cannot be answered


SERVER = "the server"
WHOLE = "answers"
STREAM = "streams"
TOOLS = "tools"
SCHEMAS = "structured output"
AGENTS = "many agents"
ROUTES = "other routes"
CHECKS: Sequence[Check] = (
    Check("health", SERVER, "has a page that shows whether it is up", answers.health),
    Check("models", SERVER, "lists its models", answers.models),
    Check("plain", SERVER, "answers a question", answers.plain, 40, 48, essential=True),
    Check("context", SERVER, "reports its context", answers.context),
    Check("unknown_model", SERVER, "refuses a model that it does not have", answers.unknown_model, 40, 4),
    Check("wrong_key", SERVER, "refuses a wrong key", answers.wrong_key, 40, 1),
    Check("unknown_field", SERVER, "refuses unknown fields", answers.unknown_field, 40, 1),
    Check("connection", SERVER, "keeps connections open", answers.connection, 40, 1),
    Check("rate_limits", SERVER, "reports its rate limits", answers.rate_limits, 40, 8),
    Check("system_prompt", WHOLE, "takes a system prompt", answers.system_prompt, 60, 8),
    Check("usage", WHOLE, "counts tokens", answers.usage, 40, 8),
    Check("token_limit", WHOLE, "says that an answer was cut", answers.token_limit, 40, 6),
    Check("ends", WHOLE, "says that an answer is complete", answers.ends_by_itself, 40, 256),
    Check("stop", WHOLE, "stops at stop sequences", answers.stop_sequence, 80, 96),
    Check("repeatable", WHOLE, "repeats itself at temperature 0", answers.repeatable, 80, 96),
    Check("seed", WHOLE, "repeats itself with a seed", answers.seed, 80, 48),
    Check("logprobs", WHOLE, "reports the log-probabilities of its tokens", answers.logprobs, 40, 48),
    Check("overflow", WHOLE, "refuses a prompt that is too long, as such", answers.overflow, 0, 1),
    Check("max_tokens", WHOLE, "refuses a max_tokens beyond its context", answers.too_many_tokens, 40, 64),
    Check("reasoning", WHOLE, "keeps reasoning out of the text", answers.reasoning, 40, 64),
    Check("stream_form", STREAM, "streams as OpenAI does", answers.stream_form, 40, 48),
    Check("stream_pieces", STREAM, "streams text in pieces", answers.stream_pieces, 40, 48),
    Check("stream_usage", STREAM, "counts tokens in streams", answers.stream_usage, 40, 48),
    Check("stream_same", STREAM, "streams the text of a whole answer", answers.stream_same, 80, 96),
    Check("stream_limit", STREAM, "says that a stream was cut", answers.stream_limit, 40, 6),
    Check("first_token", STREAM, "begins its answers early", answers.first_token, 40, 64),
    Check("tool_auto", TOOLS, "calls a tool by its own choice", tools.tool_auto, 250, 128),
    Check("tool_required", TOOLS, "calls a tool if one is required", tools.tool_required, 300, 128),
    Check("tool_named", TOOLS, "calls the tool that is named", tools.tool_named, 300, 128),
    Check("tool_none", TOOLS, "calls none if calls are forbidden", tools.tool_none, 250, 24),
    Check("tool_arguments", TOOLS, "follows the schema of arguments", tools.tool_arguments, 250, 128),
    Check("tool_parallel", TOOLS, "makes several calls in one answer", tools.tool_parallel, 300, 128),
    Check("tool_result", TOOLS, "takes the result of a call", tools.tool_result, 350, 24),
    Check("tool_results", TOOLS, "takes several results of one answer", tools.tool_results, 400, 24),
    Check("tool_streamed", TOOLS, "streams a call in pieces", tools.tool_streamed, 250, 128),
    Check("tool_reported", TOOLS, "completes a call inside a stream", tools.tool_reported, 250, 128),
    Check("tool_ids", TOOLS, "gives each call an id", tools.tool_ids, 500, 256),
    Check("tool_finish", TOOLS, "ends a forced call as tool_calls", tools.tool_finish, 250, 128),
    Check("schema", SCHEMAS, "enforces an output schema", tools.schema, 200, 128),
    Check("schema_streamed", SCHEMAS, "enforces it in streams", tools.schema_streamed, 200, 128),
    Check("schema_bounds", SCHEMAS, "enforces the bounds of numbers", tools.schema_bounds, 200, 128),
    Check("schema_with_tools", SCHEMAS, "enforces it beside tools", tools.schema_with_tools, 300, 128),
    Check("json_mode", SCHEMAS, "has a JSON mode", tools.json_mode, 60, 128),
    Check("bad_schema", SCHEMAS, "refuses a schema that it cannot compile", tools.bad_schema, 60, 8),
    Check("prefix_cache", AGENTS, "computes a shared prefix once", serving.prefix_cache, 4_000, 2),
    Check("cache_report", AGENTS, "reports cached tokens", serving.cache_report),
    Check("load", AGENTS, "reports its load", serving.load),
    Check("load_counts", AGENTS, "counts running requests", serving.load_counts, 40, serving.LONG_TOKENS),
    Check("kv_size", AGENTS, "reports the size of its KV cache", serving.kv_size),
    Check("priority", AGENTS, "serves by priority", serving.priority, 40, 1),
    Check("at_once", AGENTS, "answers many requests at once", serving.at_once, 500, 320),
    Check("abort", AGENTS, "frees the slot of a cancelled request", serving.abort, 120, serving.LONG_TOKENS + 16),
    Check("time_limit", AGENTS, "is fast enough for the usual time limit", serving.time_limit, 40, 32),
    Check("picture", ROUTES, "takes images", answers.picture, 1_100, 4),
    Check("embeddings", ROUTES, "has embeddings", answers.embeddings, 10),
    Check("responses", ROUTES, "has OpenAI's responses API", answers.responses, 40, 16),
    Check("lists", ROUTES, "takes several conversations in one request", answers.lists, 80, 8),
    Check("tokenizer", ROUTES, "counts the tokens of a text", answers.tokenizer),
)


def most_usage(questions: Sequence[Check] = CHECKS) -> Usage:
    """Return the most that an examination may use. Refused requests cost nothing at the usual providers."""
    answers = sum(each.answer_tokens for each in questions)
    return Usage(sum(each.prompt_tokens for each in questions), completion_tokens=answers)


async def examine(
    backend: Backend,
    model: str,
    *,
    questions: Sequence[Check] = CHECKS,
    on_answer: Callable[[Answered], None] = lambda answer: None,
    wording: Wording | None = None,
    question_seconds: float = QUESTION_SECONDS,
    total_seconds: float = TOTAL_SECONDS,
    paid: bool = False,
) -> Report:
    """Ask an entered backend all questions, in turn. ``paid``: no prompt that fills the context is sent."""
    subject = Subject(backend, model, wording)
    began = time.perf_counter()
    await identify(subject)
    with suppress(BackendError, TimeoutError):
        async with asyncio.timeout(question_seconds):
            subject.context = (await backend.facts(model)).context
    found: list[Answered] = []
    stopped = ""
    for question in questions:
        started, before = time.perf_counter(), subject.requests
        if not stopped and started - began > total_seconds:
            stopped = f"the limit of {total_seconds:g} s was reached"
        if stopped:
            finding = not_asked(stopped)
        elif paid and question.id == "overflow":
            finding = not_asked("a prompt as long as the context costs money at a paid server")
        else:
            finding = await _asked(subject, question, question_seconds)
        took = time.perf_counter() - started
        asked = Answered(question.id, question.group, question.text, finding, took, subject.requests - before)
        found.append(asked)
        on_answer(asked)
        if question.essential and finding.status != "works":
            stopped = "the server does not answer"
    return Report(
        backend.name,
        engine_name(subject),
        model,
        found,
        time.perf_counter() - began,
        subject.requests,
        subject.usage,
        datetime.now(UTC).strftime("%Y-%m-%d"),
    )


async def _asked(subject: Subject, question: Check, seconds: float) -> Finding:
    """Return the finding of one question. If the server refuses a request and the question does not expect that, the
    feature is missing."""
    subject.question = question.id
    try:
        async with asyncio.timeout(seconds):
            try:
                return await question.ask(subject)
            except BackendError as error:
                if not error.stale:
                    raise
                return await question.ask(subject)  # the server had closed the kept connection
    except NotChat:
        return not_asked("asked of servers with /chat/completions only")
    except TimeoutError:
        return unclear(f"no answer in {seconds:g} s")
    except Rejected as error:
        return missing(f"refused: {error}")
    except (BackendError, SpecError) as error:
        return unclear(f"{type(error).__name__}: {error}")
