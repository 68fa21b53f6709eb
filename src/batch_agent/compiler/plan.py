"""Compiles a BatchSpec to a Plan: what all agents of a run share, and how each input becomes a job.

A plan is pure: it may read a list of inputs, but never an iterator. The caller that reads the inputs passes the first
one to ``check_first`` and turns each into a Job with ``job``.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import BaseModel
from pydantic_core import to_json

from batch_agent.compiler.attachments import (
    PAGES,
    TEXT,
    Look,
    Pictures,
    Read,
    check_column,
    document_in,
    filled,
    has_pictures,
    see,
    with_document,
    with_pictures,
)
from batch_agent.compiler.fields import (
    ALLOWED,
    ID,
    Unfillable,
    field_names,
    fields_of,
    listed,
    own_id,
    text_of,
    value_of,
)
from batch_agent.compiler.schema import OutputSchema
from batch_agent.compiler.system import (
    Constant,
    carries_schema,
    check_same,
    constants_of,
    hoistable,
    reference,
    schema_instruction,
    section,
    strip_preamble,
)
from batch_agent.compiler.template import Piece, TaskTemplate, Template
from batch_agent.compiler.tokens import BYTES_PER_TOKEN, estimate_tokens
from batch_agent.documents.content import DocumentContent
from batch_agent.errors import InputError, JobError, Oversized, SpecError, meant
from batch_agent.job import Job, UnreadableRow
from batch_agent.messages import Attachment, Conversation, Document, Image, Message, ToolSpec
from batch_agent.spec import BatchSpec

NO_PICTURES: Pictures = {}


def _unread(document: Document) -> DocumentContent:
    raise InputError(f"{document.url} is not read here")


@dataclass(frozen=True, slots=True)
class Description:
    """What a run would send, for display. All token counts are estimates."""

    rows: int | None
    hoisted: tuple[str, ...]
    system: str
    first_prompt: str
    first_pieces: tuple[Piece, ...]  # the same, with filled-in values marked
    prefix_tokens: int  # the same for all rows, tools included
    own_tokens: int  # average tokens that a row adds, over the sample
    late_tokens: int  # text of the task that is the same in all rows, but comes after a field
    unusable: tuple[str, ...]  # why rows of the sample would fail before any request
    warning: str | None  # a likely mistake


@dataclass(slots=True, eq=False)
class Plan:
    """What the agents of a run share, and how an input becomes a job. Created by ``compile_plan``."""

    spec: BatchSpec
    system: str  # the shared system text
    own_system: str  # the same before hoisting
    hoisted: Mapping[str, Constant]  # the fields that moved there
    total: int | None  # number of inputs, if known
    template: TaskTemplate | None  # None until an iterator's first item was seen
    unhoisted: TaskTemplate | None  # None if it is the same
    head: str
    warning: str | None  # a likely mistake, set once the first input was seen
    tool_tokens: int
    sizing: Sizing
    look: Look
    read: Read
    shared: Conversation = field(init=False)  # that every agent starts from
    shared_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.shared = Conversation([Message("system", self.system)] if self.system else [])
        self.shared_tokens = estimate_tokens(self.system) + self.tool_tokens

    def check_first(self, first: object) -> None:
        """Decide with the first readable input which braces are fields. Raises SpecError if one is missing."""
        if self.template is None and not isinstance(first, UnreadableRow):
            self.template = _parse(self.spec, first)
            self.head = self.template.head
            self.warning = _unused(self.template, _own(self.spec, first), self.total, self.spec.id_column)

    def fit(self, context: int) -> None:
        """Set the model's context when it becomes known after the plan was made. Rows that do not fit are then cut as
        the spec says."""
        self.sizing = replace(self.sizing, context=context)

    @property
    def prefix_tokens(self) -> int:
        """Return the estimated number of tokens that all first requests share: system prompt, tools, and the task up to
        its first field."""
        return self.shared_tokens + estimate_tokens(self.head)

    def shows(self, value: object) -> bool:
        """Return whether an input has pictures. Creating its job may then read files."""
        if type(value) is dict and has_pictures(value):
            return True
        return bool(self.spec.images) or isinstance(value, Image) or self.reads(value)

    def reads(self, value: object) -> bool:
        """Return whether an input has a document. Reading it takes time."""
        return _has_document(self.spec, value)

    def job(self, index: int, value: object, name: str | None = None) -> Job:
        """Return the job of one input. ``name`` is the row's id from an earlier stage, or its own id after it was made
        unique. Raises InputError or Oversized, which concern only this input. Also raises InputError if a field is
        missing that ``check_first`` would have reported."""
        if isinstance(value, UnreadableRow):
            raise InputError(value.message)
        template = self.template
        if template is None:
            template = self._template_of(value)
        value, fields, images = self._seen(value)
        check_same(self.hoisted, fields)
        prompt = with_pictures(template.render(fields), images)
        own = own_id(fields, self.spec.id_column)
        if name is None or (own is not None and self.spec.id_column is not None and not name.startswith(f"{own}~")):
            name = own
        job = Job(index, str(index) if name is None else name, value, prompt, own, images=images)
        if self.spec.affinity is not None:
            job = replace(job, affinity=_affinity(self.spec.affinity, fields))
        tokens = self._tokens(prompt)
        if images:
            tokens += sum(image.tokens for image in images.values())
        if self.sizing.fits(tokens):
            return job
        if self.sizing.how == "fail" or not isinstance(template, Template):
            self.sizing.check(tokens)
            return job
        cut = self.sizing.cut(template.names, _texts(template, fields), tokens)
        if self.sizing.how == "truncate":
            return replace(job, prompt=_fill(template, cut[0]), shortened=True)
        parts = [
            Job(
                index,
                f"{job.job_id}#{number}",
                part["input"] if isinstance(value, str) else {**fields_of(value), **_without(part, images)},
                _fill(template, part),
                affinity=job.affinity,
                images=images,
            )
            for number, part in enumerate(cut, start=1)
        ]
        return replace(job, parts=tuple(parts))

    def _template_of(self, value: object) -> TaskTemplate:
        """Return the template. If it was not parsed yet, it is parsed with this row, which another stage made. Raises
        InputError."""
        try:
            self.check_first(value)
        except SpecError as error:
            raise Unfillable(str(error).replace("the first input", "this row")) from None
        assert self.template is not None
        return self.template

    def _seen(self, value: object) -> tuple[object, Mapping[str, object], Pictures]:
        """Return three values: the input, with the text of its document if it has one; its fields, with a mark in place
        of each attachment; and the attachments by mark."""
        fields = fields_of(value)
        attached: Mapping[str, Attachment] = NO_PICTURES
        if self.spec.document_column is not None:
            fields = with_document(fields, self.spec.document_column)
        if (document := document_in(fields)) is not None:
            fields, attached = filled(fields, self.read(document))
            value = {**fields, TEXT: document} if attached else fields
        if not self.spec.images and not has_pictures(fields):  # the usual case
            return value, fields, attached
        fields, pictures = see(fields, self.spec.images, self.look)
        return value, fields, {**attached, **pictures}

    def merging(self, job: Job, answers: Sequence[str]) -> list[Job]:
        """Return the jobs that merge the answers to the parts of a job: one job with all answers; or, if these do not
        fit, several jobs, whose answers are merged in turn."""
        template = self.template
        assert isinstance(template, Template)
        texts = _texts(template, self._seen(job.input)[1])
        cut = longest(template.names, texts)
        task = _fill(template, {**texts, cut: f"[{cut}: read in parts]"})
        room = self.sizing.room - self._tokens(merge_prompt(task, ()))
        return [
            Job(job.index, f"{job.job_id}#merge", job.input, merge_prompt(task, group))
            for group in groups(answers, room)
        ]

    def tokens_of(self, job: Job) -> int:
        """Return the estimated tokens of the first request of a job."""
        return self._tokens(str(job.prompt))

    def _tokens(self, prompt: str) -> int:
        return self.shared_tokens + estimate_tokens(prompt)

    def question(self, job: Job) -> str:
        """Return the job's prompt as it reads without hoisting, so that it can be compared with prompts of other
        runs."""
        if self.spec.worker is not None:
            return _whole_row(job.input, job.images, self._named_by(job.own_id))
        return job.prompt if self.unhoisted is None else self.asks(job.input)[1]

    def asks(self, value: object) -> tuple[str | None, str]:
        """Return an input's own id (or None) and its question, to compare it with recorded rows. Raises InputError."""
        template = self.unhoisted or self.template
        if isinstance(value, UnreadableRow) or template is None:
            raise InputError("this input asks nothing")
        value, fields, images = self._seen(value)
        sent, name = self.template, own_id(fields, self.spec.id_column)
        # Text that was cut off is not part of the question.
        if self.sizing.how == "truncate" and isinstance(sent, Template):
            own = _texts(sent, fields)
            tokens = self._tokens(_fill(sent, own))
            if not self.sizing.fits(tokens):
                fields = {**fields, **self.sizing.cut(sent.names, own, tokens)[0]}
        if self.spec.worker is not None:
            return name, _whole_row(value, images, self._named_by(name))
        return name, with_pictures(template.render(fields), images)

    def _named_by(self, own: str | None) -> str | None:
        """Return the name of the field that has the row's id; None if the row has no id."""
        return None if own is None else self.spec.id_column or ID

    def describe(self, sample: Sequence[object]) -> Description:
        """Return the plan for display, with the prompts of the first inputs, which are given in ``sample``."""
        prompts: list[str] = []
        pieces: Sequence[Piece] = ()
        unusable: list[str] = []
        for index, value in enumerate(sample):
            self.check_first(value)
            try:
                prompts.append(self.job(index, value).prompt)
                if len(prompts) == 1 and self.template is not None:
                    pieces = self.template.pieces(self._seen(value)[1])
            except JobError as error:
                unusable.append(f"input {index}: {error.type}: {error}")
        own = sum(max(0, estimate_tokens(prompt) - estimate_tokens(self.head)) for prompt in prompts)
        first = next((place for place, (_, is_filled) in enumerate(pieces) if is_filled), len(pieces))
        return Description(
            rows=self.total,
            hoisted=tuple(self.hoisted),
            system=self.system,
            first_prompt=prompts[0] if prompts else "",
            first_pieces=tuple(pieces),
            prefix_tokens=self.prefix_tokens,
            own_tokens=-(-own // max(1, len(prompts))),
            late_tokens=sum(estimate_tokens(text) for text, is_filled in pieces[first:] if not is_filled),
            unusable=tuple(unusable),
            warning=self.warning,
        )


def compile_plan(
    spec: BatchSpec,
    *,
    schema: OutputSchema[object] | None,
    inject_schema: bool,
    tools: Sequence[ToolSpec] = (),
    look: Look = lambda image: image,
    read: Read = _unread,
    examples: str = "",
) -> Plan:
    """Compile the spec. ``inject_schema``: the schema is written into the prompt. ``look`` reads pictures, ``read``
    reads documents. ``examples`` are added at the end of the system prompt."""
    inputs = _checked_inputs(spec.inputs)
    system = _join(_system_text(spec, schema if inject_schema else None), examples)
    for name, text in (("system_prompt", spec.system_prompt), ("task", spec.task)):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise SpecError(f"{name} has text that is not valid Unicode: {error}") from None
    if spec.oversized != "fail" and spec.template != "braces":
        raise SpecError(
            f"oversized={spec.oversized!r} needs a task with braces: what Jinja makes of a field cannot be cut"
        )
    sizing = Sizing(
        spec.oversized, spec.model_max_context, spec.min_response_tokens, spec.max_tokens, tools=bool(tools)
    )

    template: TaskTemplate | None = None
    unhoisted = None
    head = ""
    warning = None
    moved: dict[str, Constant] = {}
    if isinstance(inputs, list | tuple) and (
        readable := [value for value in inputs if not isinstance(value, UnreadableRow)]
    ):
        template = _parse(spec, readable[0])
        warning = _unused(template, _own(spec, readable[0]), len(inputs), spec.id_column)
        head = template.head
        if isinstance(template, Template):  # only our own templates can replace a value by a reference
            varies = {*spec.images, *((TEXT, PAGES) if _has_document(spec, readable[0]) else ())}
            constants = constants_of(readable, [name for name in template.names if name not in varies])
            if not spec.no_hoist and spec.worker is None:  # a worker sees its whole prompt
                moved = {name: constants[name] for name in hoistable(template, constants)}
                if sizing.how != "fail":  # a field that may be cut stays in its row
                    moved = {
                        name: moved[name] for name in moved if estimate_tokens(moved[name].text) < sizing.room // 2
                    }
                unhoisted = template if moved else None
                template = template.bind({name: reference(name) for name in moved})
            head = template.bind({name: constant.text for name, constant in constants.items()}).head

    return Plan(
        spec=spec,
        system=_join(system, *(section(name, constant.text) for name, constant in moved.items())),
        own_system=system,
        hoisted=moved,
        total=len(inputs) if isinstance(inputs, Sized) else None,
        template=template,
        unhoisted=unhoisted,
        head=head,
        warning=warning,
        tool_tokens=sum(map(tool_tokens, tools)),
        sizing=sizing,
        look=look,
        read=read,
    )


def _checked_inputs(inputs: object) -> Iterable[object] | AsyncIterable[object]:
    if isinstance(inputs, str | bytes | bytearray | Mapping | BaseModel):
        raise SpecError(
            f"inputs is one {type(inputs).__name__}, not rows: give a list or iterator of them, each {ALLOWED}"
        )
    if not isinstance(inputs, Iterable | AsyncIterable):
        raise SpecError(f"inputs must be a list, iterator or async iterator, not {type(inputs).__name__}")
    return inputs


def _whole_row(value: object, images: Iterable[str], named_by: str | None) -> str:
    """Return all fields of a row as one text, which identifies the row: a worker may read any field. The id, in the
    field ``named_by``, is left out because it is a separate part of the row's key."""
    if named_by is not None and type(value) is dict:
        value = {name: field for name, field in value.items() if name != named_by}
    return "\n".join([to_json(value, fallback=str, inf_nan_mode="constants").decode(), *sorted(images)])


def _affinity(name: str, fields: Mapping[str, object]) -> str:
    """Return the row's affinity key; "" without the field."""
    try:
        return text_of(name, value_of(fields, name))
    except Unfillable:
        return ""


def _without(texts: Mapping[str, str], images: Pictures) -> dict[str, str]:
    """Return the texts of the fields without the marks that stand for pictures."""
    return {name: text for name, text in texts.items() if not any(mark in text for mark in images)}


def _texts(template: Template, fields: Mapping[str, object]) -> dict[str, str]:
    return {name: text_of(name, value_of(fields, name)) for name in template.names}


def _fill(template: Template, texts: Mapping[str, str]) -> str:
    return template.fill([texts[name] for name in template.names])


def _parse(spec: BatchSpec, first: object) -> TaskTemplate:
    """Parse the task with the first input. If that input is unreadable, the task is parsed without it; the input fails
    later as a row."""
    try:
        names = field_names(first)
    except InputError as error:
        raise SpecError(f"the first input cannot be used: {error}") from None
    if spec.document_column is not None:
        check_column(spec.document_column, names)
        names = tuple(dict.fromkeys((*names, TEXT, PAGES)))
    if missing := [name for name in spec.images if name not in names]:
        raise SpecError(f"images: the first input has no field {missing[0]!r} {_its(names, missing[0])}")
    if spec.id_column is not None and spec.id_column not in names:
        raise SpecError(f"id_column: the first input has no field {spec.id_column!r} {_its(names, spec.id_column)}")
    template = _jinja(spec.task) if spec.template == "jinja" else Template.parse(spec.task, names)
    try:
        fields = fields_of(first)
        template.render({**fields, TEXT: "", PAGES: 1} if _has_document(spec, first) else fields)
    except Unfillable as error:
        raise SpecError(f"the task cannot be filled from the first input: {error}") from None
    except InputError:
        pass
    if spec.affinity is not None and spec.affinity.partition(".")[0].partition("[")[0] not in names:
        raise SpecError(f"affinity: the first input has no field {spec.affinity!r} {_its(names, spec.affinity)}")
    return template


def _its(names: tuple[str, ...], wanted: str) -> str:
    return f"(its fields: {listed(names)}){meant(wanted, names)}"


def _has_document(spec: BatchSpec, row: object) -> bool:
    return spec.document_column is not None or (type(row) is dict and document_in(row) is not None)


def _own(spec: BatchSpec, first: object) -> Collection[str]:
    """Return the fields that the task should name. Attachments are not among them: they are sent in any case."""
    if spec.documents != "text" and _has_document(spec, first):
        return ()
    return [name for name in field_names(first) if name not in spec.images]


def _jinja(task: str) -> TaskTemplate:
    try:
        from batch_agent.compiler.jinja import JinjaTemplate
    except ModuleNotFoundError as error:
        if error.name != "jinja2":
            raise
        raise SpecError("template='jinja' needs the package jinja2; install it with: pip install jinja2") from None
    return JinjaTemplate(task)


def _unused(template: TaskTemplate, fields: Collection[str], total: int | None, id_column: str | None) -> str | None:
    """Return a warning if the task uses no field, or only the id: all rows would ask the same question. None
    otherwise."""
    own = [name for name in fields if name != (id_column or ID)]
    if template.names or not own or total == 1:
        return None
    return f"the task uses no field of its rows ({listed(own)}): every agent is sent the same message"


def _system_text(spec: BatchSpec, schema: OutputSchema[object] | None) -> str:
    system = strip_preamble(spec.system_prompt) if spec.strip_preamble else spec.system_prompt
    if schema is None or any(carries_schema(text, schema.json_schema) for text in (system, spec.task)):
        return system
    return _join(system, schema_instruction(schema.json_text))


def _join(*parts: str) -> str:
    return "\n\n".join(filter(None, parts))


def tool_tokens(tool: ToolSpec) -> int:
    return estimate_tokens(tool_text(tool))


def tool_text(tool: ToolSpec) -> str:
    """Return a text that is about as long as the description of the tool in a prompt."""
    return tool.name + tool.description + to_json(tool.parameters).decode()


How = Literal["fail", "chunk", "truncate"]

# Tokens are estimates, and texts differ: a piece sized to fill the context would often be refused. With tools, the
# conversation also grows.
CAREFUL = 0.75
CAREFUL_WITH_TOOLS = 0.5
LEAST_TOKENS = 64  # a shorter piece is useless
MARK_TOKENS = 32  # the text around a piece

OVERLAP = 0.04  # of a piece
# The kinds of border, best first, and how far before the end of a piece each is acceptable. All are ASCII, so that
# bytes can be searched for them.
BORDERS = (
    (re.compile(rb"[\n\f](?=#{1,6}[ \t])|\f"), 0.3),
    (re.compile(rb"\n[ \t\r]*\n"), 0.25),
    (re.compile(rb"\n"), 0.2),
    (re.compile(rb"[ \t]"), 0.1),
)

AROUND_TOKENS = 8  # the text around one answer
INSTRUCTION = """\
A task was given with a text that is too long to be read at once, so the text was read in parts, which overlap a \
little, and the task was done for each part.

The task:
{task}

The answers, in the order of the parts:
{answers}

Give the one answer to the task that holds for the whole text. Keep what the answers found, in its order; say once \
what several say; where they contradict each other, the one that read the passage in question is right. Add nothing."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """What fits the model's ``context``, and what is done with a row that does not. ``least`` tokens are reserved for
    the answer, ``max_tokens`` is its limit, if set. If the context is unknown, nothing is too long.

    The longest field of such a row is shortened, because it is nearly always the text that the task is about. It is cut
    to its head, or into pieces, each of which becomes a request of its own. Each of them is marked as incomplete.
    """

    how: How
    context: int | None
    least: int
    max_tokens: int | None = None
    tools: bool = False

    @property
    def room(self) -> int:
        """The token limit of a request that was made to fit, with the part that all rows share."""
        context = self.context or 0
        answer = max(self.least, min(self.max_tokens or 0, context // 2))
        return int((context - answer) * (CAREFUL_WITH_TOOLS if self.tools else CAREFUL))

    def fits(self, tokens: int) -> bool:
        return self.context is None or tokens <= self.context - self.least

    def check(self, tokens: int, hint: str = "") -> None:
        """Raise Oversized for a request that does not fit."""
        if self.context is not None and not self.fits(tokens):
            raise Oversized(
                f"about {tokens:,} tokens of system prompt, tools and message (estimated) do not fit: "
                f"model_max_context {self.context:,} less min_response_tokens {self.least:,} leaves "
                f"{self.context - self.least:,}{hint}"
            )

    def cut(self, names: Sequence[str], texts: Mapping[str, str], tokens: int) -> list[dict[str, str]]:
        """Return the fields of each request that replaces one request of ``tokens`` tokens. ``names`` are the names of
        the fields, each as often as it occurs in the task. Raises Oversized if cutting the longest field is not
        enough."""
        if not names:
            self.check(tokens)
        name = longest(names, texts)
        text, times = texts[name], names.count(name)
        others = tokens - estimate_tokens(text) * times
        most = (self.room - others) // times - MARK_TOKENS
        if most < LEAST_TOKENS:
            self.check(tokens, f"; cutting {name!r} is not enough, about {others:,} are without it")
        if self.how == "truncate":
            kept = head(text, most)
            left = estimate_tokens(text[len(kept) :])
            return [{**texts, name: f"{kept.rstrip()}\n[Cut here to fit: about {left:,} tokens more are left out.]"}]
        pieces = split(text, most)
        marks = (f"[Part {number} of {len(pieces)}]" for number in range(1, len(pieces) + 1))
        return [{**texts, name: f"{mark}\n{piece}"} for mark, piece in zip(marks, pieces, strict=True)]


def longest(names: Sequence[str], texts: Mapping[str, str]) -> str:
    """Return the name of the field that takes the most tokens in the task."""
    return max(texts, key=lambda name: estimate_tokens(texts[name]) * names.count(name))


# The best border near the end of a piece is a heading, then a blank line, the end of a line, a space; a text without
# any is cut between two characters. Each piece except the first starts with the end of the previous one, so that a
# passage across a border is complete in one of them. The pieces have about the same length, because a batch waits for
# its longest piece.
def split(text: str, most_tokens: int) -> list[str]:
    """Return pieces of at most ``most_tokens`` estimated tokens each; a short text is one piece."""
    most = most_tokens * BYTES_PER_TOKEN
    if most < 8:
        raise ValueError("a piece has at least a few tokens")
    data = text.encode()
    return [data[start:end].decode() for start, end in _pieces(data, most)]


def head(text: str, most_tokens: int) -> str:
    """Return the first piece, which ends at a border."""
    data = text.encode()
    most = max(0, most_tokens) * BYTES_PER_TOKEN
    return text if len(data) <= most else data[: _border(data, 0, most)].decode()


def _pieces(data: bytes, most: int) -> Iterator[tuple[int, int]]:
    overlap = int(most * OVERLAP)
    start = end = 0
    while True:
        left = len(data) - start
        if left <= most:
            yield start, len(data)
            return
        # Divide the rest evenly, with room for better borders further on.
        count = -(-(left - overlap) // (most - overlap))
        even = (left - overlap) // count + overlap
        end = _border(data, start, min(most, even + int(most * OVERLAP)))
        yield start, end
        start = _overlapping(data, start, end, overlap)


def _border(data: bytes, start: int, most: int) -> int:
    """Return the end of the piece that begins at ``start``: after the last of the best borders near its end."""
    limit = start + most
    for pattern, reach in BORDERS:
        ends = [found.end() for found in pattern.finditer(data, limit - int(most * reach), limit)]
        if ends:
            return ends[-1]
    return _between_characters(data, limit)


def _overlapping(data: bytes, start: int, end: int, overlap: int) -> int:
    """Return the start of the next piece: the first line or word that begins within the last ``overlap`` bytes of this
    piece."""
    earliest = _between_characters(data, max(start + 1, end - overlap))
    for border in (b"\n", b" "):
        found = data.find(border, earliest, end)
        if found >= 0:
            return found + 1
    return earliest if earliest > start else end


def _between_characters(data: bytes, at: int) -> int:
    while at < len(data) and data[at] & 0xC0 == 0x80:  # the middle of a character
        at -= 1
    return at


def merge_prompt(task: str, answers: Sequence[str]) -> str:
    numbered = (f"<answer part={number}>\n{answer}\n</answer>" for number, answer in enumerate(answers, start=1))
    return INSTRUCTION.format(task=task, answers="\n".join(numbered))


def groups(answers: Sequence[str], room: int) -> list[Sequence[str]]:
    """Divide the answers into groups of at most ``room`` tokens each, and return the groups."""
    grouped: list[list[str]] = []
    used = 0
    for answer in answers:
        tokens = estimate_tokens(answer) + AROUND_TOKENS
        if not grouped or (used + tokens > room and len(grouped[-1]) > 1):
            grouped.append([])
            used = 0
        grouped[-1].append(answer)
        used += tokens
    if len(grouped) > 1 and len(grouped[-1]) == 1:
        grouped[-2] += grouped.pop()
    return [*grouped]
