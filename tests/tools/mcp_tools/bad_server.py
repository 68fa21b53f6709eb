"""An MCP server by hand that breaks the rules in the way its argument names."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

LIE = sys.argv[1]
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}


def tool(name: str = "look", **fields: object) -> dict[str, object]:
    return {"name": name, "inputSchema": OBJECT, "annotations": {"readOnlyHint": True}, **fields}


LISTS: dict[str, dict[str, object]] = {
    "bad schema": {"tools": [tool(inputSchema={"type": "object", "properties": {"a": {"type": "whatever"}}})]},
    "remote schema": {"tools": [tool(inputSchema={"type": "object", "$ref": "http://127.0.0.1:9/schema"})]},
    "long name": {"tools": [tool("x" * 100)]},
    "same name": {"tools": [tool("a.b"), tool("a/b")]},
    "no list": {"tools": "none"},
    "endless list": {"tools": [tool()], "nextCursor": "more"},
    "other output": {"tools": [tool(outputSchema={"type": "object", "required": ["b"]})]},
}
RESULTS: dict[str, object] = {
    "no result": {"content": 5},
    "other output": {"content": [], "structuredContent": {"c": 1}},
    "nothing": {"content": []},
}


def say(**message: object) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def answer(request: dict[str, object]) -> None:
    number, method = request.get("id"), request["method"]
    if method == "initialize":
        sys.stdout.write("Listening on stdio!\n{}\n[1, 2]\n\xff\n")
        say(id=10_000, result={})  # to a question that nobody asked
        info = {"name": "bad", "version": "1"}
        say(id=number, result={"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info})
    elif method == "tools/list":
        say(id=number, result=LISTS.get(LIE, {"tools": [tool()]}))
    elif method == "tools/call":
        if LIE == "endless line":
            sys.stdout.write('{"result": {"content": [{"type": "text", "text": "')
            for _ in range(10):
                sys.stdout.write("x" * 1_000_000)
            sys.stdout.write(f'"}}]}}, "id": {number}, "jsonrpc": "2.0"}}\n')
            sys.stdout.flush()
        elif LIE == "silent call":
            pass
        else:
            say(id=number, result=RESULTS.get(LIE, {"content": [{"type": "text", "text": "fine"}]}))
    elif number is not None:
        say(id=number, error={"code": -32601, "message": "no such method"})


if LIE == "silent":
    time.sleep(600)
if LIE == "dies at the second start":
    mark = Path(os.environ["NOTES"])
    if mark.read_text():
        sys.exit("no second time")
    mark.write_text("once")
for line in sys.stdin:
    answer(json.loads(line))
