"""Reads what a command-line agent said from its events: lines of JSON in the formats of these programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeAlias

from pydantic import JsonValue

from batch_agent.backends.http.wire import counted, json_of, mapping
from batch_agent.messages import JsonObject, Usage


@dataclass(slots=True)
class Transcript:
    """``text`` is the agent's last message, ``error`` the error that it reported."""

    text: str = ""
    error: str = ""
    usage: Usage = field(default_factory=Usage)


ReadEvent: TypeAlias = Callable[[Transcript, JsonObject], None]


class EventRecorder:
    """Writes the lines of standard output to a file, and reads the events among them. Other lines are ignored."""

    def __init__(self, file: Path, read: ReadEvent) -> None:
        self._file, self._read = file.open("wb"), read
        self.transcript = Transcript()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def flush(self) -> None:
        self._file.flush()

    def take(self, line: bytes) -> None:
        self._file.write(line)
        event = json_of(line) if line.lstrip().startswith(b"{") else None
        if isinstance(event, dict):
            self._read(self.transcript, event)


def read_opencode(transcript: Transcript, event: JsonObject) -> None:
    """Read an event in either form: the fields of a part are in ``part``, or in the event itself."""
    part = mapping(event.get("part")) or event
    match event.get("type"):
        case "text":
            transcript.text = _string(part.get("text")) or transcript.text
        case "step_finish" | "step-finish":
            tokens = mapping(part.get("tokens"))
            cache = mapping(tokens.get("cache"))
            cached, written = counted(cache, "read"), counted(cache, "write")
            reasoning = counted(tokens, "reasoning")
            transcript.usage += Usage(
                counted(tokens, "input") + cached + written,
                cached,
                counted(tokens, "output") + reasoning,
                reasoning,
                written,
            )
        case "error":
            transcript.error = _error(event.get("error") or part)


def read_claude(transcript: Transcript, event: JsonObject) -> None:
    match event.get("type"):
        case "assistant":
            content = mapping(event.get("message")).get("content")
            for block in content if isinstance(content, list) else ():
                if isinstance(block, dict) and block.get("type") == "text":
                    transcript.text = _string(block.get("text")) or transcript.text
        case "result":
            transcript.text = _string(event.get("result")) or transcript.text
            if event.get("is_error") is True:
                transcript.error = _string(event.get("result")) or _string(event.get("subtype")) or "it failed"
            transcript.usage += claude_usage(event.get("usage"))


def claude_usage(value: JsonValue) -> Usage:
    cached, written = counted(value, "cache_read_input_tokens"), counted(value, "cache_creation_input_tokens")
    prompt = counted(value, "input_tokens") + cached + written
    return Usage(prompt, cached, counted(value, "output_tokens"), 0, written)


def read_codex(transcript: Transcript, event: JsonObject) -> None:
    match event.get("type"):
        case "item.completed":
            item = mapping(event.get("item"))
            if item.get("type") in ("agent_message", "assistant_message"):
                transcript.text = _string(item.get("text")) or transcript.text
        case "turn.completed":
            usage = event.get("usage")
            transcript.error = ""
            transcript.usage += Usage(
                counted(usage, "input_tokens"),
                counted(usage, "cached_input_tokens"),
                counted(usage, "output_tokens"),
                counted(usage, "reasoning_output_tokens"),
            )
        case "turn.failed":
            transcript.error = _error(event.get("error"))
        case "error":
            transcript.error = _string(event.get("message")) or _error(event)


def _string(value: JsonValue) -> str:
    return value if isinstance(value, str) else ""


def _error(value: JsonValue) -> str:
    """Return the message in an error object, wherever it is."""
    if isinstance(value, str):
        return value
    error = mapping(value)
    words = _string(error.get("message")) or _string(mapping(error.get("data")).get("message"))
    return words or _string(error.get("name")) or "it reported an error"
