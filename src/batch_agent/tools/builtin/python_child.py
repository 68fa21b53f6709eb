"""Runs the Python program of one ``python_eval`` call within limits, and prints the value of its last expression.

It is run by path with ``-I``, below a guard, and imports nothing of this package.
"""

from __future__ import annotations

import ast
import resource
import sys
import traceback
from pathlib import Path

NAME = "<program>"


def limit(memory_bytes: int, cpu_seconds: int, file_bytes: int) -> None:
    for what, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (value, value))


def run(source: str) -> None:
    tree = ast.parse(source, NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    names: dict[str, object] = {"__name__": "__main__"}
    exec(compile(tree, NAME, "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), NAME, "eval"), names)
        if value is not None:
            sys.stdout.write(f"{value!r}\n")
    sys.stdout.flush()


def explain(error: BaseException) -> str:
    """Return the exception with the line of the program that raised it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == NAME]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{''.join(traceback.format_exception_only(error)).strip()}\n"


def main(path: str, memory_bytes: str, cpu_seconds: str, file_bytes: str) -> int:
    limit(int(memory_bytes), int(cpu_seconds), int(file_bytes))
    try:
        run(Path(path).read_text(encoding="utf-8"))
    except Exception as error:  # noqa: BLE001
        sys.stdout.flush()
        sys.stderr.write(explain(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
