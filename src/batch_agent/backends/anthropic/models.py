"""What is known of Anthropic's models before they are asked, by their names: how long an answer may be where the user
does not say, from how many tokens on a prefix is kept in the cache, and which of them refuse sampling parameters.

A model that is not known here is asked all the same; its server has the last word.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Model:
    max_tokens: int  # of an answer: the API wants a number
    cached_from: int = 1024  # tokens; a shorter prefix is not kept, marked or not
    samples: bool = True  # takes temperature and top_p
    samples_once: bool = True  # ... but not both
    foreign: bool = False  # not Anthropic's: another server behind the same wire, with rules of its own


# The first that fits. An answer may have 16,000 tokens, about what comes in one piece without a stream in good time, or
# all that an older model can say; models that think unasked count their thoughts as part of the answer and get double.
_KNOWN = [
    (re.compile(pattern), model)
    for pattern, model in (
        (r"claude-3-5-haiku", Model(8_192, 2048, samples_once=False)),
        (r"claude-3-haiku", Model(4_096, 2048, samples_once=False)),
        (r"claude-3-5", Model(8_192, samples_once=False)),
        (r"claude-3-7", Model(16_000, samples_once=False)),
        (r"claude-3-", Model(4_096, samples_once=False)),
        (r"claude-(haiku-4-5|opus-4-[56])", Model(16_000, 4096)),
        (r"claude-opus-4-7", Model(16_000, 4096, samples=False)),
        (r"claude-opus-4-8", Model(16_000, samples=False)),
        (r"claude-\w+-4", Model(16_000)),
        (r"claude-(opus|sonnet|haiku|fable|mythos)-", Model(32_000, samples=False)),
    )
]
_NEW = Model(16_000)  # of Anthropic's, and newer than this table
_FOREIGN = Model(4_096, samples_once=False, foreign=True)


def model_of(name: str) -> Model:
    known = (model for pattern, model in _KNOWN if pattern.search(name))
    return next(known, _NEW if "claude" in name else _FOREIGN)
