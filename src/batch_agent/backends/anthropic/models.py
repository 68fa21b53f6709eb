"""Facts about Anthropic's models, by name: default answer length, shortest cached prefix, refusal of sampling options.

An unknown model is used too; its server decides.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelRules:
    max_tokens: int  # default length of an answer: the API requires a number
    cached_from: int = 1024  # tokens; a shorter prefix is not cached, even if marked
    samples: bool = True  # accepts temperature and top_p
    samples_once: bool = True  # ... but not both together
    foreign: bool = False  # not by Anthropic: another server with the same wire and its own rules


# The first match counts. The default answer length is 16,000 tokens, which arrive without streaming in reasonable time,
# or the maximum of an older model. Models that think by default count thinking as part of the answer and get double.
_KNOWN = [
    (re.compile(pattern), model)
    for pattern, model in (
        (r"claude-3-5-haiku", ModelRules(8_192, 2048, samples_once=False)),
        (r"claude-3-haiku", ModelRules(4_096, 2048, samples_once=False)),
        (r"claude-3-5", ModelRules(8_192, samples_once=False)),
        (r"claude-3-7", ModelRules(16_000, samples_once=False)),
        (r"claude-3-", ModelRules(4_096, samples_once=False)),
        (r"claude-(haiku-4-5|opus-4-[56])", ModelRules(16_000, 4096)),
        (r"claude-opus-4-7", ModelRules(16_000, 4096, samples=False)),
        (r"claude-opus-4-8", ModelRules(16_000, samples=False)),
        (r"claude-\w+-4", ModelRules(16_000)),
        (r"claude-(opus|sonnet|haiku|fable|mythos)-", ModelRules(32_000, samples=False)),
    )
]
_NEW = ModelRules(16_000)  # an Anthropic model newer than this table
_FOREIGN = ModelRules(4_096, samples_once=False, foreign=True)


def model_of(name: str) -> ModelRules:
    known = (model for pattern, model in _KNOWN if pattern.search(name))
    return next(known, _NEW if "claude" in name else _FOREIGN)
