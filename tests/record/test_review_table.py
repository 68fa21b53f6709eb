"""Rows of a review in a spreadsheet, and back."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from tests.record.reviewed import CANARY, reviewed_run, truth

from batch_agent.errors import SpecError
from batch_agent.record.people import PeopleReview
from batch_agent.record.review_table import escaped, free_rows, import_table, take_rows, unescaped, write_table
from batch_agent.testing import Say, ScriptedServer

Cells = dict[str, str]


pytestmark = pytest.mark.usefixtures("state")


def exported(review: PeopleReview, who: str, limit: int | None = None) -> list[Cells]:
    rows, stream = take_rows(review, who, limit, None), io.BytesIO()
    write_table(review, rows, stream)
    return [*csv.DictReader(io.StringIO(stream.getvalue().decode()))]


def saved(path: Path, rows: list[Cells], delimiter: str = ",", bom: str = "") -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(bom)
        writer = csv.DictWriter(file, [*rows[0]], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def filled(rows: list[Cells]) -> list[Cells]:
    return [{**row, "answer.label": truth(int(row["id"].removeprefix("T-"))), "answer.why": "typed"} for row in rows]


async def audited(place: Path, rows: int = 6, **options: Any) -> PeopleReview:
    await reviewed_run(place / "run", **options)
    review = PeopleReview.open(place / "run", overlap=0.0)
    review.audit(rows, "lead")
    return review


async def test_a_table_goes_to_a_spreadsheet_and_back(tmp_path: Path) -> None:
    with await audited(tmp_path) as review:
        rows = exported(review, "ada")
        assert [row["queue"] for row in rows] == ["audit"] * 6 + ["repair"] * len(rows[6:])
        assert len(rows) > 6
        for row in rows:
            assert row["input.text"] == f"ticket {row['row']}"
            if row["queue"] == "audit":
                assert CANARY not in str(row)
                assert row["model.label"] == ""
        found = import_table(review, "ada", saved(tmp_path / "in.csv", filled(rows), ";", "\ufeff"))
        assert (found.taken, found.freed, found.refused) == (len(rows), 0, [])
        assert review.waiting == 0


async def test_a_repair_in_a_table_keeps_the_fields_that_are_left_empty(tmp_path: Path) -> None:
    options: dict[str, Any] = {"gold": None, "cascade": None}
    async with ScriptedServer(lambda _: Say('{"label": "account", "why": "as the model says"}')) as server:
        entry = {"backend": server.backend_url, "model": "small"}
        options |= {"cascade": [entry, "people"], "escalate": "output.label == 'account'", "backend": None}
        await reviewed_run(tmp_path / "run", 4, **{**options, "model": None})
        with PeopleReview.open(tmp_path / "run") as review:
            rows = exported(review, "ada")
            assert {row["model.why"] for row in rows} == {"as the model says"}
            given = [{**row, "answer.label": "billing"} for row in rows]
            found = import_table(review, "ada", saved(tmp_path / "in.csv", given))
            assert (found.taken, found.refused) == (4, [])
            delivered = [review.delivered(each)["output"] for each in review.run.rows]
            assert delivered == [{"label": "billing", "why": "as the model says"}] * 4


async def test_the_same_reviewer_exports_the_same_rows_again_and_others_get_others(tmp_path: Path) -> None:
    with await audited(tmp_path) as review:
        ada, bob = exported(review, "ada", 3), exported(review, "bob", 2)
        assert exported(review, "Ada", 5) == ada
        assert not {row["row"] for row in ada} & {row["row"] for row in bob}
        assert review.next("eve") is not None
        assert free_rows(review, "ada") == 3
        assert [row["row"] for row in exported(review, "bob")] == [row["row"] for row in bob]
        assert {row["row"] for row in ada} <= {row["row"] for row in exported(review, "carl")}


async def test_an_import_frees_the_rows_that_were_left_empty(tmp_path: Path) -> None:
    with await audited(tmp_path) as review:
        rows = exported(review, "ada", 4)
        some = [*filled(rows[:1]), {**rows[1], "no_right_answer": "X"}, *rows[2:]]
        found = import_table(review, "ada", saved(tmp_path / "in.csv", some))
        assert (found.taken, found.freed, found.refused) == (2, 2, [])
        assert [row["row"] for row in exported(review, "bob", 2)] == [row["row"] for row in rows[2:]]
        again = import_table(review, "ada", saved(tmp_path / "in.csv", some))
        assert (again.taken, again.known, again.freed, again.refused) == (0, 2, 0, [])


async def test_each_row_that_cannot_be_taken_is_refused_with_its_line_and_the_others_are_taken(tmp_path: Path) -> None:
    with await audited(tmp_path) as review:
        rows = filled(exported(review, "ada", 6))
        rows[0]["id"] = "1"
        rows[1]["answer.label"] = "biling"
        rows[2]["row"] = "9999"
        rows[3]["no_right_answer"] = "perhaps"
        rows[4]["no_right_answer"] = "x"
        found = import_table(review, "ada", saved(tmp_path / "in.csv", [*rows, rows[5]]))
        assert found.taken == 1
        assert [line for line, _, _ in found.refused] == [2, 3, 4, 5, 6, 8]
        for (_, _, why), said in zip(
            found.refused,
            [
                "a spreadsheet may have changed it",
                "it is not one of billing, shipping, account",
                "is not in the review",
                "no_right_answer is 'perhaps': write x",
                "has an answer, and no_right_answer too",
                "twice",
            ],
            strict=True,
        ):
            assert said in why
        assert len(exported(review, "ada")) == 5, "rows that were refused stay with their reviewer"


async def test_rows_that_another_has_judged_since_are_refused(tmp_path: Path) -> None:
    with await audited(tmp_path, 1) as review:
        rows = exported(review, "ada", 1)
        free_rows(review, "ada")
        shown = review.next("bob", "audit")
        assert shown is not None
        review.judge("bob", shown.row.row, "audit", "answer", {"label": "billing"})
        found = import_table(review, "ada", saved(tmp_path / "in.csv", filled(rows)))
        assert found.taken == 0
        assert "another person has judged it since" in found.refused[0][2]
        stranger = import_table(review, "eve", saved(tmp_path / "in.csv", filled(rows)))
        assert "was not given to you" in stranger.refused[0][2]


@pytest.mark.parametrize("text", ["=1+1", "+49 30", "-x", "@SUM(A1)", "\tx", "\r=x", "\uff1dx"])
def test_a_cell_that_a_spreadsheet_would_run_is_escaped_and_read_back(text: str) -> None:
    assert escaped(text) == f"'{text}"
    assert unescaped(escaped(text)) == text


@pytest.mark.parametrize("text", ["", "plain", "-5", "-5.25", "'quoted", "1=1"])
def test_other_cells_stay_as_they_are(text: str) -> None:
    assert escaped(text) == text
    assert unescaped(text) == text


async def test_formulas_in_rows_and_ids_are_escaped(tmp_path: Path) -> None:
    inputs = [{"id": f"=T{row}", "text": f"=ticket {row}", "@x": "+1"} for row in range(4)]
    options = {"inputs": inputs, "gold": None}
    await reviewed_run(tmp_path / "run", 4, lambda _: Say('{"label": "billing", "why": "=cmd()"}'), **options)
    with PeopleReview.open(tmp_path / "run", overlap=0.0) as review:
        review.audit(4, "lead")
        rows = exported(review, "ada")
        assert {row["id"] for row in rows} == {f"'=T{row}" for row in range(4)}
        assert {row["input.text"] for row in rows} == {f"'=ticket {row}" for row in range(4)}
        assert all(not cell.startswith(("=", "+", "@")) for row in rows for cell in (*row, *row.values()))
        given = [{**row, "answer.label": "account"} for row in rows]
        assert import_table(review, "ada", saved(tmp_path / "in.csv", given)).taken == 4


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no column row"),
        ("row,id\n1,2\n", "has no column queue"),
        ("row,id,queue,answer.lable\n", "has a column answer.lable, and answers have only answer.label, answer.why"),
        ("\xff", "is not UTF-8"),
    ],
)
async def test_a_file_that_is_no_table_of_a_review_is_refused(tmp_path: Path, text: str, why: str) -> None:
    with await audited(tmp_path) as review:
        (tmp_path / "in.csv").write_bytes(text.encode("latin-1"))
        with pytest.raises(SpecError, match=why):
            import_table(review, "ada", tmp_path / "in.csv")
        with pytest.raises(SpecError, match="cannot read"):
            import_table(review, "ada", tmp_path / "nothing.csv")
