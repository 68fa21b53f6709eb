"""The walk of docs/jobs/promise.md: people are played by the labels of the data set, through the API of the page."""

from __future__ import annotations

import csv
import json
import math
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from tests.cli.commandline import batch_agent
from tests.view.test_review_page import Reviewer, reviewers, served

from batch_agent import BatchAgent
from batch_agent.cli.spec.specfile import read_specfile
from batch_agent.messages import TokenChance
from batch_agent.testing import Request, Say, ScriptedServer

FOLDER = Path(__file__).parents[1] / "examples" / "trusted_labels"
LABELS = {row["text"]: row for row in csv.DictReader((FOLDER / "messages.csv").read_text().splitlines())}


pytestmark = pytest.mark.usefixtures("state")


def says(request: Request) -> Say:
    """A model that is wrong about the mood of one message of nine, and doubts it then more than otherwise."""
    text = str(request.messages[-1]["content"])[1:-1]
    own = blake2b(text.encode(), digest_size=2).digest()
    wrong, angry = own[0] % 9 == 0, LABELS[text]["angry"] == "yes"
    said, chance = json.dumps(angry != wrong), (0.5 if wrong else 0.7) + own[1] / 1000
    parts = ['{"topic": "other", "angry": ', said, "}"]
    return Say(
        "".join(parts), tokens=[TokenChance(part.encode(), math.log(chance if part == said else 1)) for part in parts]
    )


async def judged_by(people: list[Reviewer]) -> int:
    """Let people judge in turns, with the labels, until there is nothing left. Returns the judgements."""
    count, working = 0, [*people]
    while working:
        for person in [*working]:
            row = await person.next()
            if row is None:
                working.remove(person)
                continue
            label = LABELS[row["value"]["text"]]
            assert not {"topic", "angry"} & row["value"].keys(), "a reviewer must not see the gold"
            status, answer = await person.judge(row, {"topic": label["topic"], "angry": label["angry"] == "yes"})
            assert status == 200, answer
            count += 1
    return count


async def test_people_and_a_model_make_a_table_that_is_certified(tmp_path: Path) -> None:
    async with ScriptedServer(says, models=["scripted"]) as server:
        given: dict[str, Any] = {"inputs": str(FOLDER / "messages.csv"), "backend": server.backend_url}
        spec = read_specfile(FOLDER / "promise.yaml").resolve(
            {**given, "model": "scripted", "run_dir": str(tmp_path / "run")}
        )
        results = await BatchAgent.run(spec)
    before = results.summary.promise
    assert before is not None
    assert (before.state, before.next, before.truth) == ("not yet", "audit", "people's blind answers")
    async with served(tmp_path / "run") as address, reviewers(address, "ann", "bob") as people:
        judgements = await judged_by(people)
    status = json.loads((await batch_agent(tmp_path, "status", "run", "--json")).stdout)["promise"]
    assert status["state"] == "kept", status
    assert status["judgements"] == judgements < 300
    await batch_agent(tmp_path, "export", "run", "--output", "table.csv")
    table = {row["job_id"]: row for row in csv.DictReader((tmp_path / "table.csv").read_text().splitlines())}
    names = {row["id"]: row for row in LABELS.values()}
    wrong = sum(
        table[name]["output.angry"].lower() != str(row["angry"] == "yes").lower() for name, row in names.items()
    )
    assert wrong / len(names) <= 0.15
    certify = ("certify", "run", "-o", "certificate.json", "--table", "table.csv")
    assert (await batch_agent(tmp_path, *certify)).code == 0
    checked = await batch_agent(tmp_path, "certify", "--check", "certificate.json", "--table", "table.csv", "run")
    assert checked.code == 0, checked.stderr
