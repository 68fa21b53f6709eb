"""The command line: which command it is, and the one place where errors become messages and exit codes.

Only what the command needs is imported, its arguments included: nobody waits for an engine to read a help text.
"""

from __future__ import annotations

import argparse
import difflib
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, NoReturn

from batch_agent.cli.exit_status import RUN_FAILED, SIGNALLED, UNREACHABLE
from batch_agent.cli.output.streams import discard, ensure_streams, flush_words, say
from batch_agent.errors import BatchAgentError, InternalError, RunUnreachable
from batch_agent.observe.text import harmless
from batch_agent.store.address import masked
from batch_agent.version import __version__


@dataclass(frozen=True, slots=True)
class Command:
    """A command of ``batch-agent``. Unless ``adds`` and ``does`` name other functions below ``cli``, it is those of the
    module of its name: ``add_NAME_arguments`` takes the parser, ``NAME_command`` what was parsed."""

    help: str
    description: str
    adds: str = "commands.{0}:add_{0}_arguments"
    does: str = "commands.{0}:{0}_command"


SETTING = "--set"
MOST_USAGE_LINES = 8
# What other programs call an option.
ELSEWHERE = {
    **dict.fromkeys(("concurrency", "max_concurrency", "parallel", "workers", "max_workers"), "max_inflight"),
    **dict.fromkeys(("prompt", "message", "instruction"), "task"),
    **dict.fromkeys(("input", "data", "file"), "inputs"),
    **dict.fromkeys(("key", "token"), "api_key"),
    **dict.fromkeys(("base_url", "url", "endpoint", "server"), "backend"),
    **dict.fromkeys(("max_budget", "budget"), "max_cost"),
    "max_completion_tokens": "max_tokens",
    "response_format": "output_schema",
}
COMMANDS: Mapping[str, Command] = {
    "init": Command(
        "write a spec, a schema, a tool and rows to start from",
        "Write files to start from: a spec, its output schema and a tool, and a few rows. Nothing is overwritten.",
    ),
    "run": Command(
        "run a task over rows, from a spec file or from flags",
        "Run the task of a spec file, or of --task, over its inputs.",
        adds="spec.arguments:add_run_arguments",
    ),
    "plan": Command(
        "what a run would send and cost, and how much its rows share",
        "What a run with the same arguments would send: the first message, the tokens that rows share, the cost. "
        "Sends nothing; the same as run --dry-run.",
        adds="spec.arguments:add_plan_arguments",
        does="commands.run:run_command",
    ),
    "work": Command(
        "work on a run that another process feeds",
        "Join a run that is kept in Redis, from any machine: take rows, work on them, until the run is done. Exit "
        "status: 0 the run is done, or the worker was asked to leave; 2 it cannot work on this run, or the URL is "
        "wrong; 3 no run, or no feeder, came.",
    ),
    "resume": Command(
        "go on with a run that was interrupted",
        "Go on with a recorded run. Rows that are done are not asked again; rows that failed are. What is given here "
        "takes the place of what the run was started with.",
        adds="spec.arguments:add_resume_arguments",
    ),
    "retry-failed": Command(
        "try a run's failed rows again",
        "Try the failed rows of a recorded run again, and finish what else is undone.",
        adds="spec.arguments:add_retry_arguments",
        does="commands.resume:resume_command",
    ),
    "status": Command(
        "how far a run is",
        "How far a recorded run is, also while another process works on it.",
    ),
    "control": Command(
        "pause, resize, drain or cancel a run, or one of its rows",
        "Steer a run that another process on this machine works on.",
    ),
    "view": Command(
        "look at runs in a browser",
        "Serve a page that shows a run, two runs side by side, or all runs of a directory; live, and after their end.",
    ),
    "report": Command(
        "write a run as one HTML file",
        "Write what the page shows of a run to one HTML file, which needs no server and no network.",
    ),
    "runs": Command(
        "list recorded runs",
        "The runs that are recorded in a directory, the latest first.",
    ),
    "show": Command(
        "what was said in a recorded run",
        "Rows of a recorded run as a person reads them: prompts, answers, tool calls with their results, times and "
        "tokens. Without further words, the first row.",
    ),
    "export": Command(
        "make a table of the results in a run directory",
        "The results in a run directory, finished or not, as another file, in input order.",
    ),
    "copy": Command(
        "bring a run from Redis into a directory, or back",
        "Copy a recorded run that is not at work: from the URL of a run in Redis into a new directory, or from a "
        "directory into Redis under a new name.",
    ),
    "delete": Command(
        "remove a run from Redis",
        "Remove everything that Redis keeps of a run. A run that is at work is not removed.",
    ),
    "tools": Command(
        "list the tools of a spec, those of MCP servers included",
        "The tools that agents could call, with what a model is told of them. MCP servers are started, or connected "
        "to, for their lists.",
    ),
    "mcp": Command(
        "serve this engine to coding agents, as an MCP server",
        "An MCP server on standard input and output: a coding agent plans, starts, watches and reads batches with it.",
    ),
    "models": Command(
        "the models of local://, and fetching them",
        "The models that local:// can use on this machine: in the cache, or to be had by name.",
    ),
    "doctor": Command(
        "what is installed here and which backends would work",
        "What is installed here, which backends would work, and which one a run that names none takes. Every service "
        "with a key or an address is asked for its models, which is free. Exit status 1 when the default, or the "
        "backend that is named, cannot work.",
    ),
    "cache": Command(
        "look at or empty the response cache",
        "The answers that runs with --cache keep on disk.",
    ),
    "simulate": Command(
        "serve a simulated engine, to try and plan runs without a GPU",
        "Serve a simulated inference engine over HTTP: its answers and its timings are made up.",
    ),
    "fleet": Command(
        "wait for, look at, measure and bundle many servers",
        "Many servers, named in a hostfile: wait until they are up, see how they are, measure what they can take, "
        "or give them one address.",
    ),
    "ticks": Command(
        "serve agents that decide at every tick of a world",
        "Agents that act in ticks. serve: over HTTP, for a game or a simulation.",
    ),
    "completion": Command(
        "completion for bash, zsh or fish",
        'Print what makes a shell complete this command\'s words. bash: eval "$(batch-agent completion bash)"; zsh: '
        "the same, after compinit; fish: batch-agent completion fish | source.",
    ),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # argparse would exit with 2, which here says that rows failed. A usage of many lines would hide the message.
        usage, hint = self.format_usage(), ""
        if usage.count("\n") > MOST_USAGE_LINES:
            usage, hint = "", f". All flags: {self.prog} --help"
        self.exit(RUN_FAILED, f"{usage}batch-agent: {masked(message)}{hint}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    ensure_streams()
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return _do(_parse(arguments))
    finally:
        flush_words()


def _do(options: argparse.Namespace) -> int:
    try:
        command: Callable[[argparse.Namespace], int] = _function(COMMANDS[options.command].does, options.command)
        return command(options)
    except InternalError:
        raise
    except BatchAgentError as error:
        say(f"batch-agent: {masked(harmless(str(error)))}")
        return UNREACHABLE if isinstance(error, RunUnreachable) else RUN_FAILED
    except BrokenPipeError:  # `| head` has seen enough of a plan
        discard(sys.stdout)
        return SIGNALLED + signal.SIGPIPE
    except KeyboardInterrupt:
        return SIGNALLED + signal.SIGINT


def build_parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser, and those of the commands, which have no arguments yet: ``add_arguments`` gives them theirs."""
    parser = _Parser(prog="batch-agent", description="Run one task over many inputs with tool-using LLM agents.")
    parser.add_argument("--version", action="version", version=f"batch-agent {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {
        name: commands.add_parser(name, help=command.help, description=command.description)
        for name, command in COMMANDS.items()
    }
    return parser, parsers


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    add: Callable[[argparse.ArgumentParser], None] = _function(COMMANDS[name].adds, name)
    add(parser)


def _function(reference: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = resolve_name(f"batch_agent.cli.{reference.format(name)}")
    return function


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser, parsers = build_parser()
    if not arguments:
        parser.print_help(sys.stderr)
        parser.exit(RUN_FAILED)
    name = next((argument for argument in arguments if not argument.startswith("-")), "")
    if name in COMMANDS:
        add_arguments(name, parsers[name])
    elif name:
        parser.error(f"there is no command {name!r}{_meant(name, {command: command for command in COMMANDS})}")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse(unknown[0], name, parsers[name])
    return options


def _refuse(argument: str, name: str, parser: argparse.ArgumentParser) -> NoReturn:
    """Answers an unknown argument with the nearest flag; where options can be set, with the way to set one."""
    known = {flag: flag for action in parser._actions for flag in action.option_strings}
    if not argument.startswith("--") or SETTING not in known:
        parser.error(f"there is no argument {argument}{_meant(argument, known)}")
    meant = _meant(argument, {**_settings(), **known}) or "."
    hint = f"Options without a flag: {SETTING} NAME=VALUE. All flags: batch-agent {name} --help"
    parser.exit(RUN_FAILED, f"batch-agent: there is no argument {masked(argument)}{meant} {hint}\n")


def _settings() -> Mapping[str, str]:
    """How each option is given on the command line, by its name, its older name, and what other programs call it."""
    from batch_agent.cli.spec.arguments import FLAGS, flag_name
    from batch_agent.spec import OLD_NAMES, BatchSpec

    given = {
        option: flag_name(option) if option in FLAGS else f"{SETTING} {option}=VALUE"
        for option in BatchSpec.model_fields
    }
    given |= {"inputs": "--inputs", "run_dir": "--run-dir", "resume": "--resume", "api_key": "--env-file"}
    names = {**given, **{old: given[new] for old, new in {**OLD_NAMES, **ELSEWHERE}.items()}}
    return {f"--{option.replace('_', '-')}": how for option, how in names.items()}


def _meant(given: str, known: Mapping[str, str]) -> str:
    """What the nearest of the known words stands for. Hyphens at the beginning make no word like another."""
    words = {word.lstrip("-"): meaning for word, meaning in known.items()}
    near = difflib.get_close_matches(given.partition("=")[0].lstrip("-"), words, n=1)
    return f"; did you mean {words[near[0]]}?" if near else ""
