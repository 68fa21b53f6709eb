"""AWS Bedrock: ``converse`` and ``converse-stream`` for all its models, signed with the credentials that boto finds.

boto's own client blocks a thread per request, so only parts of it are used: its credential chain, called in a thread
when credentials are new or about to expire; its signature; and its frame parser. So any number of requests can be in
flight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Self
from urllib.parse import quote, unquote, urlsplit

from batch_agent.backends.address import Address
from batch_agent.backends.anthropic.request import Head
from batch_agent.backends.base import Backend, Capabilities, ModelRequest, OnToolCall, Probe, RequestShape
from batch_agent.backends.bedrock.request import ConverseView, build_head, check_shape, keeps_schemas
from batch_agent.backends.http.backend import HttpBackend, HttpClient, Route
from batch_agent.backends.http.wire import Wording
from batch_agent.blocking import in_thread
from batch_agent.documents import MEDIA_TYPES
from batch_agent.errors import Rejected, SpecError, Unavailable
from batch_agent.messages import Reply

if TYPE_CHECKING:
    from botocore.credentials import Credentials, ReadOnlyCredentials
    from yarl import URL

    from batch_agent.backends.bedrock.answer import ConverseStream
    from batch_agent.backends.http.wire import Naming

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
        native = keeps_schemas(model) if native_schema is None else native_schema
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

    def read_whole(self, body: bytes, naming: Naming) -> Reply:
        from batch_agent.backends.bedrock.answer import read_answer

        return read_answer(body, naming)

    def read_stream(
        self, naming: Naming, on_tool_call: OnToolCall, clock: Callable[[], float], said: list[str]
    ) -> ConverseStream:
        from batch_agent.backends.bedrock.answer import ConverseStream

        return ConverseStream(naming, on_tool_call, clock, said)

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
