"""Anthropic's ``/v1/messages``, and the servers that speak the same wire (vLLM, Dynamo, gateways).

This file has credentials and checks; ``request`` writes requests, ``answer`` reads answers, and ``http/backend`` sends
them. If the server pauses an answer because one of its own tools takes long, the partial answer is sent back until the
answer is complete.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import SplitResult, quote, urlsplit

from pydantic import JsonValue

from batch_agent.backends.address import Address, check_known
from batch_agent.backends.anthropic.answer import PAUSED, AnswerStream, read_answer
from batch_agent.backends.anthropic.request import (
    WIRE,
    Head,
    MessagesView,
    ModelRules,
    answer_blocks,
    answer_limit,
    build_head,
    model_of,
    thinking_tokens,
)
from batch_agent.backends.base import Backend, Capabilities, ClientBody, ModelRequest, OnToolCall, RequestShape
from batch_agent.backends.batch import AnthropicJobs, JobBackend
from batch_agent.backends.http.backend import HttpBackend, HttpClient
from batch_agent.backends.http.wire import Wording, object_of, objects_of, string_of
from batch_agent.errors import BackendError, SpecError
from batch_agent.messages import Conversation, JsonObject, Reply, Sealed, Usage

API = "https://api.anthropic.com"
FILES = frozenset({"pdf"})  # formats accepted in a document block
# Every server of this wire supports the first; with it, older models still accept a temperature.
VERSIONS = ("2023-06-01", "2026-10-21")
MOST_PAUSES = 32
MODELS_A_PAGE = 1000

WORDING = Wording(
    statuses={
        "invalid_request_error": 400,
        "authentication_error": 401,
        "billing_error": 402,
        "permission_error": 403,
        "not_found_error": 404,
        "request_too_large": 413,
        "rate_limit_error": 429,
        "api_error": 500,
        "timeout_error": 504,
        "overloaded_error": 529,
        "internal_server_error": 500,  # vLLM
        "InternalServerError": 500,
    },
    # The API; vLLM.
    overflow=re.compile(r"prompt is too long|exceed context limit|maximum context length", re.IGNORECASE),
    spent=frozenset({"enforced_spend_limit_reached"}),
    key_hint="check ANTHROPIC_API_KEY or the given key",
    path_hint="check the address: requests go to /v1/messages below it",
)


class AnthropicBackend(HttpBackend[Head]):
    """One server at ``base_url`` (up to and including ``/v1``). The API version decides the header of a key; a
    ``token`` is always sent as a bearer token."""

    wire = WIRE
    read_whole = staticmethod(read_answer)
    read_stream = AnswerStream

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        token: str | None = None,
        version: str = VERSIONS[0],
        headers: Mapping[str, str] | None = None,
        capabilities: Capabilities | None = None,
        name: str | None = None,
    ) -> None:
        own = {"anthropic-version": version}
        if api_key and version == VERSIONS[0]:
            own["x-api-key"] = api_key
            api_key = None
        http = HttpClient(base_url, api_key=api_key or token, headers=own | dict(headers or {}), wording=WORDING)
        able = capabilities or Capabilities(native_schema=True, schema_with_tools=True, images=True, documents=FILES)
        super().__init__(http, http.route("POST", "/messages"), capabilities=able, name=name)
        self._version = version

    def write_own(self, client: ClientBody, request: ModelRequest) -> tuple[JsonObject, Mapping[str, str] | None]:
        fields, headers = super().write_own(client, request)
        return {**fields, "model": request.shape.model}, headers

    def answer_limit(self, shape: RequestShape) -> int | None:
        return answer_limit(shape)

    def check(self, shape: RequestShape) -> None:
        check_shape(shape, takes_sampling=self._version == VERSIONS[0])
        super().check(shape)

    def write_head(self, shape: RequestShape, streamed: bool) -> Head:
        return build_head(shape, streamed)

    def write_body(self, head: Head, request: ModelRequest) -> tuple[bytes, Mapping[str, str] | None]:
        return head.body(request.conversation.view(MessagesView), is_last=request.turns_left == 1), None

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        reply = await super().infer(request, on_tool_call)
        if self.own_body(request) is not None:
            return reply  # a gateway client continues a paused answer itself
        for _ in range(MOST_PAUSES):
            if reply.finish_reason != PAUSED:
                return reply
            so_far = Conversation([reply.message()], request.conversation)
            try:
                more = await super().infer(replace(request, conversation=so_far), on_tool_call)
            except BackendError as error:
                error.usage = reply.usage + (error.usage or Usage())
                raise
            reply = _joined(reply, more)
        raise self._chat.faults.bad(f"the server paused its answer {MOST_PAUSES} times", text=reply.text)

    async def models(self) -> list[str]:
        names: list[str] = []
        after = ""
        while True:
            route = self._http.route("GET", f"/models?limit={MODELS_A_PAGE}{after}")
            page = object_of(await self._http.send(route) or b"", route.faults)
            entries = page.get("data")
            if not isinstance(entries, list):
                raise route.faults.bad("the answer is not a list of models")
            found = [name for entry in objects_of(entries) if (name := _model_name(entry)) and name not in names]
            names += found
            last = page.get("last_id")
            if not (page.get("has_more") is True and found and isinstance(last, str)):
                return names
            after = f"&after_id={quote(last, safe='')}"


def batch_from_address(address: Address) -> Backend:
    """Create the same backend over the batch API. ``gather`` and ``look`` work as in ``openai-batch://``."""
    waits, address = address.seconds("gather", "look")
    wire = from_address(replace(address, url=address.url._replace(scheme="anthropic")))
    return JobBackend(wire, AnthropicJobs(wire.client), **waits)


