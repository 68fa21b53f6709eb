"""Rows with documents, from the files to what a model is sent and what a result holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.cli.commandline import batch_agent
from tests.documents.made_documents import SCAN, paragraph, write_docx, write_pdf

from batch_agent import BatchAgent, SpecError
from batch_agent.backends.base import Capabilities
from batch_agent.files import LazyRows, read_inputs
from batch_agent.files.results import to_json
from batch_agent.testing import Say, ScriptedBackend, ScriptedServer

pytest.importorskip("pypdfium2")
TAKES_FILES = Capabilities(images=True, documents=frozenset({"pdf"}))


def backend_of(capabilities: Capabilities | None = None) -> ScriptedBackend:
    return ScriptedBackend(lambda request: Say("seen"), capabilities=capabilities)


def sent(backend: ScriptedBackend) -> list[Any]:
    return [request.messages[-1]["content"] for request in backend.requests]


@pytest.fixture
def papers(tmp_path: Path) -> Path:
    papers = tmp_path / "papers"
    (papers / "old").mkdir(parents=True)
    write_pdf(papers / "a.pdf", ["one", "two"])
    write_docx(papers / "b.docx", paragraph("words"))
    (papers / "c.txt").write_text("plain")
    write_pdf(papers / "old" / "d.pdf", ["old"])
    return papers


async def test_a_folder_of_documents_is_read_and_results_have_their_text_and_pages(papers: Path) -> None:
    backend = backend_of()
    results = await BatchAgent.run(task="{pages}: {text}", inputs=str(papers), backend=backend)
    assert sorted(sent(backend)) == ["1: old", "1: plain", "1: words", "2: [page 1]\none\n\n[page 2]\ntwo"]
    assert [result.input["name"] for result in results] == ["a.pdf", "b.docx", "c.txt", "d.pdf"]
    assert results[0].input["pages"] == 2 and results[1].input["text"] == "words"


@pytest.mark.parametrize(
    ("pattern", "names"), [("**/*.pdf", ["a.pdf", "d.pdf"]), ("b*", ["b.docx"]), ("a.pdf", ["a.pdf"])]
)
def test_a_pattern_and_a_single_file_name_documents(papers: Path, pattern: str, names: list[str]) -> None:
    rows = read_inputs(papers / pattern)
    assert isinstance(rows, LazyRows) and rows.expected_rows() == len(names)
    assert [row["name"] for row in rows if isinstance(row, dict)] == names


@pytest.mark.parametrize(("pattern", "why"), [("*.odt", "no file matches"), ("*.csv", "hold many rows: give one file")])
def test_a_pattern_that_names_no_documents_is_an_error(papers: Path, pattern: str, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        read_inputs(papers / pattern)


async def test_a_column_of_paths_is_read_beside_the_other_columns(papers: Path) -> None:
    backend = backend_of()
    rows = [{"file": "a.pdf", "from": "Ada"}, {"file": "b.docx", "from": "Bob"}]
    results = await BatchAgent.run(
        task="{from} sent {file}: {text}", inputs=rows, document_column="file", image_root=papers, backend=backend
    )
    assert sorted(sent(backend)) == ["Ada sent a.pdf: [page 1]\none\n\n[page 2]\ntwo", "Bob sent b.docx: words"]
    assert results[0].input == {"file": "a.pdf", "from": "Ada", "text": "[page 1]\none\n\n[page 2]\ntwo", "pages": 2}


@pytest.mark.parametrize(
    ("row", "why"),
    [({"path": "a.pdf"}, "has no field 'file'"), ({"file": "a.pdf", "text": "x"}, "have a field 'text'.*rename it")],
)
async def test_a_column_that_cannot_be_read_is_an_error_before_anything_starts(row: dict[str, str], why: str) -> None:
    with pytest.raises(SpecError, match=f"document_column: .*{why}"):
        await BatchAgent.run(task="{text}", inputs=[row], document_column="file", backend=backend_of())


async def test_a_file_that_cannot_be_read_fails_its_own_row(papers: Path) -> None:
    write_pdf(papers / "e.pdf", ["x"], encrypted=True)
    write_pdf(papers / "f.pdf", [SCAN])
    rows = [{"file": name} for name in ("a.pdf", "e.pdf", "f.pdf", "", "https://h/x.pdf", "b.docx")]
    results = await BatchAgent.run(
        task="{text}", inputs=rows, document_column="file", image_root=papers, backend=backend_of()
    )
    assert [result.ok for result in results] == [True, False, False, False, False, True]
    reasons = [result.error.message for result in results if result.error is not None]
    assert [result.error.type for result in results if result.error is not None] == ["InputError"] * 4
    for reason, words in zip(reasons, ("is encrypted", "a scan", "is not the path", "download"), strict=True):
        assert words in reason


async def test_pages_are_sent_as_pictures_in_their_places(papers: Path) -> None:
    pytest.importorskip("PIL")
    backend = backend_of()
    await BatchAgent.run(task="Read: {text}", inputs=str(papers / "a.pdf"), documents="images", backend=backend)
    (parts,) = sent(backend)
    assert [part.get("text", part["type"]) for part in parts] == [
        "Read: [page 1]\n",
        "image_url",
        "\n[page 2]\n",
        "image_url",
    ]


async def test_a_file_is_sent_as_it_is_and_kept_as_its_hash(papers: Path) -> None:
    backend = backend_of(TAKES_FILES)
    results = await BatchAgent.run(task="Sum up.", inputs=str(papers / "a.pdf"), documents="native", backend=backend)
    (parts,) = sent(backend)
    assert [part["type"] for part in parts] == ["text", "file"]
    assert parts[1]["file"]["filename"] == "a.pdf"
    assert parts[1]["file"]["file_data"].startswith("data:application/pdf;base64,")
    assert "[document sha256:" in str(results[0].messages[0].content)
    assert len(to_json(results[0].input)) < 500


@pytest.mark.parametrize(
    ("options", "able", "why"),
    [
        ({"documents": "native"}, Capabilities(images=True), r"does not take files; use documents=.text., or .images."),
        ({"documents": "native"}, Capabilities(), "does not take files; use documents=.text.$"),
        ({"documents": "images"}, Capabilities(), "cannot be shown images; use documents=.text."),
        (
            {"documents": "native", "oversized": "truncate", "model_max_context": 999},
            TAKES_FILES,
            "oversized='truncate'",
        ),
        ({"documents": "pictures"}, Capabilities(), "documents: must be text, images or native"),
    ],
)
async def test_a_form_that_the_backend_does_not_take_is_refused_before_anything_is_sent(
    papers: Path, options: dict[str, Any], able: Capabilities, why: str
) -> None:
    backend = backend_of(able)
    with pytest.raises(SpecError, match=why):
        await BatchAgent.run(task="{text}", inputs=str(papers), backend=backend, **options)
    assert backend.requests == []


async def test_a_long_document_is_done_in_parts(tmp_path: Path) -> None:
    write_pdf(tmp_path / "long.pdf", ["\n".join(["some words of a long text"] * 40)] * 3)
    backend = backend_of()
    options: dict[str, Any] = {"oversized": "chunk", "model_max_context": 600, "max_tokens": 20}
    (result,) = await BatchAgent.run(task="{text}", inputs=str(tmp_path), backend=backend, **options)
    assert result.ok and result.chunks > 1


async def test_a_run_that_is_resumed_reads_no_row_as_another(papers: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"task": "{text}", "inputs": str(papers), "run_dir": tmp_path / "run"}
    await BatchAgent.run(**options, backend=backend_of())
    write_pdf(papers / "a.pdf", ["changed"])
    backend = backend_of()
    with pytest.raises(SpecError, match=r"kept 3, to send 1 \(1 changed\)"):
        await BatchAgent.run(**options, resume=True, backend=backend)
    results = await BatchAgent.run(**options, resume=True, backend=backend, on_change="resend")
    assert sent(backend) == ["changed"]
    assert [result.resumed for result in results] == [False, True, True, True]


async def test_a_worker_gets_the_text(papers: Path) -> None:
    async def work(row: dict[str, Any], ctx: object) -> str:
        return f"{row['pages']} {row['text'][-3:]}"

    async with ScriptedServer([]) as server:
        results = await BatchAgent.run(worker=work, inputs=str(papers), backend=server.url)
    assert [result.output for result in results] == ["2 two", "1 rds", "1 ain", "1 old"]


async def test_the_command_line_takes_a_pattern_and_a_column_beside_its_table(papers: Path, tmp_path: Path) -> None:
    (papers / "list.csv").write_text("file,who\na.pdf,Ada\n")
    async with ScriptedServer(lambda request: Say(request.text)) as server:
        options = ["--backend", server.url, "--no-run-dir"]
        many = await batch_agent(tmp_path, "run", "--task", "{name} {text}", "papers/**/*.pdf", *options)
        column = ["papers/list.csv", "--document-column", "file", *options]
        one = await batch_agent(tmp_path, "run", "--task", "{who} {text}", *column)
    paper = "[page 1]\none\n\n[page 2]\ntwo"
    assert [result["output"] for result in many.results] == [f"a.pdf {paper}", "d.pdf old"], many.stderr
    assert [result["output"] for result in one.results] == [f"Ada {paper}"], one.stderr
