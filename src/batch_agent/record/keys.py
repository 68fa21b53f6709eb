"""Hashes that identify a question.

The fingerprint covers everything that the answers of all rows depend on. A row's key adds its identity and its rendered
prompt. Neither depends on the server's address, the concurrency, the number of retries or the limit of turns: these do
not change which question an answer belongs to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from batch_agent.backends.base import RequestShape
from batch_agent.files.results import from_json, to_json
from batch_agent.job import Job
from batch_agent.record.store import Identity

SCHEME = 1  # version of the keys below; with another version old answers are not found, but never mixed up
KEY_BYTES = 16
NAME_BYTES = 8  # of the digest of a row's own id
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
    samples: Sequence[int | None] | None = None,
) -> bytes:
    """Return the digest of what all rows have in common. ``system`` is the system prompt before hoisting: moving a
    shared value forward does not change the question. ``template`` is the template language of the task. ``samples``
    are the number of samples of a row and their seed."""
    asked = [SCHEME, task, system, [shape_fields(shape) for shape in shapes], dict(tool_versions)]
    if worker is not None:
        asked.append(worker)
    if template != "braces":
        asked.append({"template": template})
    if samples is not None:
        asked.append({"samples": list(samples)})
    text = json.dumps(from_json(to_json(asked)), sort_keys=True)
    return blake2b(text.encode("ascii"), digest_size=KEY_BYTES).digest()


def shape_fields(shape: RequestShape) -> dict[str, object]:
    """Return the fields of a shape that are part of the question. A field that was added after scheme 1 counts only if
    it differs from its default. So answers recorded before the field existed stay valid."""
    fields = RequestShape.__dataclass_fields__
    values = {name: getattr(shape, name) for name in fields}
    return {name: value for name, value in values.items() if name in FIRST_FIELDS or value != fields[name].default}


class Keys:
    """Computes the identities of rows under one fingerprint, and a digest over all of them in order. A key is the
    digest of the question, followed by that of the row's own id if it has one."""

    def __init__(self, fingerprint: bytes) -> None:
        self._start = blake2b(fingerprint, digest_size=KEY_BYTES)
        self._digest = blake2b(digest_size=KEY_BYTES)
        self.count = 0

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def key(self, own_id: str | None, question: str) -> bytes:
        state = self._start.copy()
        state.update(b"-" + question.encode())
        if own_id is None:
            return state.digest()
        own = own_id.encode("utf-8", "surrogatepass")
        return state.digest() + blake2b(own, digest_size=NAME_BYTES).digest()

    def identity(self, job: Job, question: str) -> Identity:
        return self.identify(job.input, job.own_id, question)

    def identify(self, value: object, own_id: str | None, question: str) -> Identity:
        identity = Identity(self.key(own_id, question), row_of(value, question))
        self._digest.update(identity.key + identity.row)
        self.count += 1
        return identity


def asked_of(key: bytes) -> bytes:
    """Return the part of a row's key that does not depend on the row's id."""
    return key[:KEY_BYTES]


def derived(digest: bytes, mark: bytes) -> bytes:
    """Return the digest of another agent of a row: of a sample, or of an entry of a cascade."""
    return blake2b(digest + mark, digest_size=KEY_BYTES).digest()


def sample_mark(number: int) -> bytes:
    return b" sample %d" % number


def entry_mark(label: str, fingerprint: bytes) -> bytes:
    return b" entry " + label.encode("utf-8", "surrogatepass") + fingerprint


def row_of(value: object, question: str) -> bytes:
    """Return the digest of the whole input, with ``id`` and unused columns, so that an edited input is another row."""
    try:
        content = b"=" + to_json(value)
    except Exception:  # a user's class may raise anything; that must not stop a run  # noqa: BLE001
        content = b"?" + question.encode()
    return blake2b(content, digest_size=KEY_BYTES).digest()
