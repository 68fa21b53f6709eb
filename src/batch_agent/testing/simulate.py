"""The simulated engine over HTTP: the wire of the scripted server, with the timing and cache of the simulation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from batch_agent.backends.simulated.answers import SimulatedAnswer, chat_answer, text_answer
from batch_agent.backends.simulated.backend import EngineRunner, usage_of
from batch_agent.backends.simulated.core import Sequence
from batch_agent.backends.simulated.model import EngineModel
from batch_agent.backends.simulated.tokens import chat_prompt, encode_message, encode_tools, text_prompt
from batch_agent.messages import JsonObject
from batch_agent.testing.replies import Fail, ScriptedReply
from batch_agent.testing.request import Request
from batch_agent.testing.server import ModelServer, engine_metrics
from batch_agent.testing.tracks import Live
from batch_agent.testing.wire import End, Piece, TextPiece, call_pieces, error_object
from batch_agent.vllm_pin import read_order


async def serve_simulated(
    *, host: str = "127.0.0.1", port: int = 8000, engine: EngineModel, ready: Callable[[str], None]
) -> None:
    """Serve until cancelled; ``ready`` gets the URL once requests can arrive. A port in use raises SpecError."""
    async with SimulatedServer(engine, host=host, port=port) as server:
        ready(server.url)
        await asyncio.get_running_loop().create_future()


class SimulatedServer(ModelServer):
    def __init__(self, engine: EngineModel | None = None, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.model = engine if engine is not None else EngineModel()
        super().__init__(host=host, port=port, models=[self.model.name], fingerprint="simulated")
        self.runner = EngineRunner(self.model)

    async def __aexit__(self, *exception: object) -> None:
        await super().__aexit__(*exception)
        self.runner.close()

    async def respond(self, request: Request) -> ScriptedReply | Live:
        if any(not isinstance(message.content, str) for message in request.conversation()):
            return Fail(400, error_object(400, f"{self.model.name} is not a multimodal model"))
        return Live(lambda: self._generate(request))

    def metrics(self) -> str:
        return engine_metrics(self.runner.engine)

    def model_card(self, name: str) -> JsonObject:
        return {**super().model_card(name), "max_model_len": self.model.context_tokens}

    @contextmanager
    def _generate(self, request: Request) -> Iterator[AsyncIterator[Piece]]:
        work = [*self._work(request)]
        tokens: asyncio.Queue[tuple[Sequence, int]] = asyncio.Queue()
        priority, params = request.body.get("priority"), request.body.get("kv_transfer_params")
        sequences = self.runner.start(
            [(prompt, answer.output) for prompt, answer in work],
            lambda sequence: tokens.put_nowait((sequence, sequence.generated)),
            priority if isinstance(priority, int) else 0,
            read_order(params if isinstance(params, dict) else None),
        )
        try:
            yield _pieces(sequences, [answer for _, answer in work], tokens)
        finally:
            self.runner.stop(sequences)

    def _work(self, request: Request) -> Iterator[tuple[bytes, SimulatedAnswer]]:
        if not request.messages:
            for text in request.prompts:
                prompt = text_prompt(text)
                yield prompt, text_answer(self.model, prompt, max_tokens=request.max_tokens)
            return
        messages = request.conversation()
        prompt = chat_prompt(encode_tools(request.tools), map(encode_message, messages))
        yield prompt, chat_answer(self.model, prompt, messages, request.shape)


async def _pieces(
    sequences: list[Sequence], answers: list[SimulatedAnswer], tokens: asyncio.Queue[tuple[Sequence, int]]
) -> AsyncIterator[Piece]:
    """Yield what the answers' tokens reveal, as they are generated."""
    choices = {sequence: choice for choice, sequence in enumerate(sequences)}
    said = [""] * len(sequences)
    called = [0] * len(sequences)
    unfinished = len(sequences)
    while unfinished:
        sequence, generated = await tokens.get()
        choice = choices[sequence]
        answer = answers[choice]
        text, calls = answer.text_until(generated), answer.calls_until(generated)
        if text != said[choice]:
            yield TextPiece(text[len(said[choice]) :], choice)
        for index in range(called[choice], calls):
            for piece in call_pieces(index, answer.calls[index], choice):
                yield piece
        said[choice], called[choice] = text, calls
        if generated == sequence.output_tokens:
            unfinished -= 1
            yield End(answer.finish_reason, choice)
    yield usage_of(sequences)
