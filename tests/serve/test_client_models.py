"""Objects of both APIs have every field that the models of the official clients require."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel
from tests.serve.served import CHAT, chat, serving
from tests.serve.test_anthropic_batches import ROUTE, ask
from tests.serve.test_openai_batches import backend


def fits(model: type[BaseModel], document: Any, *extensions: str) -> bool:
    """Whether a document has what a model requires, and no field that it does not know but our own."""
    model.model_validate(document)  # raises
    return document.keys() <= {*model.model_fields, *extensions}


async def test_objects_of_openai(tmp_path: Path, openai: Any) -> None:
    from openai.types import Batch, FileDeleted, FileObject, Model
    from openai.types.chat import ChatCompletion
    from openai.types.responses import Response

    async with backend() as model, serving(tmp_path, model) as client:
        assert fits(FileObject, await client.upload([chat("a")]))
        created = await client.create([chat("a"), chat("b", "refuse this")])
        wrong = await client.wait((await client.create(b"{"))["id"])
        done = await client.wait(created["id"])
        assert all(fits(Batch, each, "x_estimated_completion_at") for each in (created, done, wrong))
        assert fits(FileObject, await client.get(f"/v1/files/{done['output_file_id']}"))
        output, _ = await client.outcomes(done)
        assert fits(ChatCompletion, output[0]["response"]["body"])
        body = {"model": "m", "input": "hello"}
        line = {"custom_id": "r", "method": "POST", "url": "/v1/responses", "body": body}
        done = await client.wait((await client.create([line], "/v1/responses"))["id"])
        output, _ = await client.outcomes(done)
        for answer in (output[0]["response"]["body"], await client.post("/v1/responses", body)):
            assert fits(Response, answer, "store")
        assert fits(ChatCompletion, await client.post(CHAT, chat("a")["body"]))
        assert all(fits(Model, card) for card in (await client.get("/v1/models"))["data"])
        _, gone = await client.send("DELETE", f"/v1/files/{done['output_file_id']}")
        assert fits(FileDeleted, gone)


async def test_objects_of_anthropic(tmp_path: Path, anthropic: Any) -> None:
    from anthropic.types import ModelInfo
    from anthropic.types.messages import DeletedMessageBatch, MessageBatch, MessageBatchIndividualResponse

    async with backend() as model, serving(tmp_path, model) as client:
        created = await client.post(ROUTE, {"requests": [ask("a"), ask("b", "refuse")]})
        done = await client.wait_messages(created["id"])
        listed = (await client.get(ROUTE))["data"]
        assert all(fits(MessageBatch, each) for each in (created, done, *listed))
        results = await client.lines_at(f"{ROUTE}/{created['id']}/results")
        assert all(fits(MessageBatchIndividualResponse, each) for each in results) and len(results) == 2
        cards = (await client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}))["data"]
        assert all(ModelInfo.model_validate(card).type == "model" for card in cards)
        _, gone = await client.send("DELETE", f"{ROUTE}/{created['id']}")
        assert fits(DeletedMessageBatch, gone)
