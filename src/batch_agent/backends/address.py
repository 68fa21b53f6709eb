"""A backend as the user gave it, taken apart: where it is, who asks, and what stands behind the question mark.

A factory of ``registry.SCHEMES`` makes a Backend of it. What is shown of an address has no user, password or key.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, parse_qsl

from batch_agent.errors import SpecError

if TYPE_CHECKING:
    from batch_agent.backends.transport import Transport

KEY_VARIABLE = "BATCH_AGENT_API_KEY"
FORMS = "vllm://host:8000, sglang://host:30000, openai://, http://host:port/v1, https://host/v1, fleet://hosts.txt, or local://"


@dataclass(frozen=True, slots=True, repr=False)
class Address:
    url: SplitResult
    api_key: str | None
    headers: Mapping[str, str]
    environ: Mapping[str, str]
    sends: bool = True  # False: nothing will be sent, so a key may be missing
    transport: Transport | None = None  # the connections it shares with others; None: it has its own

    @property
    def name(self) -> str:
        """For people: no user, no password, no options."""
        return f"{self.url.scheme}://{self.place}{self.url.path.rstrip('/')}"

    @property
    def place(self) -> str:
        """Host and port."""
        return self.url.netloc.rpartition("@")[2]

    @property
    def options(self) -> Mapping[str, bool]:
        """What stands behind the question mark, for servers that speak HTTP."""
        given = dict(parse_qsl(self.url.query, keep_blank_values=True))
        allowed = ("native_schema",) if self.url.scheme in ("http", "https") else ("native_schema", "tls")
        check_known(given, allowed, f"a {self.url.scheme}:// backend has no option")
        values = {"true": True, "1": True, "false": False, "0": False}
        for name, value in given.items():
            if value.lower() not in values:
                raise SpecError(f"the backend's option {name} must be true or false")
        return {name: values[value.lower()] for name, value in given.items()}

    def key(self, variable: str = KEY_VARIABLE) -> str | None:
        """The key that was given, else the variable's, where the URL does not bring a login of its own."""
        if self.api_key:
            return self.api_key
        return None if "@" in self.url.netloc else (self.environ.get(variable) or "").strip() or None

    def base_url(self, engine_port: int | None = None) -> str:
        """The URL up to ``/v1``, login included. A path that was given is kept; engines serve ``/v1`` below theirs."""
        url = self.url
        if not url.hostname:
            raise SpecError(f"the {url.scheme}:// backend has no host: give one of {FORMS}")
        is_engine = engine_port is not None
        secure = self.options.get("tls", url.scheme in ("https", "openai"))
        port = f":{engine_port}" if is_engine and url.port is None and not secure else ""
        path = url.path.rstrip("/").removesuffix("/chat/completions").rstrip("/")
        if not path or (is_engine and not path.endswith("/v1")):
            path += "/v1"
        return f"{'https' if secure else 'http'}://{url.netloc.removesuffix(':')}{port}{path}"


def check_known(names: Iterable[str], allowed: Iterable[str], complaint: str) -> None:
    """SpecError for a name that is not allowed, with the one that was probably meant."""
    allowed = list(allowed)
    for name in names:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise SpecError(f"{complaint} {name!r}{hint} Known: {', '.join(allowed)}")
