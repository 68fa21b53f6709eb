"""What is fuzzed: each target takes any bytes and asserts what must hold for them.

Every reader of foreign bytes may refuse them with its own errors, and with no other. What it accepts must not depend on
how the bytes were cut into pieces, and must survive being written and read again.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from random import Random

from pydantic import BaseModel

from batch_agent import BatchAgent
from batch_agent.cli.spec.specfile import read_specfile
from batch_agent.compiler.schema import OutputSchema
from batch_agent.door import RequestRefused, read_object
from batch_agent.errors import Invalid, OutputError, SpecError, StoreError
from batch_agent.gateway.chat import ChatDialect
from batch_agent.gateway.client_request import BadRequest, RequestReader
from batch_agent.gateway.messages import MessagesDialect
from batch_agent.gateway.responses import ResponsesDialect
from batch_agent.http.connection import ResponseParser, SSEParser
from batch_agent.http.failures import TransportError
from batch_agent.outputs.validate import parse_output
from batch_agent.record.codec import decode, encode
from batch_agent.record.review import REVIEW, DirectoryLog, event_of, line_of
from batch_agent.testing import Request, Say, ScriptedBackend
from batch_agent.trust.review import Event, Review, ReviewRow

CORPUS = Path(__file__).parent / "corpus"
KINDS_OF_STEPS = 12  # more than there are


def pieces_of(data: bytes) -> list[bytes]:
    """The bytes in pieces, always the same for the same bytes."""
    random = Random(blake2b(data, digest_size=8).digest())
    cuts = sorted({0, len(data), *(random.randint(0, len(data)) for _ in range(random.randint(0, 8)))})
    return [data[a:b] for a, b in pairwise(cuts)]


# Responses of servers


def http_response(data: bytes) -> None:
    whole, pieces = _response([data]), _response(pieces_of(data))
    assert pieces == whole


def _response(chunks: list[bytes]) -> object:
    parser, body = ResponseParser("POST", 1 << 20), b""
    try:
        for chunk in chunks:
            if not parser.complete:
                parser.feed(chunk)
                body += parser.take()
        if not parser.complete:
            parser.feed_end()
            body += parser.take()
    except TransportError:
        return None
    finally:
        parser.close()
    assert parser.complete and 200 <= parser.status <= 999
    return parser.status, parser.reason, list(parser.headers.items()), body


def server_sent_events(data: bytes) -> None:
    assert _events(pieces_of(data)) == _events([data])


def _events(chunks: list[bytes]) -> object:
    parser = SSEParser()
    return [event for chunk in chunks for event in parser.feed(chunk)] + parser.close()


# Answers of models


class Inner(BaseModel):
    name: str
    size: int | None = None


class Answer(BaseModel):
    title: str
    score: float
    tags: list[str] = []
    inner: Inner | None = None


SCHEMAS: tuple[OutputSchema[object], ...] = tuple(map(OutputSchema.of, (Answer, list[Inner], int, str | None, dict)))


def json_answer(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    for schema in SCHEMAS:
        try:
            exact = schema.validate_json(text.strip())
        except (OutputError, Invalid):
            exact = None
        try:
            parsed = parse_output(text, schema)
        except OutputError:
            assert exact is None
            continue
        if exact is not None:
            assert repr(parsed.value) == repr(exact) and not parsed.repaired


# The record


def recorded_step(data: bytes) -> None:
    kind, body = (data[0] % KINDS_OF_STEPS, data[1:]) if data else (0, b"")
    try:
        step = decode(kind, body)
    except ValueError:
        return
    again = encode(step)
    assert again[0] == kind
    assert encode(decode(*again)) == again


ROWS = [f"row {number}" for number in range(12)]


@cache
def _recorded() -> Path:
    """The directory of a complete run."""
    path = Path(tempfile.mkdtemp(prefix="batch-agent-fuzz-")) / "run"
    _work(path, resume=False)
    return path


def _work(path: Path, *, resume: bool) -> list[object]:
    def script(request: Request) -> Say:
        return Say(f"the answer to {request.text} {'.' * 200}")

    results = BatchAgent.run_sync(
        task="{input}", inputs=ROWS, model="m", backend=ScriptedBackend(script), run_dir=path, resume=resume
    )
    return [result.output for result in results]


def journal(data: bytes) -> None:
    """The bytes say how the journal is damaged: as a crash or a bad disk does it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        shutil.copytree(_recorded(), path)
        file = path / "journal.db"
        content = bytearray(file.read_bytes())
        for place in range(0, min(len(data), 12), 3):
            kind, where = data[place] % 3, int.from_bytes(data[place + 1 : place + 3]) * len(content) // 65536
            if kind == 0:
                del content[where:]
            elif kind == 1:
                content[where : where + 512] = bytes(len(content[where : where + 512]))
            elif where < len(content):
                content[where] ^= 1 << data[place] % 8
        file.write_bytes(content)
        try:
            outputs = _work(path, resume=True)
        except StoreError:
            return
    assert outputs == [f"the answer to {row} {'.' * 200}" for row in ROWS]


# What users and clients write


def spec_file(data: bytes) -> None:
    suffix = (".yaml", ".toml", ".json")[data[0] % 3 if data else 0]
    with _file(data[1:], suffix) as path:
        try:
            read = read_specfile(path)
        except SpecError as error:
            assert str(path) in str(error)
            return
    assert isinstance(read.options, Mapping) and all(isinstance(name, str) for name in read.options)


@contextmanager
def _file(data: bytes, suffix: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"spec{suffix}"
        path.write_bytes(data)
        yield path


DIALECTS = (ChatDialect(), ResponsesDialect(), MessagesDialect())


def client_request(data: bytes) -> None:
    try:
        body = read_object(data)
    except RequestRefused as error:
        assert error.status == 400
        return
    for dialect in DIALECTS:
        try:
            request = RequestReader().read(dialect, body, "m")
        except BadRequest as error:
            json.dumps(dialect.error(error))
            continue
        assert request.messages and len(request.head) == 16


# The log of a review


def review_log(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / REVIEW).write_bytes(data)
        log, review = DirectoryLog(Path(directory)), Review(lambda one, other: one == other, overlap=0.5)
        log.catch_up(review)
        for event in DirectoryLog(Path(directory)).read()[0]:
            line = line_of(event)
            again = event_of(line, event.n)
            assert again is not None
            assert line_of(again) == line
            review.verdict(event.row, event.queue, event.input)
        place = ReviewRow(0, "a", "audit", "")
        review.left([place], "ada")
        review.next_of([place], "ada", 1.0)
        assert log.append([Event(log.count + 1, "skip", "ada", 1.0, 0, "a", "audit")])
        assert data[: data.rfind(b"\n") + 1] == (Path(directory) / REVIEW).read_bytes()[: data.rfind(b"\n") + 1]


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (
        http_response,
        server_sent_events,
        json_answer,
        recorded_step,
        journal,
        spec_file,
        client_request,
        review_log,
    )
}
EXAMPLES = {"journal": 8}  # in ``make test``; it runs a whole run for each. Others have more


def corpus(name: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
