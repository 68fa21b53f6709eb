"""An MCP server by hand, for tests of its start and its death: it imports nothing, so each start is cheap.

What it should remember across its deaths is in the file NOTES: one line per call that ran.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

NOTES = Path(os.environ["NOTES"])


def note(text: str) -> int:
    """Writes a line and returns how many of its kind there are now."""
    with NOTES.open("a") as file:
        file.write(f"{text}\n")
    return NOTES.read_text().splitlines().count(text)


def look_up(word: str) -> str:
    return f"{word} looked up {note(f'look_up {word}')} times"


def die_writing(text: str) -> str:
    note(f"die_writing {text}")
    sys.stderr.write("I am dying\n")
    sys.stderr.flush()
    os._exit(3)


def die_once(text: str) -> str:
    if note(f"die_once {text}") == 1:
        os._exit(3)
    return "alive again"


def die_always() -> str:
    note("die_always")
    os._exit(3)


def process_ids() -> str:
    """Its process id, and that of a child of its own that ignores the end of its input."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    return f"{os.getpid()} {child.pid}"


def variables() -> str:
    return "\n".join(sorted(os.environ))


def which_trace(**meta: str) -> str:
    """The trace that the call belongs to, which comes beside the arguments."""
    return meta["traceparent"]


TOOLS: dict[str, Callable[..., str]] = {
    tool.__name__: tool for tool in (look_up, die_writing, die_once, die_always, process_ids, variables, which_trace)
}
WRITES = {"die_writing"}


def listed(name: str) -> dict[str, object]:
    parameters = TOOLS[name].__annotations__.keys() - {"return", "meta"}
    schema = {"type": "object", "properties": {each: {"type": "string"} for each in parameters}}
    return {"name": name, "inputSchema": schema, "annotations": {"readOnlyHint": name not in WRITES}}


def result_of(method: str, params: dict[str, object]) -> dict[str, object] | None:
    if method == "initialize":
        info = {"name": "plain", "version": "1"}
        return {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        return {"tools": [listed(name) for name in TOOLS]}
    if method != "tools/call":
        return None
    arguments = params.get("_meta") if params["name"] == "which_trace" else params.get("arguments")
    said = TOOLS[str(params["name"])](**arguments if isinstance(arguments, dict) else {})
    return {"content": [{"type": "text", "text": said}]}


for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        result = result_of(request["method"], request.get("params", {}))
        unknown = {"error": {"code": -32601, "message": "no such method"}}
        answer = {"jsonrpc": "2.0", "id": request["id"], **(unknown if result is None else {"result": result})}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
