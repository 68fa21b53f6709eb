"""The interface for a user's worker: ``AgentContext``, and ``BlockingContext`` for a worker that runs in a thread.

Both are thin. ``Dialogue`` is a conversation, in which the tool loop can work too; ``Agent`` calls tools and records;
``user_worker`` knows the run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, TypeVar, Unpack

from pydantic import JsonValue

from batch_agent.agent.agent import Agent, CallOutcome, tool_loop
from batch_agent.agent.dialogue import CUT, Dialogue
from batch_agent.compiler.schema import OutputSchema
from batch_agent.compiler.system import schema_instruction
from batch_agent.errors import BadArguments, InputError, OutcomeUnknown, OutputError, RowEnded, ToolFailed, UnknownTool
from batch_agent.messages import Conversation, Message, ToolCall, Usage

T = TypeVar("T")
Prompt: TypeAlias = str | Sequence[Message | Mapping[str, object]]
MAX_TURNS = 10  # of a loop with tools


class AskOptions(TypedDict, total=False):
    """Options of one request. The defaults are those of the run; ``tool_choice`` is left to the server."""

    model: str | None
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    tool_choice: JsonValue
    extra_body: Mapping[str, JsonValue] | None


@dataclass(frozen=True, slots=True)
class AgentReply:
    """An answer. ``output`` is a value of the requested ``output_schema``, or the text without a schema; None if the
    answer calls tools. ``message`` is the answer as a message, to continue the conversation. ``truncated``: the text
    was cut at max_tokens."""

    text: str
    tool_calls: tuple[ToolCall, ...]
    output: Any
    usage: Usage
    message: Message
    truncated: bool = False


class WorkerContext:
    """The part of a worker's context that does not wait for anything."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of row {self.index}>"

    @property
    def row(self) -> object:
        """The input."""
        return self._agent.job.input

    @property
    def index(self) -> int:
        """Index of the row among the inputs, from 0."""
        return self._agent.job.index

    @property
    def job_id(self) -> str:
        """The row's ``id``, or its index as text."""
        return self._agent.job.job_id

    @property
    def prompt(self) -> str:
        """The task, filled from the row; "" without a task."""
        return self._agent.job.prompt

    @property
    def model(self) -> str:
        """The default model of ``ask``."""
        return self._agent.user.model

    @property
    def messages(self) -> tuple[Message, ...]:
        """The row's own conversation so far: the system prompt, the task, and the requests that gave no messages of
        their own."""
        return tuple(self._agent.conversation.messages)

    @property
    def workdir(self) -> Path:
        """A directory for this row alone. It is empty when the worker begins, also after a resume. In a run directory
        it is kept, else it is removed when the row ends."""
        self._agent.check_open()
        return self._agent.place.directory

    @property
    def base_url(self) -> str:
        """The address where programs send requests for this row, in the formats of OpenAI and Anthropic."""
        self._agent.check_open()
        return f"{self._agent.user.gateway.url}/v1"

    @property
    def api_key(self) -> str:
        """The API key of this row at ``base_url``. It is valid until the row ends."""
        self._agent.check_open()
        return self._agent.key

    @property
    def env(self) -> dict[str, str]:
        """``base_url`` and ``api_key`` as environment variables, with the names that clients read."""
        return self._agent.user.gateway.env(self.api_key)

    def save(self, name: str, content: str | bytes | Path) -> Path:
        """Save text, bytes or a copy of a file. ``result.artifacts[name]`` is its path."""
        self._agent.check_open()
        return self._agent.place.save(name, content)

    def add_usage(self, usage: Usage) -> None:
        """Add tokens to the result that this row used outside the run, at another server."""
        self._agent.check_open()
        self._agent.tally.pay(usage, None)

    def say(self, text: str) -> None:
        """Add a user message to the row's own conversation."""
        self._agent.check_open()
        self._agent.conversation.append(Message("user", text))