def from_address(address: Address) -> AnthropicBackend:
    """Create the backend. ``anthropic://`` is the hosted API, or ANTHROPIC_BASE_URL if set. ``anthropic://host:port``
    is your own server with this wire: plain http, and not assumed to enforce schemas. A host without a port is a
    provider: https."""
    version = address.text("version") or VERSIONS[0]
    check_known([version], VERSIONS, "Anthropic's API has no version")
    is_named, is_engine = bool(address.url.netloc), address.url.port is not None
    url = address.url if is_named else _api_url(address.environ)
    secure = address.options.get("tls", url.scheme == "https" or (is_named and not is_engine))
    address = replace(address, url=url._replace(scheme="anthropic", query=address.url.query))
    key = address.key("ANTHROPIC_API_KEY")
    token = address.key("ANTHROPIC_AUTH_TOKEN") if key is None else None
    if address.sends and not (is_named or key or token or address.headers or "@" in url.netloc):
        raise SpecError(
            "there is no key for anthropic://: set ANTHROPIC_API_KEY (or ANTHROPIC_AUTH_TOKEN), or give api_key="
        )
    native = address.options.get("native_schema", not is_engine)
    return AnthropicBackend(
        _base_url(address, secure),
        api_key=key,
        token=token,
        version=version,
        headers=address.headers,
        capabilities=Capabilities(
            native_schema=native,
            schema_with_tools=native and not is_engine,
            images=True,
            documents=frozenset() if is_engine else FILES,
        ),
        name=address.name,
    )


def _api_url(environ: Mapping[str, str]) -> SplitResult:
    url = urlsplit((environ.get("ANTHROPIC_BASE_URL") or "").strip() or API)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise SpecError("ANTHROPIC_BASE_URL is not an http or https URL")
    return url


def _base_url(address: Address, secure: bool) -> str:
    """Return the URL up to and including ``/v1``, login included."""
    path = address.url.path.rstrip("/").removesuffix("/messages").rstrip("/").removesuffix("/v1")
    return f"{'https' if secure else 'http'}://{address.url.netloc.removesuffix(':')}{path}/v1"


def _joined(reply: Reply, more: Reply) -> Reply:
    """Join an answer with its continuation after a pause."""
    blocks: list[JsonValue] = [*answer_blocks(reply.message()), *answer_blocks(more.message())]
    return replace(
        more,
        text=reply.text + more.text,
        tool_calls=reply.tool_calls + more.tool_calls,
        usage=reply.usage + more.usage,
        reasoning=reply.reasoning + more.reasoning,
        first_token=reply.first_token,
        sealed=Sealed(WIRE, blocks),
    )


def _model_name(entry: JsonObject) -> str:
    """Return the model's name; "" for a retired model."""
    return "" if entry.get("lifecycle") == "retired" else string_of(entry.get("id"))


_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_DEFAULT = 1  # of temperature and top_p: models without sampling parameters may still accept the default


def check_shape(shape: RequestShape, *, takes_sampling: bool) -> None:
    """Raise SpecError for a shape that the API refuses. ``takes_sampling`` depends on the API version. Only rules that
    are known before the first request are checked: those of an API version, or of a model by its name. The server
    checks the rest."""
    if shape.seed is not None:
        raise SpecError("seed: Anthropic's API has no seed; leave it out")
    sampling = {"temperature": shape.temperature, "top_p": shape.top_p}
    given = {name: value for name, value in sampling.items() if value is not None}
    if not takes_sampling and (refused := [*given, *({"temperature", "top_p", "top_k"} & shape.extra_body.keys())]):
        raise SpecError(
            f"{refused[0]}: this version of Anthropic's API takes no sampling parameters; leave it out, or use "
            "anthropic://?version=2023-06-01 with a model that takes them"
        )
    model = model_of(shape.model)
    if not model.foreign:
        _check_texts(shape)
        _check_sampling(shape, model, given)
        _check_thinking(shape)


def _check_texts(shape: RequestShape) -> None:
    if any(not text.strip() for text in shape.stop):
        raise SpecError("stop: Anthropic's API accepts no stop sequence of only spaces or line breaks")
    for tool in shape.tools:
        if not _TOOL_NAME.fullmatch(tool.name):
            raise SpecError(
                f"the tool name {tool.name!r} is invalid for Anthropic's API: use at most 128 letters, digits, _ and -"
            )


def _check_sampling(shape: RequestShape, model: ModelRules, given: Mapping[str, float]) -> None:
    changed = [name for name, value in given.items() if value != _DEFAULT]
    if changed and not model.samples:
        raise SpecError(f"{changed[0]}: {shape.model} takes no sampling parameters; leave it out")
    if len(given) == 2 and model.samples_once:
        raise SpecError(f"top_p: {shape.model} takes temperature or top_p, not both; leave one out")
    if shape.temperature is not None and shape.temperature > 1:
        raise SpecError(f"temperature is {shape.temperature:g}: Anthropic's API takes 0 to 1")


def _check_thinking(shape: RequestShape) -> None:
    """Check the options of thinking with a limit in tokens (older models). Newer models choose the amount."""
    limit = thinking_tokens(shape)
    if not limit:
        return
    if shape.max_tokens is not None and shape.max_tokens <= limit:
        raise SpecError(
            f"max_tokens is {shape.max_tokens:,}, and thinking may take {limit:,} of them: give more than that"
        )
    if shape.temperature not in (None, _DEFAULT):
        raise SpecError("temperature: Anthropic's models think at temperature 1 only; leave it out")
    choice = shape.tool_choice.get("type") if isinstance(shape.tool_choice, dict) else shape.tool_choice
    if shape.tools and choice not in (None, "auto", "none"):
        raise SpecError("tool_choice: Anthropic's models cannot combine thinking with a forced tool call; use auto")
