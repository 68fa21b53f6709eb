"""Reads servers' answers as Responses. Pure.

The choices of a list are matched by ``index``; a prompt without a choice fails alone. The server reports one usage sum
for a list, and each prompt gets its share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pydantic import JsonValue

from batch_agent.backends.http.wire import Faults, object_of
from batch_agent.backends.openai.chat import ABORTED, read_usage, reasoning_in, text_in
from batch_agent.errors import BackendError, ContextOverflow
from batch_agent.messages import JsonObject, Usage
from batch_agent.swarm.options import Response
from batch_agent.swarm.servers import Exchange

REFUSED = (400, 413, 422)  # statuses that one item of a list may cause; others concern the whole list

Item = tuple[int, str]  # a prompt or text of a list, after its number in the call
TextOf = Callable[[JsonObject, Faults], str]  # of a choice


def read_generated(exchange: Exchange, agent_index: int) -> Response:
    try:
        document = read_object(exchange)
        text = document.get("response", document.get("text", ""))
        if not isinstance(text, str):
            raise exchange.faults.bad("the answer's text is not text")
    except BackendError as error:
        return Response.failed(error, agent_index, exchange.attempts)
    reason = document.get("finish_reason")
    response = Response(True, text, None, agent_index, attempts=exchange.attempts, latency=exchange.latency)
    response.usage = _usage(document)
    response.finish_reason = reason if isinstance(reason, str) else None
    return response


def read_choices(
    exchange: Exchange, agent_index: int, prompts: Sequence[str], n: int, text_of: TextOf
) -> list[Response]:
    """Read ``n`` answers for each prompt, in order."""
    try:
        document = read_object(exchange)
        choices = indexed(document.get("choices") or None, "choices", exchange.faults)
    except BackendError as error:
        return [Response.failed(error, agent_index, exchange.attempts) for _ in range(len(prompts) * n)]
    responses = []
    for place in range(len(prompts) * n):
        try:
            response = _read_choice(choices.get(place), exchange, text_of)
        except BackendError as error:
            response = Response.failed(error, agent_index, exchange.attempts)
        response.agent_index = agent_index
        responses.append(response)
    _share(_usage(document), [prompt for prompt in prompts for _ in range(n)], responses)
    return responses


def chat_text(choice: JsonObject, faults: Faults) -> str:
    """Return the content of a choice, or its reasoning if there is no content."""
    message = choice.get("message")
    if not isinstance(message, dict):
        raise faults.bad("the answer's choice has no text")
    return text_in(message.get("content"), faults) or reasoning_in(message)


def completion_text(choice: JsonObject, faults: Faults) -> str:
    text = choice.get("text")
    if not isinstance(text, str):
        raise faults.bad("the answer's choice has no text")
    return text


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
    if not isinstance(items, list):
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


def _read_choice(choice: JsonObject | None, exchange: Exchange, text_of: TextOf) -> Response:
    faults = exchange.faults
    if choice is None:
        raise faults.bad("the answer to the list has no choice for this prompt")
    if error := choice.get("error"):
        raise faults.reported(error)
    text, reason = text_of(choice, faults), choice.get("finish_reason")
    if reason in ABORTED:
        raise faults.bad(f"the server aborted the answer (finish_reason {reason})", text=text)
    response = Response(True, text, latency=exchange.latency, attempts=exchange.attempts)
    response.finish_reason = reason if isinstance(reason, str) else None
    return response


def _usage(document: JsonObject) -> Usage | None:
    return read_usage(document["usage"]) if isinstance(document.get("usage"), dict) else None


def _share(usage: Usage | None, prompts: Sequence[str], responses: Sequence[Response]) -> None:
    """Divide prompt tokens by the prompts' lengths and completion tokens by the texts' lengths. Sums stay exact."""
    if usage is None:
        return
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
