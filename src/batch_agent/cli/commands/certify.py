"""``batch-agent certify``: the certificate of a promise that is kept, and the check of one against the record."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from batch_agent.cli.exit_status import ALL_OK, REQUIRED, RUN_FAILED
from batch_agent.cli.output.streams import put, put_json, say
from batch_agent.cli.spec.arguments import RUN_HELP
from batch_agent.errors import SpecError
from batch_agent.files.results import from_json, to_json
from batch_agent.observe.text import harmless
from batch_agent.record.certificate import certificate_of, check, check_table


def add_certify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("-o", "--output", metavar="FILE", help="write the certificate to this file")
    parser.add_argument("--check", metavar="FILE", help="check this certificate against the record of the run")
    parser.add_argument("--table", metavar="FILE", help="check too that this exported table is the one of the run")
    parser.add_argument("--names", action="store_true", help="name the people who judged each audited row")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def certify_command(options: argparse.Namespace) -> int:
    if options.check is not None:
        return _check(options)
    certificate, standing = certificate_of(options.run, names=options.names)
    if certificate is None:
        if options.json:
            put_json({"certified": False, "promise": standing.to_json()})
        for line in [] if options.json else standing.lines(shlex.quote(options.run)):
            say(f"batch-agent: {harmless(line)}")
        return REQUIRED
    if options.table is not None and (why := check_table(Path(options.table), options.run)):
        say(f"batch-agent: {harmless(why)}")
        return RUN_FAILED
    text = to_json(certificate)
    if options.output is None:
        put(text.decode())
        return ALL_OK
    try:
        Path(options.output).write_bytes(text + b"\n")
    except OSError as error:
        raise SpecError(f"{options.output} cannot be written: {error.strerror}") from None
    if options.json:
        put_json({"certified": True, "certificate": options.output, "promise": standing.to_json()})
    else:
        say(f"{options.output}: {certificate['says']}")
    return ALL_OK


def _check(options: argparse.Namespace) -> int:
    try:
        certificate = from_json(Path(options.check).read_bytes())
    except OSError as error:
        raise SpecError(f"{options.check} cannot be read: {error.strerror}") from None
    except ValueError:
        raise SpecError(f"{options.check} is no certificate: it is not JSON") from None
    why = check(certificate, options.run)
    if not why and options.table is not None:
        why = check_table(Path(options.table), options.run)
    if options.json:
        put_json({"agrees": not why, "difference": why or None})
    elif why:
        say(f"batch-agent: {options.check} does not agree with {harmless(options.run)}: {harmless(why)}")
    else:
        say(f"{options.check} agrees with the record of {harmless(options.run)}")
    return RUN_FAILED if why else ALL_OK
