import os
import socket
from pathlib import Path

import pytest
from tests.documents.made_documents import paragraph, write_docx, write_pdf

from batch_agent.errors import ToolError
from batch_agent.messages import ToolCall
from batch_agent.tools import Tool, read_file
from batch_agent.tools.builtin.files import locate, read_located


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "rootless").mkdir()
    (tmp_path / "rootless" / "near.txt").write_text("near")
    return root


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_file_is_read_by_relative_and_by_absolute_path(root: Path) -> None:
    (root / "sub").mkdir()
    (root / "sub" / "a.txt").write_text("hällo", encoding="utf-8")
    tool = read_file(roots=[root])
    assert tool("sub/a.txt") == "hällo"
    assert tool(str(root / "sub" / "a.txt")) == "hällo"


def test_without_roots_the_working_directory_is_the_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "a.txt").write_text("here")
    monkeypatch.chdir(root)
    assert Tool.read_file("a.txt") == "here"
    with pytest.raises(ToolError, match="outside"):
        Tool.read_file("../secret.txt")


def test_a_file_is_found_in_any_of_several_roots(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "b.txt").write_text("b")
    assert read_file(roots=[root, other])("b.txt") == "b"


@pytest.mark.parametrize(
    "path", ["../secret.txt", "sub/../../secret.txt", "/etc/passwd", "../rootless/near.txt", "link"]
)
def test_nothing_outside_the_roots_is_read(root: Path, path: str) -> None:
    (root / "link").symlink_to(root.parent / "secret.txt")
    with pytest.raises(ToolError, match="outside the directories"):
        read_file(roots=[root])(path)


def test_a_directory_symlink_does_not_lead_out(root: Path) -> None:
    (root / "out").symlink_to(root.parent)
    with pytest.raises(ToolError, match="outside"):
        read_file(roots=[root])("out/secret.txt")


def test_a_directory_that_becomes_a_symlink_after_it_was_found_leads_nowhere(root: Path) -> None:
    (root / "sub").mkdir()
    (root / "sub" / "secret.txt").write_text("mine")
    located = locate("sub/secret.txt", [root])
    (root / "sub").rename(root / "was")
    (root / "sub").symlink_to(root.parent)
    with pytest.raises(ToolError, match="cannot be read"):
        read_located("sub/secret.txt", located, 100)


@pytest.mark.parametrize("path", [".env", ".git/config", "sub/.env", "shown"])
def test_hidden_files_are_read_only_where_the_user_allows_it(root: Path, path: str) -> None:
    for directory in (".git", "sub"):
        (root / directory).mkdir()
    for name in (".env", ".git/config", "sub/.env"):
        (root / name).write_text("key")
    (root / "shown").symlink_to(".env")
    with pytest.raises(ToolError, match="is hidden"):
        read_file(roots=[root])(path)
    assert read_file(roots=[root], hidden=True)(path) == "key"


def test_a_hidden_root_was_named_by_the_user(root: Path) -> None:
    (root / ".github").mkdir()
    (root / ".github" / "ci.yml").write_text("on: push")
    assert read_file(roots=[root, root / ".github"])(".github/ci.yml") == "on: push"
    (root / ".env").write_text("key")
    assert read_file(roots=[root / ".env"])(str(root / ".env")) == "key"


def test_no_descriptor_is_left_open(root: Path) -> None:
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "c.txt").write_text("c")
    tool = read_file(roots=[root])
    before = open_descriptors()
    assert tool("a/b/c.txt") == "c"
    for path in ("a/b/none.txt", "a/b", "a/b/c.txt/d"):
        with pytest.raises(ToolError):
            tool(path)
    assert open_descriptors() == before


def test_a_missing_file_outside_looks_the_same_as_one_that_exists(root: Path) -> None:
    messages = []
    for name in ("../secret.txt", "../nothere.txt"):
        with pytest.raises(ToolError) as caught:
            read_file(roots=[root])(name)
        messages.append(str(caught.value).replace(name, ""))
    assert messages[0] == messages[1]


def test_a_symlink_inside_the_roots_is_followed_also_to_a_root_that_is_a_link(root: Path, tmp_path: Path) -> None:
    (root / "real.txt").write_text("real")
    (root / "link.txt").symlink_to("real.txt")
    (tmp_path / "alias").symlink_to(root)
    assert read_file(roots=[tmp_path / "alias"])("link.txt") == "real"


def test_what_is_not_a_file_is_refused(root: Path) -> None:
    os.mkfifo(root / "fifo")
    tool = read_file(roots=[root, "/dev"])
    with pytest.raises(ToolError, match="device, pipe or socket"):
        tool("fifo")
    with pytest.raises(ToolError, match="device, pipe or socket"):
        tool("/dev/zero")
    with pytest.raises(ToolError, match="Is a directory"):
        tool(".")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "s"))
        with pytest.raises(ToolError, match="cannot be read"):
            tool("s")


