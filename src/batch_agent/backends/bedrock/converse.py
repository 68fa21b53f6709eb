"""AWS Bedrock: ``converse`` and ``converse-stream`` for all its models, signed with the credentials that boto finds.

boto's own client blocks a thread per request, so only parts of it are used: its credential chain, called in a thread
when credentials are new or about to expire; its signature; and its frame parser. So any number of requests can be in
flight.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Self
from urllib.parse import quote, unquote, urlsplit

import orjson
from pydantic import JsonValue

from batch_agent.backends.address import Address
from batch_agent.backends.anthropic.answer import AnswerStream, MessageAnswer, OpenBlock, arguments_of
from batch_agent.backends.anthropic.request import Head, MessagesView, format_schema, model_of, told_schema
from batch_agent.backends.base import Backend, Capabilities, ModelRequest, OnToolCall, Probe, RequestShape
from batch_agent.backends.http.backend import HttpBackend, HttpClient, Route
from batch_agent.backends.http.wire import Naming, Wording, mapping, object_of, objects_of
from batch_agent.blocking import in_thread
from batch_agent.compiler.tokens import BYTES_PER_TOKEN
from batch_agent.documents import MEDIA_TYPES
from batch_agent.errors import Rejected, SpecError, Unavailable
from batch_agent.messages import JsonObject, Message, Reply

if TYPE_CHECKING:
    from botocore.credentials import Credentials, ReadOnlyCredentials
    from yarl import URL

_STOPS = {"guardrail_intervened": "refusal", "content_filtered": "refusal"}
_COUNTS = {
    "inputTokens": "input_tokens",
    "outputTokens": "output_tokens",
    "cacheReadInputTokens": "cache_read_input_tokens",
    "cacheWriteInputTokens": "cache_creation_input_tokens",
}


def read_answer(body: bytes, naming: Naming) -> Reply:
    document = object_of(body, naming.faults)
    message = mapping(mapping(document.get("output")).get("message"))
    content = message.get("content")
    if not isinstance(content, list):
        raise naming.faults.bad(f"the answer has no content: {naming.faults.clean(body.decode('utf-8', 'replace'))}")
    answer = MessageAnswer(naming)
    for block in content:
        named = _named(mapping(block))
        answer.add(named, arguments_of(named))
    answer.stopped(_stop(document))
    answer.use(_counts(document.get("usage")))
    return answer.reply()


class ConverseStream(AnswerStream):
    """Reads frames instead of events."""

    def __init__(self, naming: Naming, on_tool_call: OnToolCall, clock: Callable[[], float], said: list[str]) -> None:
        from botocore.eventstream import EventStreamBuffer

        super().__init__(naming, on_tool_call, clock, said)
        self._frames = EventStreamBuffer()

    def feed(self, chunk: bytes) -> bool:
        from botocore.eventstream import ParserError

        self._frames.add_data(chunk)
        try:
            for frame in self._frames:
                told = object_of(frame.payload or b"{}", self._faults)
                self._held += len(frame.payload or b"")
                self._check_held()
                headers = frame.headers
                if headers.get(":message-type") != "event":
                    kind = headers.get(":exception-type") or headers.get(":error-code")
                    raise self._faults.reported({**told, "type": kind})
                self._event(str(headers.get(":event-type")), told)
        except ParserError as error:  # a wrong checksum or an impossible length
            raise self._broken(f"the stream is damaged: {error}") from None
        return self._done

    def _event(self, kind: str, event: JsonObject) -> None:
        number = event.get("contentBlockIndex")
        match kind:
            case "contentBlockStart":
                self._open[number] = OpenBlock(_named(mapping(event.get("start"))))
            case "contentBlockDelta":
                self._delta(number, mapping(event.get("delta")))
            case "contentBlockStop":
                self._close_block(number)
            case "messageStop":
                self._answer.stopped(_stop(event))
            case "metadata":  # comes last, with the usage
                self._answer.use(_counts(event.get("usage")))
                self._done = True

    def _delta(self, number: object, delta: JsonObject) -> None:
        self._begun()
        kind, told = next(iter(delta.items()), ("", None))
        block = self._open.get(number)
        if block is None:  # only tool calls start with an event of their own
            block = self._open[number] = OpenBlock(_named({kind: "" if kind == "text" else {}}))
        if kind == "text" and isinstance(told, str):
            self._said.append(told)
            block.extend({"text": told})
        elif kind == "toolUse":
            block.extend({"partial_json": mapping(told).get("input")})
        elif kind == "reasoningContent":
            names = {"text": "thinking", "signature": "signature", "redactedContent": "data"}
            block.extend({names[name]: piece for name, piece in mapping(told).items() if name in names})
            if "redactedContent" in mapping(told):
                block.become("redacted_thinking")


def _named(block: JsonObject) -> JsonObject:
    """Return the block with its fields named as in Anthropic's wire."""
    if "toolUse" in block:
        use = mapping(block["toolUse"])
        return {"type": "tool_use", "id": use.get("toolUseId"), "name": use.get("name"), "input": use.get("input", {})}
    if "reasoningContent" in block:
        content = mapping(block["reasoningContent"])
        if "redactedContent" in content:
            return {"type": "redacted_thinking", "data": content["redactedContent"]}
        told = mapping(content.get("reasoningText"))
        signed: JsonObject = {"signature": told["signature"]} if "signature" in told else {}
        return {"type": "thinking", "thinking": told.get("text", ""), **signed}
    if "text" in block:
        return {"type": "text", "text": block["text"]}
    return {"type": "other", **block}


