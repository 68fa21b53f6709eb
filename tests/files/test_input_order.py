import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from batch_agent.cli.output.results import InputOrder


def line(index: int) -> bytes:
    return f"{index}:{'x' * (index % 7)}\n".encode()


@given(st.permutations(range(40)), st.integers(0, 40))
def test_lines_leave_in_order_whatever_order_they_come_in_and_wherever_it_ends(order: list[int], end: int) -> None:
    with tempfile.TemporaryFile() as waiting:
        lines = InputOrder(waiting)
        out: list[bytes] = []
        for index in order[:end]:
            out += lines.put(index, line(index))
            came = set(order[: order.index(index) + 1])
            due = next(number for number in range(41) if number not in came)
            assert out == [line(number) for number in range(due)]  # each as soon as it can
        out += lines.rest()
        assert out == [line(index) for index in sorted(order[:end])]


def test_the_file_is_emptied_when_nothing_waits(tmp_path: Path) -> None:
    with (tmp_path / "waiting").open("w+b") as waiting:
        lines = InputOrder(waiting)
        for first in range(0, 300, 3):
            for index in (first + 2, first + 1):
                assert list(lines.put(index, line(index))) == []
            assert (tmp_path / "waiting").read_bytes() == line(first + 2) + line(first + 1)
            assert len(list(lines.put(first, line(first)))) == 3
            assert (tmp_path / "waiting").stat().st_size == 0


def test_indices_far_apart_come_in_order_at_the_end() -> None:
    with tempfile.TemporaryFile() as waiting:
        lines = InputOrder(waiting)
        for index in (1_000_000, 5, 70_000, 5000):
            assert list(lines.put(index, line(index))) == []
        assert list(lines.rest()) == [line(5), line(5000), line(70_000), line(1_000_000)]
        assert list(lines.put(0, b"late\n")) == [b"late\n"]
