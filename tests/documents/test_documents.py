"""Files of every format, as text, as page pictures, and as files; those that are broken, locked or empty."""

from __future__ import annotations

import io
import os
import signal
import zipfile
from pathlib import Path

import pytest
from tests.documents.made_documents import SCAN, paragraph, table, write_docx, write_pdf

from batch_agent.documents import DocumentError
from batch_agent.documents.content import MOST_PICTURES, DocumentContent, open_document, read_document
from batch_agent.errors import InputError
from batch_agent.messages import Document

needs_pdf = pytest.mark.skipif("not __import__('importlib.util').util.find_spec('pypdfium2')", reason="no pypdfium2")


def children() -> set[str]:
    """The processes that this one has started, those that ended and were not waited for included."""
    return {child for tasks in Path("/proc/self/task").glob("*/children") for child in tasks.read_text().split()}


def text_of(path: Path) -> DocumentContent:
    return read_document(Document(path), how="text")


@needs_pdf
def test_the_text_of_a_pdf_has_a_mark_for_each_page(tmp_path: Path) -> None:
    content = text_of(write_pdf(tmp_path / "a.PDF", ["Invoice (7)\nTotal 9", "Terms", SCAN]))
    assert content.text == (
        "[page 1]\nInvoice (7)\nTotal 9\n\n[page 2]\nTerms\n\n[page 3]\n[no text on this page: probably a scan]"
    )
    assert (content.pages, content.attached) == (3, ())
    assert text_of(write_pdf(tmp_path / "b.pdf", ["One page"])).text == "One page"


def test_word_has_the_pages_that_its_breaks_make_and_rows_of_tables_on_a_line(tmp_path: Path) -> None:
    twice = '<w:br w:type="page"/>'  # Word notes the page that begins here a second time
    ignored = (
        '<mc:AlternateContent xmlns:mc="http://schemas.openxmlformats.org/markup-compatibility/2006"><mc:Fallback>'
        f"{paragraph('twice')}</mc:Fallback></mc:AlternateContent><w:p><w:del><w:r><w:delText>gone</w:delText></w:r></w:del></w:p>"
    )
    body = paragraph("A & B") + table(["x", "1"], ["y", ""]) + ignored + paragraph("", twice)
    content = text_of(write_docx(tmp_path / "a.docx", body + paragraph("C", "<w:lastRenderedPageBreak/>")))
    assert content.text == "[page 1]\nA & B\nx | 1\ny |\n\n[page 2]\nC"
    assert content.pages == 2


@pytest.mark.parametrize(
    ("html", "text"),
    [
        (
            b"<title>T</title><style>a{}</style><h1>H</h1><p>a <b>b</b>\n c<br>d<script>x</script>",
            "T\n\nH\n\na b c\nd",
        ),
        (b"<ul><li>x<li>y</ul><table><tr><td>1<td>2<tr><td>3</table>", "- x\n- y\n\n| 1 | 2\n| 3"),
        (b"<meta charset=iso-8859-1><p>gr\xfcn &amp; blau", "grün & blau"),
        ("<p>grün".encode(), "grün"),
        (b"<p>gr\xfcn", "grün"),
        ("<p>grün".encode("utf-16"), "grün"),
    ],
)
def test_html_is_its_words_in_any_encoding(tmp_path: Path, html: bytes, text: str) -> None:
    (tmp_path / "a.html").write_bytes(html)
    assert text_of(tmp_path / "a.html") == DocumentContent(text, 1)


