"""The log of a server as JSON lines, and the id of each request, which is also in the answer.

A log line that is written while a request is handled has the id of that request, whichever module writes it.
docs/serve.md describes the form.
"""

from __future__ import annotations

import logging
import re
import secrets
import sys
import time
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime

import orjson
from aiohttp import web
from pydantic import JsonValue

from batch_agent.messages import JsonObject

FORMATS = ("text", "json")
ID_HEADERS = ("X-Request-Id", "Request-Id")  # OpenAI's clients read the first, Anthropic's the second
GIVEN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
LEFT = 499  # status in the log of a request whose client left before its answer was complete
FIELDS = "fields"  # of a log record: what its line has beside the message

logger = logging.getLogger("batch_agent")
_request: ContextVar[dict[str, JsonValue] | None] = ContextVar("request", default=None)


class LoggedRequest:
    """Logs one request. Enter it before the handler; ``status`` is set when the status is known."""

    def __init__(self, request: web.BaseRequest) -> None:
        given = request.headers.get(ID_HEADERS[0], "")
        self.id = given if GIVEN_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        self.status = LEFT
        self._noted: dict[str, JsonValue] = {"request_id": self.id, "tenant": None}
        self._line: JsonObject = {"method": request.method, "path": request.path}
        self._began = time.monotonic()

    def __enter__(self) -> LoggedRequest:
        _request.set(self._noted)
        return self

    def __exit__(self, *exception: object) -> None:
        if logger.isEnabledFor(logging.INFO):
            seconds = round(time.monotonic() - self._began, 4)
            line = {**self._line, "status": self.status, "seconds": seconds}
            told = f"{line['method']} {line['path']} {self.status}"
            log_event("request", told, line)
        _request.set(None)

    @property
    def headers(self) -> Mapping[str, str]:
        """Return the headers that the answer gets for the log."""
        return dict.fromkeys(ID_HEADERS, self.id)


def note(**values: JsonValue) -> None:
    """Add fields to the log line of the request that is being handled, such as its tenant."""
    noted = _request.get()
    if noted is not None:
        noted.update(values)


def log_event(event: str, message: str, fields: Mapping[str, JsonValue]) -> None:
    logger.info(message, extra={FIELDS: {"event": event, **fields}})


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": "log",
            "message": record.getMessage(),
            **(_request.get() or {}),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


def log_as(form: str) -> None:
    """Write the log to standard error in this form. "text": Python's default, warnings and errors as plain lines.
    "json": JSON lines, also for other packages."""
    if form == "json":
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonLines())
        logging.getLogger().addHandler(handler)
        logging.captureWarnings(True)
        logger.setLevel(logging.INFO)
