"""Which commands, addresses, modules and directories a worker may use: those that its own side has allowed.

The record of a run names tools, backends, functions and directories, and everyone who can write to Redis can change it.
So a worker uses only what its own command line and environment allow: by patterns, by a spec file, by the fingerprint
that the feeder printed, or by the signature of a feeder with the same secret. The record only selects among these. A
worker that the feeder starts, or that reaches its feeder through a socket of the same user, needs no permission.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import cast

import orjson

from batch_agent.backends.base import Backend
from batch_agent.backends.forwarding import ForwardingBackend
from batch_agent.backends.registry import BACKEND_VARIABLE
from batch_agent.door import same_secret
from batch_agent.errors import SpecError
from batch_agent.files.results import from_json, to_json
from batch_agent.fleet.backend import STANDBY, TRAITS, Fleet
from batch_agent.fleet.hostfile import Hostfile, parse_hosts
from batch_agent.messages import JsonObject
from batch_agent.trust.escalate import is_reference

SECRET, ALLOW = "BATCH_AGENT_CLUSTER_SECRET", "BATCH_AGENT_ALLOW"
ROWS, HOSTS = "row_schema", "hosts"  # facts: the class of the rows; the servers in hostfiles
SIGNED = ("spec", "specs", ROWS, HOSTS)
SIGNATURE = "signature"  # the fact that is the signature of the others
SIGNED_LINE = "# signature "  # the last line of a signed hostfile
PLACES = ("backend", "compaction_backend")
NAMES = ("output_schema", "worker", "compaction")  # functions and classes, as module:name
DIRECTORIES = ("image_root", "cache", "examples")  # ... and files: examples that are no pairs
MODES = ("auto", "off")  # values of ``compaction`` that name nothing


def things_of(facts: Mapping[str, object]) -> list[str]:
    """Return everything that a record tells a worker to execute, connect to, import or open."""
    stages = cast("dict[str, JsonObject]", facts.get("specs", {}))
    specs = [cast(JsonObject, facts.get("spec", {})), *stages.values()]
    found = {thing for spec in specs for thing in _things_in(spec)}
    if isinstance(rows := facts.get(ROWS), str):
        found.add(rows)
    return sorted(found.union(cast("list[str]", facts.get(HOSTS, []))))


def _things_in(spec: Mapping[str, object]) -> Iterator[str]:
    entries = spec.get("cascade")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, Mapping):
            yield from _things_in(entry)
    for name in PLACES:
        yield from _addresses(spec.get(name))
    yield from (str(tool) for tool in cast("list[object]", spec.get("tools") or ()))
    yield from (str(value) for name in NAMES if isinstance(value := spec.get(name), str) and value not in MODES)
    if isinstance(rule := spec.get("escalate"), str) and is_reference(rule):
        yield rule
    votes = spec.get("vote")
    for how in votes.values() if isinstance(votes, Mapping) else [votes]:
        if isinstance(how, str) and ":" in how:
            yield how
    yield from (f"{name}={value}" for name in DIRECTORIES if isinstance(value := spec.get(name), str))
    if spec.get("image_root") is None and (spec.get("images") or spec.get("document_column")):
        yield "image_root=."
    runtime = spec.get("runtime")
    if runtime is not None:
        yield f"runtime:{runtime if isinstance(runtime, str) else to_json(runtime).decode()}"


def _addresses(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield str(value.get("url")) if value.keys() <= {"url", *TRAITS, *STANDBY} else to_json(dict(value)).decode()
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _addresses(each)
    elif value is not None:
        yield str(value)


def fingerprint_of_things(facts: Mapping[str, object]) -> str:
    """Return a digest of what a record tells workers to use. Prompts and limits are not part of it."""
    return blake2b(to_json(things_of(facts)), digest_size=12).hexdigest()


def hosts_of(backend: Backend) -> list[str]:
    """Return the addresses in the hostfile of a backend, if it has one."""
    hostfile = hostfile_of(backend)
    return [] if hostfile is None else [host.address for host in parse_hosts(hostfile.text, str(hostfile.path))]


def layers(backend: Backend) -> Iterator[Backend]:
    """Yield a backend, and the backends to which it forwards requests."""
    yield backend
    while isinstance(backend, ForwardingBackend):
        backend = backend.inner
        yield backend


def hostfile_of(backend: Backend) -> Hostfile | None:
    return next((layer.hostfile for layer in layers(backend) if isinstance(layer, Fleet)), None)


def sign(facts: JsonObject, environ: Mapping[str, str] = os.environ) -> JsonObject:
    """Return the facts with a signature, if this process has a secret."""
    secret = environ.get(SECRET, "")
    return {**facts, SIGNATURE: _signature(secret, _content(facts))} if secret else facts


def sign_file(name: str, text: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return a hostfile for the record, with a last line that is its signature, if this process has a secret."""
    secret = environ.get(SECRET, "")
    return f"{text}\n{SIGNED_LINE}{_signature(secret, to_json([name, text]))}" if secret else text