def _stop(document: JsonObject) -> JsonObject:
    stop = document.get("stopReason")
    return {"stop_reason": _STOPS.get(stop, stop) if isinstance(stop, str) else None}


def _counts(usage: JsonValue) -> JsonObject:
    return {_COUNTS[name]: count for name, count in mapping(usage).items() if name in _COUNTS}


TOKEN_VARIABLE = "AWS_BEARER_TOKEN_BEDROCK"
ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_BEDROCK_RUNTIME", "AWS_ENDPOINT_URL")
REGION_VARIABLES = ("AWS_REGION", "AWS_DEFAULT_REGION")
MODEL_FAILED = 424  # the model failed; the request was valid
_STATUSES = {
    "throttlingException": 429,
    "modelNotReadyException": 429,
    "serviceUnavailableException": 503,
    "internalServerException": 500,
    "modelStreamErrorException": 500,
    "modelTimeoutException": 408,
    "validationException": 400,
    "accessDeniedException": 403,
}
_WORDING = Wording(
    statuses=_STATUSES | {name[0].upper() + name[1:]: status for name, status in _STATUSES.items()},
    overflow=re.compile(
        r"(input|prompt) is too long|too many (input )?tokens|maximum context length|exceed\w* .{0,30}context",
        re.IGNORECASE,
    ),
    key_hint="check the AWS credentials, and that the account has access to the model in this region",
    path_hint="check the model's id and the region",
)

CACHE_POINT = b'{"cachePoint":{"type":"default"}}'
OWN_FIELDS = ("messages", "system", "toolConfig", "inferenceConfig", "outputConfig")
# Fields of the API itself that extra_body may set; all others go to the model.
API_FIELDS = frozenset(
    {
        "additionalModelRequestFields",
        "additionalModelResponseFieldPaths",
        "guardrailConfig",
        "performanceConfig",
        "promptVariables",
        "requestMetadata",
        "serviceTier",
    }
)
# Models that cache: Claude from 3.7 on, the last 3.5 versions, and Nova. Only Claude caches tools separately.
_CACHES = re.compile(r"anthropic\.claude-(3-7|3-5-haiku|3-5-sonnet-20241022|\w+-\d)|amazon\.nova")
_KEEPS_TOOLS = re.compile(r"anthropic\.claude")
_KEEPS_SCHEMAS = re.compile(r"anthropic\.claude-(haiku|sonnet|opus)-(4-[5-9]|[5-9])")
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MOST_STOPS = 4


