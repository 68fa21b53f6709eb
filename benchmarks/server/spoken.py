"""A logits processor for vLLM: a request says what its prompt tells it to say.

For servers with made-up weights (``--load-format dummy``), whose forward passes cost what a real model's do and whose
words mean nothing. A prompt carries, between two special tokens of its tokenizer, a JSON list of answers, one per turn;
which of them is due is told by the tool results in the prompt, before each of which the chat template writes a third
special token. Only the choice of the next token is forced, so tokens, KV blocks, batching and timing are real.

``PYTHONPATH=benchmarks/server … --logits-processors spoken:Spoken``, with a chat template that writes ``RESULT`` before
tool results. Everything here is vLLM's interface; this package does not use it.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from transformers import AutoTokenizer
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

BEGIN, END, RESULT, STOP = "<jupyter_start>", "<jupyter_text>", "<file_sep>", "<|im_end|>"


class Spoken(LogitsProcessor):
    """``_due`` holds, by place in the batch, what a request has to say and the list of what it has said."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(vllm_config.model_config.tokenizer)
        marks = self._tokenizer.convert_tokens_to_ids([BEGIN, END, RESULT, STOP])
        self._begin, self._end, self._result, self._stop = marks
        self._due: dict[int, tuple[list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for place in batch_update.removed:
            self._due.pop(place, None)
        for place, _, prompt, said in batch_update.added:
            answer = self._answer(prompt or [])
            if answer:
                self._due[place] = (answer, said)
            else:
                self._due.pop(place, None)
        for origin, target, direction in batch_update.moved:
            moved, displaced = self._due.pop(origin, None), self._due.pop(target, None)
            if moved is not None:
                self._due[target] = moved
            if displaced is not None and direction == MoveDirectionality.SWAP:
                self._due[origin] = displaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        forced = {
            place: answer[len(said)] if len(said) < len(answer) else self._stop
            for place, (answer, said) in self._due.items()
            if place < logits.shape[0]
        }
        if forced:
            places = torch.tensor(list(forced), device=logits.device)
            tokens = torch.tensor(list(forced.values()), device=logits.device)
            logits[places] = -torch.inf
            logits[places, tokens] = 0.0
        return logits

    def _answer(self, prompt: list[int]) -> list[int]:
        if self._begin not in prompt or self._end not in prompt:
            return []
        start = prompt.index(self._begin) + 1
        answers = json.loads(self._tokenizer.decode(prompt[start : prompt.index(self._end, start)]))
        turn = min(prompt.count(self._result), len(answers) - 1)
        tokens: list[int] = self._tokenizer.encode(answers[turn], add_special_tokens=False)
        return [*tokens, self._stop]