def join_line(url: str, facts: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> str:
    """Return the command that starts a worker of this run on another machine."""
    if environ.get(SECRET):
        return f"batch-agent work {url}  # with the same {SECRET}"
    return f"batch-agent work {url} --trust {fingerprint_of_things(facts)}"


class Trust:
    """The permissions of one worker. ``allow`` are patterns. ``fingerprint`` is that of a feeder. ``named`` are the
    things that the worker's own spec file names. ``everything``: the feeder itself gave the record to this worker."""

    def __init__(
        self,
        allow: Iterable[str] = (),
        fingerprint: str = "",
        named: Iterable[str] = (),
        *,
        everything: bool = False,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._patterns = [*allow, *environ.get(ALLOW, "").split()]
        self._fingerprint = fingerprint
        self.everything = everything
        self._secret = environ.get(SECRET, "")
        self._admitted = {*named, *filter(None, [environ.get(BACKEND_VARIABLE)])}

    def check(self, facts: Mapping[str, object]) -> None:
        """Raise SpecError if the record of a run, or of one of its stages, names what this worker may not use."""
        if self.everything:
            return
        if self._secret:
            signature = facts.get(SIGNATURE)
            if not isinstance(signature, str):
                raise SpecError(f"the record of this run is not signed: give its feeder the same {SECRET}")
            if not same_secret(signature, _signature(self._secret, _content(facts))):
                raise SpecError(
                    f"the signature of the record of this run is wrong: its feeder had another {SECRET}, or the record "
                    "was changed"
                )
            return
        things = things_of(facts)
        if self._fingerprint and same_secret(self._fingerprint, fingerprint_of_things(facts)):
            self._admitted.update(things)
        self._admit(things, "the record")

    def file(self, get_file: Callable[[str], str | None]) -> Callable[[str], str | None]:
        """Return a function that returns hostfiles of the record. It raises SpecError for a hostfile with a server that
        this worker may not use."""

        def read(name: str) -> str | None:
            text = get_file(name)
            if text is None:
                return None
            plain, _, signature = text.rpartition(f"\n{SIGNED_LINE}")
            plain = plain or text
            if self.everything:
                return plain
            if self._secret:
                if not same_secret(signature, _signature(self._secret, to_json([name, plain]))):
                    raise SpecError(f"the hostfile {name!r} in the record is not signed with this {SECRET}")
                return plain
            self._admit([host.address for host in parse_hosts(plain, name)], f"the hostfile {name!r} in the record")
            return plain

        return read

    def _admit(self, things: Iterable[str], who: str) -> None:
        refused = [each for each in things if each not in self._admitted and not self._matches(each)]
        if not refused:
            return
        wrong = "" if not self._fingerprint else f"the record is not the one with the fingerprint {self._fingerprint}; "
        raise SpecError(
            f"{wrong}{who} names what this worker may not use: {', '.join(refused)}. Who can write to the record "
            f"can change that. Allow it here: --allow '{refused[0]}', or --trust FINGERPRINT as the feeder prints it, "
            f"or the same {SECRET} for the feeder and the workers (docs/cluster.md)"
        )

    def _matches(self, thing: str) -> bool:
        return any(_pattern(each).fullmatch(thing) is not None for each in self._patterns)


def _pattern(text: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern. It matches itself; ``*`` is any text within one part of an
    address."""
    return re.compile("[^/?#@]*".join(map(re.escape, text.split("*"))))


def owned(path: Path) -> bool:
    """Return whether a socket was made by this user, in a directory that only this user can change."""
    try:
        own, folder = path.lstat(), path.parent.stat()
    except OSError:
        return False
    mine = own.st_uid == folder.st_uid == os.getuid()
    return mine and stat.S_ISSOCK(own.st_mode) and not folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _content(facts: Mapping[str, object]) -> bytes:
    kept = from_json(to_json({name: facts[name] for name in SIGNED if name in facts}))
    try:
        return orjson.dumps(kept, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # a lone surrogate, or an integer beyond 64 bits
        return json.dumps(kept, sort_keys=True).encode()


def _signature(secret: str, content: bytes) -> str:
    return hmac.digest(os.fsencode(secret), content, "sha256").hex()