class Signer:
    """Signs requests with boto's credential chain, loaded once and renewed before it expires."""

    def __init__(self, region: str) -> None:
        self._region = region
        self._credentials: Credentials | None = None
        self._frozen: ReadOnlyCredentials | None = None

    async def renew(self) -> None:
        """Load credentials if they are missing or about to expire, in a thread: the lookup may use the network."""
        from botocore.credentials import RefreshableCredentials

        known = self._credentials
        if known is None or (isinstance(known, RefreshableCredentials) and known.refresh_needed()):
            self._credentials, self._frozen = await in_thread(self._look)

    def _look(self) -> tuple[Credentials, ReadOnlyCredentials]:
        import botocore.session

        found = self._credentials or botocore.session.get_session().get_credentials()
        if found is None:
            raise SpecError(
                "there are no AWS credentials for bedrock://: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
                f"AWS_PROFILE, or {TOKEN_VARIABLE}"
            )
        return found, found.get_frozen_credentials()

    def __call__(self, method: str, url: URL, headers: Mapping[str, str], body: bytes) -> Mapping[str, str]:
        from botocore.auth import SigV4Auth
        from botocore.awsrequest import AWSRequest

        request = AWSRequest(method, str(url), {"Content-Type": headers.get("Content-Type", "")}, body)
        SigV4Auth(self._frozen, "bedrock", self._region).add_auth(request)
        return dict(request.headers.items())


class BedrockBackend(HttpBackend[Head]):
    """``model`` is the model in the address, used if no other is named. With a ``token`` requests are not signed."""

    read_whole = staticmethod(read_answer)
    read_stream = ConverseStream

    def __init__(
        self,
        endpoint: str,
        region: str,
        *,
        model: str = "",
        token: str | None = None,
        native_schema: bool | None = None,
    ) -> None:
        self._signer = None if token else Signer(region)
        http = HttpClient(endpoint, api_key=token, sign=self._signer, wording=_WORDING)
        # Without a word of the user: the models for which the API is known to enforce schemas.
        native = _KEEPS_SCHEMAS.search(model) is not None if native_schema is None else native_schema
        able = Capabilities(
            native_schema=native, schema_with_tools=native, images=True, documents=frozenset(MEDIA_TYPES)
        )
        super().__init__(http, http.route("POST", "/model"), capabilities=able, name=f"bedrock://{region}")
        self._model = model
        self._routes: dict[tuple[str, bool], Route] = {}

    async def __aenter__(self) -> Self:
        if self._signer is not None:
            await self._signer.renew()  # missing credentials are reported before the first row
        return await super().__aenter__()

    def check(self, shape: RequestShape) -> None:
        check_shape(shape)
        super().check(shape)

    def write_head(self, shape: RequestShape, streamed: bool) -> Head:
        return build_head(shape, native_schema=self.capabilities.native_schema)

    def write_body(self, head: Head, request: ModelRequest) -> tuple[bytes, Mapping[str, str] | None]:
        return head.body(request.conversation.view(ConverseView), is_last=request.turns_left == 1), None

    def route_of(self, request: ModelRequest, streamed: bool) -> Route:
        model = request.shape.model
        route = self._routes.get((model, streamed))
        if route is None:
            path = f"/model/{quote(model, safe='')}/{'converse-stream' if streamed else 'converse'}"
            route = self._routes[model, streamed] = self._http.route("POST", path)
        return route

    async def infer(self, request: ModelRequest, on_tool_call: OnToolCall | None = None) -> Reply:
        if self._signer is not None:
            await self._signer.renew()
        try:
            return await super().infer(request, on_tool_call)
        except Rejected as error:
            if error.status != MODEL_FAILED:
                raise
            raise Unavailable(str(error), status=MODEL_FAILED) from None

    async def probe(self, endpoint: str = "") -> Probe:
        return Probe("unknown", "Bedrock has no health route")

    async def models(self) -> list[str]:
        """Return the model of the address: this API has no list of models."""
        if not self._model:
            raise SpecError("bedrock:// needs the model's id: give model=, or bedrock://region/model")
        return [self._model]


