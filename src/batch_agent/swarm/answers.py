"""How prompts are written in requests, and how servers' answers are read as Responses. Pure.

The choices of a list are matched by ``index``; a prompt without a choice fails alone. The server reports one usage sum
for a list, and each prompt gets its share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from batch_agent.backends.http.wire import Faults, object_of
from batch_agent.backends.openai.chat import ABORTED, read_usage, text_in
from batch_agent.errors import BackendError, ContextOverflow
from batch_agent.messages import JsonObject, Usage
from batch_agent.swarm.options import Response
from batch_agent.swarm.servers import Exchange

REFUSED = (400, 413, 422)  # statuses that one item of a list may cause; others concern the whole list

Item = tuple[int, str]  # a prompt or text of a list, after its number in the call


@dataclass(frozen=True, slots=True)
class Form:
    """How prompts are written in a request: in which field, and how one choice is read."""

    path: str
    field: str
    write: Callable[[Sequence[str], str | None], JsonValue]  # of the prompts and the system prompt
    text_of: Callable[[JsonObject, Faults], str]  # of a choice


def _messages(prompt: str, system: str | None) -> list[JsonValue]:
    said: list[JsonValue] = [] if system is None else [{"role": "system", "content": system}]
    return [*said, {"role": "user", "content": prompt}]


def _chat_text(choice: JsonObject, faults: Faults) -> str:
    """Return the content of a choice, else its reasoning, else ""."""
    message = choice.get("message")
    if not isinstance(message, dict):
        raise faults.bad("the answer's choice has no text")
    for name in ("content", "reasoning_content", "reasoning"):
        value = message.get(name)
        if isinstance(value, str | list) and (text := text_in(value, faults)):
            return text
    return ""


def _text(value: JsonValue, faults: Faults) -> str:
    if not isinstance(value, str):
        raise faults.bad("the answer's choice has no text")
    return value


def _generated_text(document: JsonObject, faults: Faults) -> str:
    return _text(document.get("response", document.get("text", "")), faults)


def _completed_text(choice: JsonObject, faults: Faults) -> str:
    return _text(choice.get("text"), faults)


GENERATE = Form("/generate", "prompt", lambda prompts, _: prompts[0], _generated_text)
CHAT = Form("/v1/chat/completions", "messages", lambda prompts, system: _messages(prompts[0], system), _chat_text)
CHAT_LIST = Form(
    f"{CHAT.path}/batch", "messages", lambda prompts, system: [_messages(each, system) for each in prompts], _chat_text
)
COMPLETIONS = Form("/v1/completions", "prompt", lambda prompts, _: list(prompts), _completed_text)


def read_answers(exchange: Exchange, agent_index: int, prompts: Sequence[str], n: int, form: Form) -> list[Response]:
    """Read ``n`` answers for each prompt, in order."""
    try:
        document = read_object(exchange)
        # The answer of /generate is written like one choice.
        choices = {0: document} if form is GENERATE else indexed(document.get("choices"), "choices", exchange.faults)
    except BackendError as error:
        return [Response.failed(error, agent_index, exchange.attempts) for _ in range(len(prompts) * n)]
    responses = []
    for place in range(len(prompts) * n):
        try:
            response = _read_choice(choices.get(place), exchange, form)
        except BackendError as error:
            response = Response.failed(error, agent_index, exchange.attempts)
        response.agent_index = agent_index
        responses.append(response)
    if isinstance(usage := document.get("usage"), dict):
        _share(read_usage(usage), [prompt for prompt in prompts for _ in range(n)], responses)
    return responses


def read_object(exchange: Exchange) -> JsonObject:
    """Return the JSON object of an answer. Raises the BackendError of one that failed or has none."""
    if exchange.error is not None:
        raise exchange.error
    document = object_of(exchange.body, exchange.faults)
    if error := document.get("error"):
        raise exchange.faults.reported(error)
    return document


def indexed(items: JsonValue, what: str, faults: Faults) -> dict[int, JsonObject]:
    """Return the entries of a list by their ``index``, or by their place if they have none."""
    if not isinstance(items, list) or not items:
        raise faults.bad(f"the answer has no {what}")
    found: dict[int, JsonObject] = {}
    for place, item in enumerate(items):
        if isinstance(item, dict):
            index = item.get("index")
            found.setdefault(index if type(index) is int else place, item)
    return found


def halves(items: Sequence[Item], error: BackendError | None) -> tuple[Sequence[Item], ...]:
    """Return the two halves of a list that was refused for one of its items; nothing for other errors."""
    if len(items) < 2 or error is None or not (error.status in REFUSED or isinstance(error, ContextOverflow)):
        return ()
    middle = len(items) // 2
    return items[:middle], items[middle:]


def _read_choice(choice: JsonObject | None, exchange: Exchange, form: Form) -> Response:
    faults = exchange.faults
    if choice is None:
        raise faults.bad("the answer to the list has no choice for this prompt")
    if error := choice.get("error"):
        raise faults.reported(error)
    text, reason = form.text_of(choice, faults), choice.get("finish_reason")
    if reason in ABORTED:
        raise faults.bad(f"the server aborted the answer (finish_reason {reason})", text=text)
    response = Response(True, text, latency=exchange.latency, attempts=exchange.attempts)
    response.finish_reason = reason if isinstance(reason, str) else None
    return response


def _share(usage: Usage, prompts: Sequence[str], responses: Sequence[Response]) -> None:
    """Divide prompt tokens by the prompts' lengths and completion tokens by the texts' lengths. Sums stay exact."""
    asked = _shares(usage.prompt_tokens, [len(prompt) for prompt in prompts])
    cached = _shares(usage.cached_tokens, [len(prompt) for prompt in prompts])
    said = _shares(usage.completion_tokens, [len(response.text) for response in responses])
    for response, *counts in zip(responses, asked, cached, said, strict=True):
        response.usage = Usage(*counts)


def _shares(total: int, weights: Sequence[int]) -> list[int]:
    whole = sum(weights)
    shares, given, passed = [], 0, 0
    for place, weight in enumerate(weights, start=1):
        passed += weight
        upto = total * passed // whole if whole else total * place // len(weights)
        shares.append(upto - given)
        given = upto
    return shares