@needs_pdf
def test_pages_go_as_pictures_each_with_its_mark(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    path = write_pdf(tmp_path / "a.pdf", ["one", SCAN])
    content = read_document(Document(path), how="images")
    first, second = content.attached
    assert content.text == f"[page 1]\n{first.mark}\n[page 2]\n{second.mark}"
    assert first.url.startswith("data:image/jpeg;base64,")
    many = write_pdf(tmp_path / "many.pdf", ["x"] * (MOST_PICTURES + 1))
    with pytest.raises(InputError, match=f"has {MOST_PICTURES + 1} pages, and at most {MOST_PICTURES}"):
        read_document(Document(many), how="images")


@needs_pdf
def test_a_file_goes_as_it_is_where_its_format_is_taken_and_as_text_elsewhere(tmp_path: Path) -> None:
    path = write_pdf(tmp_path / "a.pdf", ["one", "two"])
    content = read_document(Document(path), how="native", native={"pdf"})
    (file,) = content.attached
    assert isinstance(file, Document) and file.name == "a.pdf" and content.pages == 2
    assert file.url.startswith("data:application/pdf;base64,")
    word = write_docx(tmp_path / "a.docx", paragraph("words"))
    for how in ("native", "images"):
        assert read_document(Document(word), how=how, native={"pdf"}).text == "words"


@needs_pdf
@pytest.mark.parametrize("how", ["text", "native"])
def test_a_broken_or_encrypted_file_is_an_error_that_names_it(tmp_path: Path, how: str) -> None:
    whole = write_pdf(tmp_path / "whole.pdf", ["x"]).read_bytes()
    (tmp_path / "cut.pdf").write_bytes(whole[:200])
    (tmp_path / "empty.pdf").write_bytes(b"")
    write_pdf(tmp_path / "locked.pdf", ["x"], encrypted=True)
    (tmp_path / "old.docx").write_bytes(b"\xd0\xcf\x11\xe0old")
    with zipfile.ZipFile(tmp_path / "other.docx", "w") as archive:
        archive.writestr("a.txt", "no document")
    write_docx(tmp_path / "bad.docx", "<w:p>")
    for name, why in (
        ("cut.pdf", "is not a PDF file, or is damaged"),
        ("empty.pdf", "is not a PDF file, or is damaged"),
        ("locked.pdf", "is encrypted: save a copy without a password"),
        ("old.docx", "is encrypted, or in the old .doc format"),
        ("other.docx", "is not a DOCX file, or is damaged"),
        ("bad.docx", "is not a DOCX file, or is damaged"),
        ("gone.pdf", "cannot be read: No such file"),
        ("x\0.pdf", "cannot be read: embedded null"),
    ):
        with pytest.raises(InputError, match=f"{name} {why}"):
            read_document(Document(tmp_path / name), how=how, native={"pdf"})


@needs_pdf
def test_a_scan_and_an_empty_document_are_found(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r'no text on any of its pages \(2\).*documents="images"'):
        text_of(write_pdf(tmp_path / "scan.pdf", [SCAN, SCAN]))
    with pytest.raises(InputError, match=r"empty.docx has no text"):
        text_of(write_docx(tmp_path / "empty.docx", ""))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.pdf")
    with pytest.raises(InputError, match="is not a file"):
        text_of(tmp_path / "a.pdf")


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})", "crashed with SIGSEGV"),
        ("raise SystemExit(3)", "ended with status 3"),
        ("import time; time.sleep(60)", "no page was read in 0.2 s"),
    ],
)
def test_a_parser_that_crashes_or_hangs_is_an_error_and_leaves_no_process(
    tmp_path: Path, program: str, why: str
) -> None:
    (tmp_path / "a.html").write_text("x")
    before = children()
    silence = 0.2 if "sleep" in program else 60.0
    with io.FileIO(tmp_path / "a.html") as file, pytest.raises(DocumentError, match=why):  # noqa: SIM117
        with open_document(file, "html", silence=silence, program=program):
            pass
    assert children() == before


@needs_pdf
def test_a_reader_that_has_enough_ends_the_process(tmp_path: Path) -> None:
    path = write_pdf(tmp_path / "a.pdf", ["word " * 500] * 300)
    before = children()
    with io.FileIO(path) as file, open_document(file, "pdf", first=2) as document:
        assert document.pages == 300
        assert next(document.texts()).startswith("word")
    assert children() == before