def from_address(address: Address) -> Backend:
    """Create the backend for ``bedrock://region/model``. The region may come from the environment or boto's settings,
    the model from ``model=``."""
    if address.sends:
        _need_boto()
    if address.headers or "@" in address.url.netloc:
        raise SpecError("bedrock:// takes no headers and no login: requests are signed with AWS credentials")
    environ = address.environ
    named = (environ.get(name) for name in REGION_VARIABLES)
    region = address.url.netloc or next(filter(None, named), "") or _region_of_profile()
    if not re.fullmatch(r"[a-z0-9-]+", region):
        raise SpecError("bedrock:// needs a region: bedrock://us-east-1/model, or AWS_REGION")
    token = address.key(TOKEN_VARIABLE)
    endpoint = address.text("endpoint_url") or next(filter(None, map(environ.get, ENDPOINT_VARIABLES)), None)
    endpoint = endpoint or f"https://bedrock-runtime.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"
    if token and urlsplit(endpoint).scheme != "https":
        raise SpecError(f"{TOKEN_VARIABLE} is sent over https only: give an https endpoint_url, or access keys")
    native = address.options.get("native_schema")
    model = unquote(address.url.path.strip("/")) or address.model or ""
    return BedrockBackend(endpoint, region, model=model, token=token, native_schema=native)


def _region_of_profile() -> str:
    import botocore.session

    found = botocore.session.get_session().get_config_variable("region")
    return found if isinstance(found, str) else ""


def _need_boto() -> None:
    try:
        import botocore  # noqa: F401
    except ModuleNotFoundError:
        raise SpecError("bedrock:// needs the package boto3; install it with: pip install boto3") from None


