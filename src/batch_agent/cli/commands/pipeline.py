"""``batch-agent run`` for a pipeline. The output has the results of the last stage, the run directory all others."""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import ExitStack, closing, nullcontext
from typing import TextIO

from batch_agent.cli.commands.models import fetch_missing
from batch_agent.cli.commands.run import (
    choose_view,
    comparison_of,
    exit_code,
    open_output,
    page_beside,
    settle_output,
    show_plan,
    wants_comparison,
)
from batch_agent.cli.exit_status import ALL_OK, ROWS_FAILED, SIGNALLED
from batch_agent.cli.interrupts import Interrupts
from batch_agent.cli.output.report import Reporter
from batch_agent.cli.output.request_log import RequestLog
from batch_agent.cli.output.results import ResultWriter
from batch_agent.cli.spec.going_on import go_on
from batch_agent.cli.spec.recorded import command_of
from batch_agent.cli.spec.stages import load_flow, load_plan
from batch_agent.files.read import LazyRows
from batch_agent.files.results import plainly
from batch_agent.observe.display import Display
from batch_agent.observe.terminal import TerminalDisplay
from batch_agent.topology.flow import Flow


def run_stages(options: argparse.Namespace, stdout: TextIO, files: ExitStack) -> int:
    if options.dry_run:
        plan = load_plan(options)
        show_plan(plan, comparison_of(options, plan), options, stdout)
        return ALL_OK
    wants_comparison(options)
    log = RequestLog(verbose=options.verbose, log_file=options.log_file, files=files)
    flow = load_flow(options, command=command_of(options), wrap=log.wrap)
    if (ended := go_on(options, flow, flow.spec.run_dir)) is not None:
        return ended
    for node in flow.nodes:
        fetch_missing(node.prepared.backend.name, sys.stderr)
    view = choose_view(options, sys.stderr, stdout)
    inputs = flow.inputs
    closed = closing(inputs) if isinstance(inputs, LazyRows) else nullcontext()
    with closed, page_beside(options, flow.spec), open_output(options, flow.spec) as writer:
        return asyncio.run(_finish(flow, writer, view, Reporter(options, flow.spec, writer, stdout)))


async def _finish(flow: Flow, writer: ResultWriter, view: TerminalDisplay, report: Reporter) -> int:
    async with flow:
        with Interrupts(flow) as interrupts:
            async with Display(view, flow.statistics):
                await flow.finish()
        for result in flow.results():
            await writer.write(plainly(result, flow.nodes[-1].prepared.schema))
    settle_output(writer, flow.statistics())
    report.finished(flow.statistics(), flow.tool_statistics())
    if interrupts.stopped_by is not None:
        return SIGNALLED + interrupts.stopped_by
    code = exit_code(flow.statistics())
    return ROWS_FAILED if code == ALL_OK and not all(result.ok for result in flow.results()) else code
