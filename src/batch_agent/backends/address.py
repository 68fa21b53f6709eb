"""A backend URL as the user gave it, parsed: host, credentials and query options.

The factory in ``schemes`` creates a Backend from it. Displayed addresses never contain user, password or key.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, parse_qsl, urlencode

from batch_agent.backends.schemes import FORMS, KEY_VARIABLE, SCHEMES, Scheme
from batch_agent.errors import SpecError

if TYPE_CHECKING:
    from batch_agent.http.transport import Transport


@dataclass(frozen=True, slots=True, repr=False)
class Address:
    url: SplitResult
    api_key: str | None
    headers: Mapping[str, str]
    environ: Mapping[str, str]
    sends: bool = True  # False: nothing will be sent, so a key may be missing
    model: str | None = None  # the model the user named beside the URL
    transport: Transport | None = None  # shared connections; None: the backend has its own

    @property
    def name(self) -> str:
        """Return the URL for display: no user, password or options."""
        return f"{self.url.scheme}://{self.place}{self.url.path.rstrip('/')}"

    @property
    def place(self) -> str:
        """Return host and port."""
        return self.url.netloc.rpartition("@")[2]

    @property
    def options(self) -> Mapping[str, bool]:
        """Return the query options that are true or false."""
        values = {"true": True, "1": True, "false": False, "0": False}
        flags = {name: value.lower() for name, value in self._given.items() if name in self._scheme.options}
        for name, value in flags.items():
            if value not in values:
                raise SpecError(f"the backend's option {name} must be true or false")
        return {name: values[value] for name, value in flags.items()}

    def text(self, name: str) -> str | None:
        """Return a text option of the query; None if it is missing."""
        value = self._given.get(name)
        if value == "":
            raise SpecError(f"the backend's option {name} is empty: give it a value, or leave it out")
        return value

    @property
    def api(self) -> str | None:
        """Return which OpenAI API the user wants: ``?api=chat`` or ``?api=responses``."""
        api = self.text("api")
        if api not in (None, "chat", "responses"):
            raise SpecError("the backend's option api must be chat or responses")
        return api

    @property
    def _given(self) -> Mapping[str, str]:
        given = dict(parse_qsl(self.url.query, keep_blank_values=True))
        allowed = (*self._scheme.options, *self._scheme.texts)
        check_known(given, allowed, f"a {self.url.scheme}:// backend has no option")
        return given

    @property
    def _scheme(self) -> Scheme:
        return SCHEMES[self.url.scheme]

    def seconds(self, *names: str) -> tuple[dict[str, float], Address]:
        """Return these options of the URL as seconds, and the address without them."""
        given = dict(parse_qsl(self.url.query, keep_blank_values=True))
        found: dict[str, float] = {}
        for name in given.keys() & set(names):
            try:
                found[name] = float(given.pop(name))
            except ValueError:
                found[name] = -1.0
            if not 0.0 <= found[name] < inf:
                raise SpecError(f"the backend's option {name} must be a number of seconds")
        return found, replace(self, url=self.url._replace(query=urlencode(given)))

    def key(self, variable: str = KEY_VARIABLE) -> str | None:
        """Return the given key, or else the variable's, unless the URL contains a login."""
        if self.api_key:
            return self.api_key
        return None if "@" in self.url.netloc else (self.environ.get(variable) or "").strip() or None

    def base_url(self, engine_port: int | None = None) -> str:
        """Return the URL up to ``/v1``, login included. A given path is kept; engines serve ``/v1`` below it."""
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
    """Raise SpecError for an unknown name, with similar known names."""
    allowed = list(allowed)
    for name in names:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
            raise SpecError(f"{complaint} {name!r}{hint} Known: {', '.join(allowed)}")