class ConverseView(MessagesView):
    """The turns of Anthropic's wire, its blocks under other names. The API has one format for all models; options it
    has no field for are passed to the model (``additionalModelRequestFields``). A cache point is a separate block after
    the cached part. ``called``: the tools used in the conversation. The API refuses a request that does not describe
    them."""

    __slots__ = ("called",)

    def __init__(self) -> None:
        super().__init__()
        self.called: dict[str, None] = {}

    def fork(self) -> Self:
        other = super().fork()
        other.called = self.called.copy()
        return other

    def extend(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self.called |= dict.fromkeys(call.name for call in message.tool_calls)
        super().extend(messages)

    def called_tools(self) -> Sequence[bytes]:
        return [orjson.dumps(_tool(name)) for name in self.called]

    @staticmethod
    def written(block: JsonObject) -> JsonObject:
        match block.get("type"):
            case "text":
                return {"text": block["text"]}
            case "image":
                return {"image": _image(block["source"])}
            case "document":
                return {"document": _document(block["source"])}
            case "tool_use":
                return {"toolUse": {"toolUseId": block["id"], "name": block["name"], "input": block["input"]}}
            case "tool_result":
                return {"toolResult": _result(block)}
            case "thinking":
                told: JsonObject = {"text": block.get("thinking"), "signature": block.get("signature")}
                return {"reasoningContent": {"reasoningText": {n: v for n, v in told.items() if v is not None}}}
            case "redacted_thinking":
                return {"reasoningContent": {"redactedContent": block.get("data")}}
            case _:
                return block

    @staticmethod
    def marked(blocks: Sequence[bytes]) -> list[bytes]:
        return [*blocks, CACHE_POINT] if blocks else []


def build_head(shape: RequestShape, *, native_schema: bool) -> Head:
    for name in OWN_FIELDS:
        if name in shape.extra_body:
            raise SpecError(f"extra_body cannot set {name!r}: the engine sets this field itself")
    form = format_schema(shape.schema) if shape.schema is not None and native_schema else None
    # There is no choice 'none', so the request offers no tools instead.
    tools = () if shape.tool_choice == "none" else shape.tools
    chosen = _tool_choice(shape.tool_choice) if tools else None
    caches = _CACHES.search(shape.model) is not None
    try:
        choice = b"" if chosen is None else b',"toolChoice":' + orjson.dumps(chosen)
        told = [] if shape.schema is None or form is not None else [ConverseView.written(told_schema(shape.schema))]
        return Head(
            fields=orjson.dumps(_fields(shape, form))[:-1],
            tools=[orjson.dumps(_tool(tool.name, tool.description, tool.parameters)) for tool in tools],
            told=[orjson.dumps(block) for block in told],
            cached_from=model_of(shape.model).cached_from * BYTES_PER_TOKEN if caches else sys.maxsize,
            goes_on=bool(tools),
            marks_tools=_KEEPS_TOOLS.search(shape.model) is not None,
            tools_field=(b',"toolConfig":{"tools":[', b"]" + choice + b"}"),
        )
    except orjson.JSONEncodeError as error:
        raise SpecError(f"the options of the request cannot be written as JSON: {error}") from None


def check_shape(shape: RequestShape) -> None:
    """Raise SpecError for what the API would refuse in every request."""
    if shape.seed is not None:
        raise SpecError("seed: Bedrock's converse has no seed; leave it out, or give the model's own in extra_body")
    if len(shape.stop) > _MOST_STOPS:
        raise SpecError(f"stop: Bedrock's converse takes at most {_MOST_STOPS}")
    for tool in shape.tools:
        if not _TOOL_NAME.fullmatch(tool.name):
            raise SpecError(
                f"the tool name {tool.name!r} is invalid for Bedrock: use at most 64 letters, digits, _ and -"
            )


def _fields(shape: RequestShape, form: JsonObject | None) -> JsonObject:
    inference: JsonObject = {
        "maxTokens": shape.max_tokens,
        "temperature": shape.temperature,
        "topP": shape.top_p,
        "stopSequences": [*shape.stop] or None,
    }
    inference = {name: value for name, value in inference.items() if value is not None}
    api = {name: value for name, value in shape.extra_body.items() if name in API_FIELDS}
    model = {name: value for name, value in shape.extra_body.items() if name not in API_FIELDS}
    given = api.pop("additionalModelRequestFields", {})
    if not isinstance(given, dict):
        raise SpecError("extra_body: additionalModelRequestFields must be a mapping")
    output: JsonObject | None = None
    if form is not None:
        schema: JsonObject = {"name": shape.schema_name, "schema": orjson.dumps(form).decode()}
        output = {"textFormat": {"type": "json_schema", "structure": {"jsonSchema": schema}}}
    # Also when empty, because the rest of a body follows a comma.
    return {
        "inferenceConfig": inference,
        **({"outputConfig": output} if output else {}),
        **({"additionalModelRequestFields": {**model, **given}} if model or given else {}),
        **api,
    }


def _image(source: JsonValue) -> JsonObject:
    if not isinstance(source, dict) or source.get("type") != "base64":
        raise Rejected("Bedrock does not fetch images from URLs: give the file or its bytes")
    kind = str(source["media_type"]).removeprefix("image/")
    return {"format": kind, "source": {"bytes": source["data"]}}


def _document(source: JsonValue) -> JsonObject:
    """Return a document block. All documents have the same name: Bedrock warns that models may take a file's name for
    an instruction."""
    assert isinstance(source, dict)
    kind = next(name for name, media in MEDIA_TYPES.items() if media == source["media_type"])
    return {"format": kind, "name": "document", "source": {"bytes": source["data"]}}


def _result(block: JsonObject) -> JsonObject:
    content = block.get("content", "")
    parts = [*map(ConverseView.written, objects_of(content))]
    if isinstance(content, str):
        parts = [{"text": content or "(nothing)"}]
    status = "error" if block.get("is_error") else "success"
    return {"toolUseId": block["tool_use_id"], "content": [*parts], "status": status}


def _tool(name: str, description: str = "", parameters: JsonObject | None = None) -> JsonObject:
    described: JsonObject = {"description": description} if description.strip() else {}
    schema: JsonObject = {"type": "object", **(parameters or {})}
    return {"toolSpec": {"name": name, **described, "inputSchema": {"json": schema}}}


def _tool_choice(choice: JsonValue) -> JsonValue:
    if not isinstance(choice, str):
        return choice
    kinds: dict[str, JsonValue] = {"auto": {"auto": {}}, "required": {"any": {}}}
    return kinds.get(choice, {"tool": {"name": choice}})
