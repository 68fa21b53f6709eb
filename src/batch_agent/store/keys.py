"""What tells one question from another, as hashes.

The fingerprint is of everything that all rows' answers depend on; a row's key adds its identity and its rendered
prompt. Neither knows where the server is, how many requests run at once, how often one is tried again or after how many
turns an agent is given up: an answer stays the answer to its question whatever these are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from batch_agent.backends.base import RequestShape
from batch_agent.files.results import from_json, to_json
from batch_agent.job import Job
from batch_agent.store.base import Identity

SCHEME = 1  # of the keys below; another one makes old answers unfindable, never wrong
KEY_BYTES = 16
FIRST_FIELDS = {
    *("model", "max_tokens", "temperature", "top_p", "seed", "stop"),
    *("tools", "tool_choice", "schema", "schema_name", "extra_body"),
}


def fingerprint(
    *,
    task: str,
    system: str,
    shapes: Sequence[RequestShape],
    tool_versions: Mapping[str, str | None],
    worker: str | None = None,
    template: str = "braces",
) -> bytes:
    """``system`` as it is before hoisting: moving a shared value forward does not change the question. ``template`` is
    the language of the task."""
    asked = [SCHEME, task, system, [shape_fields(shape) for shape in shapes], dict(tool_versions)]
    if worker is not None:
        asked.append(worker)
    if template != "braces":
        asked.append({"template": template})
    text = json.dumps(from_json(to_json(asked)), sort_keys=True)
    return blake2b(text.encode("ascii"), digest_size=KEY_BYTES).digest()


def shape_fields(shape: RequestShape) -> dict[str, object]:
    """What of a shape is part of the question. A field that shapes did not have when the scheme was made is part of it
    only where it says something: answers to the same question from before there was such a field stay valid."""
    fields = RequestShape.__dataclass_fields__
    values = {name: getattr(shape, name) for name in fields}
    return {name: value for name, value in values.items() if name in FIRST_FIELDS or value != fields[name].default}


class Keys:
    """The identities of rows under one fingerprint, and a digest over those asked for, their order included."""

    def __init__(self, fingerprint: bytes) -> None:
        self._start = blake2b(fingerprint, digest_size=KEY_BYTES)
        self._digest = blake2b(digest_size=KEY_BYTES)
        self.count = 0

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def key(self, own_id: str | None, question: str) -> bytes:
        state = self._start.copy()
        if own_id is None:
            state.update(b"-" + question.encode())
        else:
            own = own_id.encode("utf-8", "surrogatepass")
            state.update(b"%d:%b%b" % (len(own), own, question.encode()))
        return state.digest()

    def identity(self, job: Job, question: str) -> Identity:
        return self.identify(job.input, job.job_id if job.identified else None, question)

    def identify(self, value: object, own_id: str | None, question: str) -> Identity:
        identity = Identity(self.key(own_id, question), row_of(value, question))
        self._digest.update(identity.key + identity.row)
        self.count += 1
        return identity


def row_of(value: object, question: str) -> bytes:
    """The input by all it holds, ``id`` and unused columns included: one that was edited is another row."""
    try:
        content = b"=" + to_json(value)
    except Exception:  # whatever the user's own classes raise: no reason to stop a run
        content = b"?" + question.encode()
    return blake2b(content, digest_size=KEY_BYTES).digest()
