"""Requests to the control socket of a run in another process. The run directory says where the socket is."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import cast

from batch_agent.errors import BatchAgentError, SpecError
from batch_agent.files.results import from_json, to_json
from batch_agent.messages import JsonObject

CONTROL = "control.json"
LONGEST_ANSWER = 256 * 1024 * 1024  # bytes of a line; a conversation may be long
PATIENCE = 10.0  # seconds to wait for an answer


class NotAlive(BatchAgentError):
    """The run is not running, or runs on another machine."""


class Refused(BatchAgentError):
    """The run refused the request."""


def socket_of(run_dir: Path) -> Path:
    """Return the path of the control socket of a run. Raises NotAlive if there is none."""
    try:
        place = from_json((run_dir / CONTROL).read_bytes())
    except (OSError, ValueError):
        raise NotAlive(f"{run_dir} is not running") from None
    if not isinstance(place, dict) or not isinstance(place.get("socket"), str):
        raise NotAlive(f"{run_dir / CONTROL} is damaged")
    if place.get("host") != platform.node():
        raise NotAlive(f"{run_dir} runs on {place.get('host')}: use that machine")
    return Path(cast(str, place["socket"]))


async def ask(run_dir: Path, request: JsonObject) -> JsonObject:
    """Send a request to the run, and return the run's answer. Raises NotAlive, or Refused with the run's reason."""
    answers = stream(run_dir, request)
    try:
        async with asyncio.timeout(PATIENCE):
            async for answer in answers:
                return answer
    except TimeoutError:
        raise NotAlive(f"{run_dir} did not answer in {PATIENCE:g} s") from None
    finally:
        await answers.aclose()
    raise NotAlive(f"{run_dir} has just ended")


async def stream(run_dir: Path, request: JsonObject) -> AsyncGenerator[JsonObject, None]:
    """Send a request, and yield the run's answers until it ends. Raises NotAlive, or Refused with the run's reason."""
    path = socket_of(run_dir)
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=LONGEST_ANSWER)
    except OSError:
        raise NotAlive(f"{run_dir} is not running: it was killed, or its machine went down") from None
    except (AttributeError, NotImplementedError):
        raise SpecError("this platform has no Unix sockets, so runs cannot be steered from outside") from None
    try:
        writer.write(to_json(request) + b"\n")
        while line := await reader.readline():
            answer = from_json(line)
            if not isinstance(answer, dict) or not answer.get("ok"):
                why = answer.get("error") if isinstance(answer, dict) else "the answer is not valid JSON"
                raise Refused(str(why))
            yield cast(JsonObject, answer)
    except ConnectionError:
        return
    finally:
        writer.close()
