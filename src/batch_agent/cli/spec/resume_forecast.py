"""The forecast that ``resume`` prints before it sends anything: the options that changed, how many rows keep their
answers, and the cost of the other rows.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from hashlib import blake2b
from itertools import islice
from pathlib import Path

from pydantic import JsonValue

from batch_agent.agent.dryrun import DryRun
from batch_agent.agent.fingerprint import fingerprint_of, rows_under
from batch_agent.agent.prepare import Prepared
from batch_agent.cli.spec.recorded import matched
from batch_agent.errors import BatchAgentError, JobError
from batch_agent.files.results import to_json
from batch_agent.foreign import name_of
from batch_agent.messages import JsonObject
from batch_agent.observe.text import amount, counted, dollars, harmless, rows
from batch_agent.option import Compared, kinds, notes
from batch_agent.record.base import Identity
from batch_agent.record.keys import Keys
from batch_agent.record.reader import RunView, look
from batch_agent.record.rundir import JOURNAL
from batch_agent.record.sqlite import SqliteJournal, open_to_read
from batch_agent.record.steps import Past
from batch_agent.spec import BatchSpec

ASKED = "asked"  # key in the recorded command
MOST_WORDS = 4000  # longest text that is compared word by word
VALUE_CHARACTERS = 60
AT_ONCE = 256  # rows looked up in the journal together


def asked(prepared: Prepared) -> dict[str, JsonValue]:
    """Return the options that answers depend on, to compare them later. Values that may hold a secret are hashed."""
    worker = prepared.spec.worker
    resolved = {
        "model": prepared.model,
        "output_schema": prepared.schema.json_schema if prepared.schema else None,
        "worker": None if worker is None else name_of(worker),
    }
    values: dict[str, JsonValue] = {}
    for name, compared in notes(BatchSpec, Compared).items():
        value = resolved.get(name, getattr(prepared.spec, name))
        values[name] = _hash(value) if compared is Compared.HASH else list(value) if isinstance(value, tuple) else value
    values["tools"] = {tool.name: _hash([tool.spec, tool.version]) for tool in prepared.tools}
    return values


def _hash(value: object) -> str:
    return blake2b(to_json(value), digest_size=8).hexdigest()


def differences(before: Mapping[str, JsonValue], now: Mapping[str, JsonValue]) -> Iterator[str]:
    """Yield a line for each change: ``system_prompt: 1 word``, ``model: a → b``, ``tools: + look_up``."""
    for name, value in now.items():
        old = before.get(name)
        if old == value or name not in before:
            continue
        if name != "tools" and kinds(BatchSpec, name) == {str} and isinstance(old, str) and isinstance(value, str):
            yield f"{name}: {_words_changed(old, value)}"
        elif name == "tools" and isinstance(old, dict) and isinstance(value, dict):
            yield f"tools: {', '.join(_tools_changed(old, value))}"
        elif notes(BatchSpec, Compared).get(name) is Compared.HASH:
            yield f"{name}: changed"
        else:
            yield f"{name}: {_value(old)} → {_value(value)}"


def _words_changed(old: str, new: str) -> str:
    before, after = old.split(), new.split()
    if before == after:
        return "only spaces and line ends"
    if len(before) + len(after) > MOST_WORDS:
        return "changed"
    edits = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return counted(sum(max(b - a, d - c) for kind, a, b, c, d in edits if kind != "equal"), "word")


def _tools_changed(old: JsonObject, new: JsonObject) -> Iterator[str]:
    yield from (f"+ {name}" for name in new if name not in old)
    yield from (f"- {name}" for name in old if name not in new)
    yield from (f"{name} changed" for name in new if name in old and old[name] != new[name])


def _value(value: JsonValue) -> str:
    return "not given" if value is None else harmless(value if isinstance(value, str) else str(value), VALUE_CHARACTERS)


def forecast(prepared: Prepared, *, force: bool) -> str:
    """Return what changed and what resuming will cost. "" if the run simply continues, or if nothing is known."""
    directory = Path(str(prepared.spec.run_dir))
    try:
        view = look(directory)
    except BatchAgentError:  # there is no run yet, or it is damaged; the run itself reports that
        return ""
    prepared, same = matched(prepared, view.facts)
    if same and view.state != "complete":
        return ""
    lines = [f"  {line}" for line in _edits(view, prepared)] if not same else []
    if lines:
        lines.insert(0, f"changed since {directory} was recorded:")
    inputs = prepared.spec.inputs
    if isinstance(inputs, list) and inputs and (directory / JOURNAL).exists():
        by_row = force or (bool(view.facts.get("forced")) and same)
        lines.append(_forecast(prepared, inputs, directory, by_row=by_row))
    return "\n".join(lines)


def _edits(view: RunView, prepared: Prepared) -> Iterator[str]:
    command = view.facts.get("command")
    before = command.get(ASKED) if isinstance(command, dict) else None
    if isinstance(before, dict):
        before = {**before, "model": before.get("model") or view.facts.get("model")}
        yield from differences(before, asked(prepared))


def _forecast(prepared: Prepared, inputs: Sequence[object], directory: Path, *, by_row: bool) -> str:
    kept = _kept(prepared, inputs, directory, by_row=by_row)
    left = len(inputs) - kept
    line = f"answers kept: {kept:,} of {rows(len(inputs))}"
    if not left:
        return line
    dry = DryRun.of(prepared)
    parts = [f"{line}; {left:,} to send"]
    if dry.prompt_tokens is not None:
        parts.append(f"about {amount(dry.prompt_tokens * left // len(inputs))} prompt tokens")
    if dry.cost is not None:
        parts.append(" to ".join(dict.fromkeys(dollars(cost * left / len(inputs)) for cost in dry.cost)))
    return ", ".join(parts)


def _kept(prepared: Prepared, inputs: Sequence[object], directory: Path, *, by_row: bool) -> int:
    plan, keys, kept = prepared.plan, Keys(rows_under(prepared)), 0
    present = fingerprint_of(prepared).hex()
    plan.check_first(inputs[0])
    identities = _identities(prepared, keys, inputs)
    path = directory / JOURNAL
    with closing(SqliteJournal(open_to_read(path), path)) as journal:
        journal.sort_by("row" if by_row else "key")
        while wanted := list(islice(identities, AT_ONCE)):
            kept += sum(past is not None and _stays(past, present, by_row) for past in journal.claim(wanted))
    return kept


def _stays(past: Past, fingerprint: str, by_row: bool) -> bool:
    """Return whether a recorded row is done and stays done. A changed worker works on its rows again."""
    ended = past.ended
    return past.done and (by_row or ended is None or ended.output is None or ended.fingerprint == fingerprint)


def _identities(prepared: Prepared, keys: Keys, inputs: Sequence[object]) -> Iterator[Identity]:
    for value in inputs:
        try:
            yield keys.identify(value, *prepared.plan.asks(value))
        except JobError:  # the row fails before a request is sent
            continue