@pytest.mark.parametrize("path", ["nothere.txt", "a\0b", "x" * 5000, "loop", ""])
def test_a_path_that_cannot_be_read_is_a_polite_error(root: Path, path: str) -> None:
    (root / "loop").symlink_to("loop")
    with pytest.raises(ToolError):
        read_file(roots=[root])(path)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "latin-1"])
def test_encodings_are_recognised(root: Path, encoding: str) -> None:
    (root / "a.txt").write_text("Grüße", encoding=encoding)
    assert read_file(roots=[root])("a.txt") == "Grüße"


def test_a_binary_file_is_refused(root: Path) -> None:
    (root / "a.bin").write_bytes(b"\x7fELF\x00\x01")
    with pytest.raises(ToolError, match="not a text file"):
        read_file(roots=[root])("a.bin")


@pytest.mark.parametrize(("encoding", "size"), [("utf-8", 40), ("utf-8-sig", 43), ("utf-16", 42)])
def test_a_long_file_is_cut_between_characters_and_goes_on_there(root: Path, encoding: str, size: int) -> None:
    (root / "a.txt").write_text("ä" * 20, encoding=encoding)
    tool = read_file(roots=[root], max_bytes=7)
    text, offset = "", 0
    while (cut := tool("a.txt", offset=offset).partition("\n[cut: "))[1]:
        text += cut[0]
        assert cut[2].startswith(f"these are bytes {offset} to ") and f" of {size}; " in cut[2]
        offset = int(cut[2].removesuffix("]").rpartition("=")[2])
    assert text + cut[0] == "ä" * 20


async def test_a_file_is_cut_once_to_what_a_conversation_can_hold(root: Path, open_pool) -> None:
    (root / "a.txt").write_text("x" * 100_000)
    for tool, shown in ((read_file(roots=[root]), 64_000), (read_file(roots=[root], max_bytes=90_000), 90_000)):
        async with open_pool(tool) as pool:
            text = (await pool.start(ToolCall("1", "read_file", '{"path": "a.txt"}')).wait()).text
        assert text == "x" * shown + f"\n[cut: these are bytes 0 to {shown} of 100000; continue with offset={shown}]"


def test_a_file_of_exactly_the_limit_is_not_cut(root: Path) -> None:
    (root / "a.txt").write_text("12345")
    assert read_file(roots=[root], max_bytes=5)("a.txt") == "12345"


async def test_a_file_is_read_once_until_it_changes(root: Path, open_pool) -> None:
    file = root / "a.txt"
    file.write_text("one")
    call, other = ToolCall("1", "read_file", '{"path": "a.txt"}'), ToolCall("2", "read_file", '{"path": "./a.txt"}')
    async with open_pool(read_file(roots=[root])) as pool:
        assert (await pool.start(call).wait()).source == "run"
        assert (await pool.start(other).wait()).source == "cache"
        file.write_text("three")
        outcome = await pool.start(call).wait()
        assert (outcome.source, outcome.text) == ("run", "three")
        file.unlink()
        gone = await pool.start(call).wait()
        assert gone.text == "Error: 'a.txt' cannot be read: No such file or directory"


def test_a_pdf_is_read_by_pages_and_goes_on_where_it_was_cut(root: Path) -> None:
    pytest.importorskip("pypdfium2")
    write_pdf(root / "a.pdf", ["one", "two two two", "three"])
    tool = read_file(roots=[root], max_bytes=8)
    assert tool("a.pdf") == "[page 1]\none\n\n[cut: these are pages 1 to 1 of 3; continue with page=2]"
    assert tool("a.pdf", page=2) == "[page 2]\ntwo two \n\n[cut in page 2 of 3; continue with page=2, offset=8]"
    assert tool("a.pdf", page=2, offset=8) == "[page 2]\ntwo\n\n[page 3]\nthree"
    for wrong, why in (
        ({"page": 4}, "there is no page 4"),
        ({"page": 0}, "page is 1"),
        ({"offset": -1}, "0"),
    ):
        with pytest.raises(ToolError, match=why):
            tool("a.pdf", **wrong)


def test_a_document_that_is_broken_is_an_error_of_the_tool(root: Path) -> None:
    write_docx(root / "a.docx", paragraph("fine"))
    (root / "b.docx").write_bytes(b"PK nothing")
    assert read_file(roots=[root])("a.docx") == "fine"
    with pytest.raises(ToolError, match=r"'b.docx' is not a DOCX file"):
        read_file(roots=[root])("b.docx")