class AgentContext(WorkerContext):
    """One row while a worker processes it. It ends with the row: later requests and calls are refused."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self._busy = False  # a request of the row's own conversation is in flight

    async def ask(
        self,
        prompt: Prompt | None = None,
        *,
        tools: Sequence[object] = (),
        output_schema: Any = None,
        **options: Unpack[AskOptions],
    ) -> AgentReply:
        """Return the model's answer to a prompt or to messages. Without either, it answers the row's own conversation
        and becomes part of it.

        Many requests may be in flight at once, but only one of the row's own conversation. ``tools`` are the tools that
        the model may call: names of the run's, functions or Tools. With ``output_schema``, the model gets an invalid
        answer back with its errors, up to ``max_retries`` times; then OutputError is raised. A failed request raises
        BackendError. Both may be caught. A text that was cut at max_tokens is marked as ``truncated``; if the run has
        ``truncated="fail"``, it raises Truncated. The system prompt of the run is added before messages that have none.
        """
        dialogue = self._dialogue(prompt, tools, output_schema, options)
        if prompt is None:
            if self._busy:
                raise InputError("the row's own conversation has a request in flight: give ask a prompt or messages")
            self._busy = True
        try:
            return await self._agent.owned(_ask(dialogue))
        finally:
            self._busy = self._busy and prompt is not None

    async def loop(
        self,
        prompt: Prompt | None = None,
        *,
        tools: Sequence[object] | None = None,
        output_schema: Any = None,
        max_turns: int | None = None,
        **options: Unpack[AskOptions],
    ) -> Any:
        """Return the output of the built-in tool loop: request an answer, run the tools that it calls, and repeat until
        there is an answer without calls. The output is a value of ``output_schema``, or text. Without ``tools``, all
        tools of the run are used; tools that the run does not have are functions or Tools. After ``max_turns`` answers
        (10 with tools, 1 without) LimitExceeded is raised. A conversation that outgrows the model's context is cut as
        the run's ``compaction`` says."""
        offered = self._agent.user.tool_names if tools is None else tools
        turns = max_turns if max_turns is not None else MAX_TURNS if offered else 1
        dialogue = self._dialogue(prompt, offered, output_schema, options, max_turns=turns)
        return await self._agent.owned(tool_loop(self.row, dialogue))

    async def call(self, tool: str | ToolCall, /, **arguments: object) -> str:
        """Return the result of a tool of the run.

        With a name and arguments, a failure raises ToolError. With a call from a model (``reply.tool_calls``), a
        failure is returned as the text for the model, and the result of a call from the row's own conversation is added
        there.
        """
        if isinstance(tool, ToolCall):
            outcome = await self._call(tool)
            self._answer_call(tool, outcome)
            return outcome.text
        try:
            written = json.dumps(arguments, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise BadArguments(f"the arguments of {tool} are not JSON: {error}") from None
        outcome = await self._call(ToolCall("", tool, written))
        if outcome.ok:
            return outcome.text
        message = outcome.text.removeprefix("Error: ")
        if outcome.unknown:
            raise OutcomeUnknown(message)
        raise (ToolFailed if self._agent.r.tools.knows(tool) else UnknownTool)(message)

    async def _call(self, call: ToolCall) -> CallOutcome:
        known: dict[int, CallOutcome] = {}
        await self._agent.owned(self._agent.make_calls((call,), known))
        return known[0]

    def _answer_call(self, call: ToolCall, outcome: CallOutcome) -> None:
        """Add the result to the row's own conversation, if the call is part of that."""
        own = self._agent.conversation
        asked = next((message for message in reversed(own.messages) if message.tool_calls), None)
        if asked is not None and call in asked.tool_calls:
            own.append(outcome.message(call))

    def _dialogue(
        self,
        prompt: Prompt | None,
        tools: Sequence[object],
        output_schema: object,
        options: AskOptions,
        max_turns: int | None = None,
    ) -> Dialogue:
        """Return a conversation with these options. Without a prompt it is the conversation of the row. With a prompt
        it is a new one, which begins with the shared messages unless the prompt has a system message."""
        agent = self._agent
        agent.check_open()
        asking = agent.user.asking(tools, output_schema, options, agent.r.tools)
        if prompt is not None:
            own = said = Conversation(_messages(prompt))
            if not any(message.role == "system" for message in own.messages):
                said = Conversation(own.messages, parent=agent.r.shared)
        else:
            own = said = agent.conversation
            if len(own.messages) == len(agent.r.shared.messages):
                raise InputError("there is nothing to send: the run has no task, so call ask with a prompt or messages")
        if asking.shapes.schema_in_prompt and asking.schema is not None:
            said = _with_schema(said, asking.schema)
        mirror = own if prompt is None and said is not own else None
        return Dialogue(
            agent,
            said,
            asking.shapes,
            asking.schema,
            max_turns=max_turns,
            compacts=max_turns is not None,
            mirror=mirror,
        )


def agent_of(context: WorkerContext) -> Agent:
    """Return the agent of a row, for workers of this package that send requests of clients unchanged."""
    return context._agent


async def _ask(dialogue: Dialogue) -> AgentReply:
    shape, usage = dialogue.shapes.first, Usage()
    while True:
        reply = await dialogue.ask(shape)
        usage += reply.usage
        output = None
        if not reply.tool_calls:
            try:
                output = dialogue.read(reply)
            except OutputError as error:
                dialogue.repair(error)
                shape = dialogue.shapes.repair
                continue
        cut = reply.finish_reason == CUT
        return AgentReply(reply.text, reply.tool_calls, output, usage, reply.message(), cut)


def _with_schema(conversation: Conversation, schema: OutputSchema[object]) -> Conversation:
    """Return the conversation with the schema in its system prompt."""
    told = schema_instruction(schema.json_text)
    first, *rest = conversation.messages
    if first.role == "system" and isinstance(first.content, str):
        return Conversation([Message("system", f"{first.content}\n\n{told}"), *rest])
    return Conversation([Message("system", told), *conversation.messages])


def _messages(prompt: Prompt) -> list[Message]:
    if isinstance(prompt, str):
        return [Message("user", prompt)]
    try:
        messages = [item if isinstance(item, Message) else Message.from_dict(item) for item in prompt]
    except (ValueError, AttributeError, TypeError) as error:
        raise InputError(f"messages: invalid: {error}") from None
    if not messages:
        raise InputError("there is nothing to send: the list of messages is empty")
    return messages


class BlockingContext(WorkerContext):
    """The same interface for a worker that is a plain function and runs in a thread: ``ask``, ``call`` and ``loop``
    block and return the result. Threads that it starts may use it too."""

    def __init__(self, agent: Agent, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(agent)
        self._context = AgentContext(agent)
        self._loop = loop

    def ask(
        self,
        prompt: Prompt | None = None,
        *,
        tools: Sequence[object] = (),
        output_schema: Any = None,
        **options: Unpack[AskOptions],
    ) -> AgentReply:
        return self._wait(self._context.ask(prompt, tools=tools, output_schema=output_schema, **options))

    def loop(
        self,
        prompt: Prompt | None = None,
        *,
        tools: Sequence[object] | None = None,
        output_schema: Any = None,
        max_turns: int | None = None,
        **options: Unpack[AskOptions],
    ) -> Any:
        return self._wait(
            self._context.loop(prompt, tools=tools, output_schema=output_schema, max_turns=max_turns, **options)
        )

    def call(self, tool: str | ToolCall, /, **arguments: object) -> str:
        return self._wait(self._context.call(tool, **arguments))

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed: the run has ended
            coroutine.close()
            raise RowEnded("the run of this context has ended") from None
        return future.result()
