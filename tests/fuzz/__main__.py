"""``make soak`` also fuzzes every reader of foreign bytes: ``python -m tests.fuzz --seconds 120 [TARGET …]``.

Each target gets an equal part of the time, with inputs that Hypothesis makes from its corpus. A failing input is made
as small as possible and kept in the corpus, so that ``make test`` has it from then on.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from hashlib import blake2b
from random import SystemRandom
from time import monotonic

from hypothesis import HealthCheck, Verbosity, given, seed, settings
from tests.fuzz.inputs import inputs
from tests.fuzz.targets import CORPUS, TARGETS

BATCH = 200  # examples between two looks at the clock


def fuzz(name: str, seconds: float) -> tuple[int, str]:
    """Fuzz one target for that long, or until it fails. Returns the number of inputs, and the failure or ""."""
    count, last, until = 0, b"", monotonic() + seconds
    target, random = TARGETS[name], SystemRandom()

    @given(inputs(name))
    @settings(
        max_examples=BATCH,
        database=None,
        deadline=None,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    def holds(data: bytes) -> None:
        nonlocal count, last
        if monotonic() > until + seconds:  # shrinking has its limit too
            return
        count, last = count + 1, data
        target(data)

    while monotonic() < until:
        try:
            seed(random.getrandbits(64))(holds)()
        except Exception:  # noqa: BLE001
            # The smallest input is the last that was tried.
            path = CORPUS / name / f"found-{blake2b(last, digest_size=6).hexdigest()}"
            path.write_bytes(last)
            return count, f"{traceback.format_exc(limit=-6)}\nThe input is in {path}"
    return count, ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--seconds", type=float, default=120.0, help="for all targets together (default %(default)g)")
    options = parser.parse_args()
    names = options.targets or list(TARGETS)
    if unknown := set(names) - TARGETS.keys():
        parser.error(f"there is no target {', '.join(unknown)}")
    failed = 0
    for name in names:
        count, failure = fuzz(name, options.seconds / len(names))
        print(f"{name}: {count:,} inputs, {'failed' if failure else 'ok'}", flush=True)
        if failure:
            failed += 1
            print(failure, file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
