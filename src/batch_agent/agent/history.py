"""The conversation of one agent with its model: all of it, and the part that the model still reads.

Both are one conversation until it is cut. From then on the part to send is a separate conversation that grows with the
other. So messages that were sent never change, except at the cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from batch_agent.compiler.compaction import Cut, history_tokens
from batch_agent.messages import Content, Conversation, Message, Reply


class History:
    """``said`` has all messages, for the transcript; ``asked`` has those of the next request."""

    __slots__ = ("_answered", "_measured", "_measured_at", "_shared", "asked", "cut", "said")

    def __init__(self, shared: Conversation, task: Content) -> None:
        self.said = self.asked = Conversation((Message("user", task),), parent=shared)
        self.cut = Cut()
        self._shared = shared
        self._measured: int | None = None  # the server's count for ``_measured_at`` messages of ``asked``
        self._measured_at = 0
        self._answered = False  # since the latest cut

    def append(self, message: Message) -> None:
        self.said.append(message)
        if self.asked is not self.said:
            self.asked.append(message)

    def answered(self, reply: Reply) -> None:
        self.append(reply.message())
        self._answered = True
        usage = reply.usage if reply.saved is None else reply.saved
        if usage.prompt_tokens:  # else the earlier count plus an estimate of later messages is more exact
            # Reasoning is not sent back.
            self._measured = usage.prompt_tokens + usage.completion_tokens - usage.reasoning_tokens
            self._measured_at = len(self.asked.messages)

    def foreseen(self) -> int | None:
        """Return the server's count of tokens, plus an estimate of later messages; None without a count."""
        if self._measured is None:
            return None
        return self._measured + history_tokens(self.asked.messages[self._measured_at :])

    def estimated(self) -> int | None:
        """Return the estimated tokens of the next prompt without the shared part. None before an answer."""
        return history_tokens(self.own_asked) if self._answered else None

    @property
    def own(self) -> Sequence[Message]:
        """The messages that are not shared with all agents."""
        return self.said.messages[len(self._shared.messages) :]

    @property
    def own_asked(self) -> Sequence[Message]:
        return self.asked.messages[len(self._shared.messages) :]

    def compact(self, cut: Cut) -> None:
        self.cut = cut
        self.asked = Conversation(cut.apply(self.own), parent=self._shared)
        self._measured, self._answered = None, False
