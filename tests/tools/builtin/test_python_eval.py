import asyncio
import json
from pathlib import Path

import pytest

from batch_agent.errors import ToolError, ToolTimeout
from batch_agent.messages import ToolCall
from batch_agent.tools import Tool, python_eval


@pytest.fixture
def enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCH_AGENT_ENABLE_PYTHON_EVAL", "1")


@pytest.mark.parametrize("value", [None, "", "0", "true"])
async def test_it_is_off_unless_switched_on(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("BATCH_AGENT_ENABLE_PYTHON_EVAL", raising=False)
    if value is not None:
        monkeypatch.setenv("BATCH_AGENT_ENABLE_PYTHON_EVAL", value)
    with pytest.raises(ToolError, match="set BATCH_AGENT_ENABLE_PYTHON_EVAL=1"):
        await Tool.python_eval("1")


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("6 * 7", "42"),
        ("print('a')\nx = 2\nx ** 10", "a\n1024"),
        ("def f(n):\n    return n and f(n - 1)\nf(5)", "0"),
        ("x = 1", "(no output)"),
        ("None", "(no output)"),
        ("", "(no output)"),
        ("'ä\\n'", "'ä\\n'"),
        ("print('grün')", "grün"),
        ("import sys; print('e', file=sys.stderr)", "e"),
        ("__name__", "'__main__'"),
        ("import sys; sys.exit(0)", "(no output)"),
    ],
)
async def test_it_returns_what_is_printed_and_the_last_value(code: str, text: str) -> None:
    assert await Tool.python_eval(code) == text


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('before')\n1 / 0", "before\nline 2: ZeroDivisionError: division by zero"),
        ("x = (", "SyntaxError"),
        ("import sys; sys.exit(3)", "status 3"),
        ("import os; os.abort()", "signal 6"),
        ("raise SystemExit('bye')", "bye"),
        ("x = '\\ud800'\nprint(x)", "UnicodeEncodeError"),
    ],
)
async def test_a_program_that_fails_is_an_error_with_its_output(code: str, message: str) -> None:
    with pytest.raises(ToolError) as caught:
        await Tool.python_eval(code)
    assert message in str(caught.value)
    assert "python_child" not in str(caught.value)


@pytest.mark.usefixtures("enabled")
async def test_the_environment_is_bare_and_the_directory_is_temporary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    text = await Tool.python_eval("import os, sys; print(os.getcwd()); open('f', 'w').close(); sorted(os.environ)")
    folder, names = text.splitlines()
    assert "sk-secret" not in text and "PYTHONPATH" not in names and "OPENAI_API_KEY" not in names
    assert not Path(folder).exists()
    assert Path(folder) != Path.cwd()


@pytest.mark.usefixtures("enabled")
async def test_memory_is_limited() -> None:
    with pytest.raises(ToolError, match="MemoryError"):
        await python_eval(memory_bytes=256 * 1024 * 1024)("x = bytearray(10 ** 9)")


@pytest.mark.usefixtures("enabled")
async def test_output_is_cut_and_never_fills_the_disk() -> None:
    text = await python_eval(output_bytes=100)("print('x' * 1000)")
    assert text == "x" * 100 + "\n[cut: these are the first 100 of 1001 bytes]"
    with pytest.raises(ToolError, match="cut"):
        await python_eval(output_bytes=100)("while True: print('x' * 100000)")


@pytest.mark.usefixtures("enabled")
async def test_time_is_limited() -> None:
    with pytest.raises(ToolTimeout, match=r"after 0\.3 s"):
        await python_eval(timeout=0.3)("while True: pass")


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


# Each leaves a process behind that writes its id into the file whose name is in ``note``.
SLEEPER = (
    "open({note!r} + '.part', 'w').write(str(os.getpid())); os.rename({note!r} + '.part', {note!r}); time.sleep(1000)"
)
LEAVES = {
    "a child": "if os.fork() == 0:\n    {sleeper}\n",
    "a child in a session of its own": "if os.fork() == 0:\n    os.setsid()\n    {sleeper}\n",
    "a daemon": "if os.fork() == 0:\n    os.setsid()\n    if os.fork():\n        os._exit(0)\n    {sleeper}\n",
}


def program(leaves: str, note: Path, end: str) -> str:
    """A program that leaves a process behind, and ends in some way when that is there."""
    return (
        "import os, time\n"
        + LEAVES[leaves].format(sleeper=SLEEPER.format(note=str(note)))
        + f"while not os.path.exists({str(note)!r}): time.sleep(0.01)\n{end}"
    )


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize(
    ("leaves", "end"),
    [*((each, "print('done')") for each in LEAVES), *(("a daemon", end) for end in ("os.abort()", "os.killpg(0, 9)"))],
)
async def test_what_a_program_leaves_behind_ends_with_it(leaves: str, end: str, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = program(leaves, note, end)
    if end == "print('done')":
        assert await Tool.python_eval(code) == "done"
    else:
        with pytest.raises(ToolError):
            await Tool.python_eval(code)
    assert not alive(int(note.read_text()))


@pytest.mark.usefixtures("enabled")
async def test_what_a_program_leaves_behind_ends_when_its_time_is_over(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with pytest.raises(ToolTimeout):
        await python_eval(timeout=3)(program("a daemon", note, "time.sleep(1000)"))
    assert not alive(int(note.read_text()))


@pytest.mark.usefixtures("enabled")
async def test_cancelling_kills_the_program_and_what_it_left(tmp_path: Path, open_pool) -> None:
    note, own = tmp_path / "pid", tmp_path / "own"
    code = program("a daemon", note, f"open({str(own)!r}, 'w').write(str(os.getpid())); time.sleep(1000)")
    async with open_pool(python_eval(timeout=100)) as pool:
        pending = pool.start(ToolCall("1", "python_eval", json.dumps({"code": code})))
        async with asyncio.timeout(20):
            while not (own.exists() and own.read_text()):
                await asyncio.sleep(0.01)
        pending.abandon()
        assert not (await pending.wait()).ok
        assert not alive(int(note.read_text()))
        assert not alive(int(own.read_text()))


def test_every_call_runs() -> None:
    assert (Tool.python_eval.effect, Tool.python_eval.declared) == ("write", True)
