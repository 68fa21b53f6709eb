"""A stand-in for three command-line agents: it reads its prompt and its configuration where they do, asks the model
over HTTP, does what the answer says, and tells of it in their events."""

from __future__ import annotations

import json
import os
import sys
from http.client import HTTPConnection
from pathlib import Path
from typing import Any


def sent(url: str, key: str, body: dict[str, Any]) -> bytes:
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    host, _, path = url.removeprefix("http://").partition("/")
    connection = HTTPConnection(host)
    connection.request("POST", f"/{path}", json.dumps(body).encode(), head)
    answer = connection.getresponse()
    assert answer.status == 200, answer.status
    return answer.read()


def ask(url: str, key: str, body: dict[str, Any]) -> Any:
    return json.loads(sent(url, key, body))


def opencode(prompt: str) -> str:
    config = json.loads(os.environ["OPENCODE_CONFIG_CONTENT"])
    if "provider" not in config:  # it has its own login
        return "env"
    provider = config["provider"]["batch"]
    options = provider["options"]
    model = sys.argv[sys.argv.index("--model") + 1].removeprefix("batch/")
    assert model in provider["models"]
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0, "stream": True}
    answer = sent(options["baseURL"] + "/chat/completions", options["apiKey"], body)
    lines = [line.removeprefix(b"data: ") for line in answer.splitlines() if line.startswith(b"data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def claude(prompt: str) -> str:
    if "ANTHROPIC_BASE_URL" not in os.environ:
        return "env"
    url, key = os.environ["ANTHROPIC_BASE_URL"], os.environ["ANTHROPIC_API_KEY"]
    body = {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": prompt}]}
    return str(ask(f"{url}/v1/messages?beta=true", key, body)["content"][0]["text"])


def codex(prompt: str) -> str:
    if Path(os.environ["CODEX_HOME"], "auth.json").exists():
        return "env"
    import tomllib

    config = tomllib.loads(Path(os.environ["CODEX_HOME"], "config.toml").read_text())
    provider = config["model_providers"][config["model_provider"]]
    body = {"model": config["model"], "input": prompt}
    answer = ask(provider["base_url"] + "/responses", os.environ[provider["env_key"]], body)
    return str(answer["output"][0]["content"][0]["text"])


def tell(name: str, text: str) -> None:
    tokens = {"input": 7, "output": 3, "reasoning": 1, "cache": {"read": 2, "write": 0}}
    events: dict[str, list[dict[str, object]]] = {
        "opencode": [
            {"type": "text", "text": "first"},
            {"type": "text", "part": {"text": text}},
            {"type": "step_finish", "part": {"tokens": tokens}},
        ],
        "claude": [{"type": "result", "is_error": False, "result": text, "usage": {"input_tokens": 7}}],
        "codex": [
            {"type": "item.completed", "item": {"type": "agent_message", "text": text}},
            {"type": "turn.completed", "usage": {"input_tokens": 7}},
        ],
    }
    for event in events[name]:
        sys.stdout.write(json.dumps(event) + "\n")


def main() -> int:
    name = Path(sys.argv[0]).name
    prompt = sys.stdin.read()
    text = {"opencode": opencode, "claude": claude, "codex": codex}[name](prompt)
    what, _, rest = text.partition(" ")
    if what == "write":
        Path("new.txt").write_text(rest)
        Path("a.txt").write_text("changed\n")
    elif what == "fail":
        sys.stdout.write("not an event\n")
        sys.stderr.write("it went wrong\n")
        return 3
    elif what == "garbage":
        sys.stdout.buffer.write(b"\xff\x00 {not json\n{}\n[1]\n")
        return 0
    elif what == "hang":
        import subprocess

        # Detached from the group and the session, as daemons are.
        program = f"import os, pathlib, time; pathlib.Path({rest!r}).write_text(str(os.getpid())); time.sleep(600)"
        away = [sys.executable, "-c", program]
        subprocess.Popen(away, start_new_session=True).wait()
    elif what == "env":
        text = json.dumps({"env": dict(os.environ), "argv": sys.argv, "prompt": prompt, "cwd": str(Path.cwd())})
    tell(name, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
