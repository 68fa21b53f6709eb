"""What one agent and its model have said to each other: all of it, and what of it the model still reads.

The two are one conversation until it is cut. From then on what is asked is a conversation of its own, which grows with
the other, so that nothing that was sent is ever sent differently but for the cut itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from batch_agent.compiler.compaction import Cut, history_tokens
from batch_agent.messages import Content, Conversation, Message, Reply


class History:
    """``said`` is everything, for the transcript; ``asked`` is what requests are made of."""

    __slots__ = ("_answered", "_measured", "_measured_at", "_shared", "asked", "cut", "said")

    def __init__(self, shared: Conversation, task: Content) -> None:
        self.said = self.asked = Conversation((Message("user", task),), parent=shared)
        self.cut = Cut()
        self._shared = shared
        self._measured: int | None = None  # tokens of ``asked``, its first so many messages, as the server counted them
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
        if (
            usage.prompt_tokens
        ):  # else what was counted before, and an estimate of all that came since, is the best guess
            # What a model said to itself is not sent back.
            self._measured = usage.prompt_tokens + usage.completion_tokens - usage.reasoning_tokens
            self._measured_at = len(self.asked.messages)

    def foreseen(self) -> int | None:
        """Tokens of the next prompt: the server's count, plus an estimate of what came since. None without a count."""
        if self._measured is None:
            return None
        return self._measured + history_tokens(self.asked.messages[self._measured_at :])

    def estimated(self) -> int | None:
        """Estimated tokens of what is not shared in the next prompt. None before an answer."""
        return history_tokens(self.own_asked) if self._answered else None

    @property
    def own(self) -> Sequence[Message]:
        """What is not shared with all agents."""
        return self.said.messages[len(self._shared.messages) :]

    @property
    def own_asked(self) -> Sequence[Message]:
        return self.asked.messages[len(self._shared.messages) :]

    def compact(self, cut: Cut) -> None:
        self.cut = cut
        self.asked = Conversation(cut.apply(self.own), parent=self._shared)
        self._measured, self._answered = None, False
