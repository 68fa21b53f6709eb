"""The command line: selects the command, and turns errors into messages and exit statuses.

Each command imports only the modules that it needs, so that help texts appear without loading the engine.
"""

from __future__ import annotations

import argparse
import difflib
import gc
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, NoReturn

from batch_agent.cli.exit_status import RUN_FAILED, SIGNALLED, UNREACHABLE
from batch_agent.cli.output.streams import discard, ensure_streams, flush_words, say
from batch_agent.errors import BatchAgentError, InternalError, RunUnreachable, SpecError
from batch_agent.observe.text import harmless, harmless_lines
from batch_agent.record.address import masked
from batch_agent.version import __version__


@dataclass(frozen=True, slots=True)
class Command:
    """A command of ``batch-agent``. ``adds`` and ``does`` name its two functions below ``cli``. By default they are in
    the module of the same name: ``add_NAME_arguments`` takes the parser, and ``NAME_command`` the parsed arguments."""

    help: str
    description: str
    adds: str = "commands.{0}:add_{0}_arguments"
    does: str = "commands.{0}:{0}_command"


SETTING = "--set"
MOST_USAGE_LINES = 8
# Names of options in other programs.
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
        "write an example: a spec, a schema, a tool and rows",
        "Write example files: a spec, its output schema, a tool and a few rows. No file is overwritten.",
    ),
    "run": Command(
        "run a task over rows, from a spec file or from flags",
        "Run the task of a spec file, or of --task, over its inputs.",
        adds="spec.arguments:add_run_arguments",
    ),
    "plan": Command(
        "show what a run would send and cost",
        "Show what a run with the same arguments would send: the first message, the tokens that rows share, and the "
        "cost. Sends nothing. The same as run --dry-run.",
        adds="spec.arguments:add_plan_arguments",
        does="commands.run:run_command",
    ),
    "work": Command(
        "work on a run that another process feeds",
        "Join a run in Redis from any machine, and work on its rows until the run is done. Exit status: 0 if the run "
        "is done or the worker was asked to leave; 2 if the worker cannot work on this run, or the URL is wrong; 3 if "
        "there is no run, or no process feeds it.",
    ),
    "resume": Command(
        "continue a run that was interrupted",
        "Continue a recorded run. Finished rows are not sent again; failed rows are. Options given here replace the "
        "options that the run was started with.",
        adds="spec.arguments:add_resume_arguments",
        does="commands.run:resume_command",
    ),
    "retry-failed": Command(
        "retry the failed rows of a run",
        "Retry the failed rows of a recorded run, and finish its unfinished rows.",
        adds="spec.arguments:add_retry_arguments",
        does="commands.run:resume_command",
    ),
    "status": Command(
        "show the progress of a run",
        "Show the progress of a recorded run, also while another process works on it.",
    ),
    "control": Command(
        "pause, resize, drain or cancel a run, or one of its rows",
        "Control a run that another process on this machine works on.",
    ),
    "view": Command(
        "show runs in a browser",
        "Serve a page that shows a run, compares two runs, or lists all runs of a directory, during and after a run.",
    ),
    "review": Command(
        "let people judge rows of a run",
        "Show rows of a run to a person, who judges them: random rows of an audit, without the answers of the models, "
        "and rows that failed or were escalated, with them. At the terminal, or with --page in a browser. Works while "
        "the run works, and for several reviewers at once.",
    ),
    "import-review": Command(
        "take the answers of people from a table",
        "Take the answers in a table that export --review wrote. Exit status 2 if a row is refused.",
        adds="commands.review:add_import_review_arguments",
        does="commands.review:import_review_command",
    ),
    "report": Command(
        "write a run as one HTML file",
        "Write a run as one HTML file, which needs no server and no network.",
    ),
    "runs": Command(
        "list recorded runs",
        "List the runs that are recorded in a directory, the latest first.",
        adds="commands.status:add_runs_arguments",
        does="commands.status:runs_command",
    ),
    "show": Command(
        "show the conversations of a recorded run",
        "Show rows of a recorded run as text: prompts, answers, tool calls with their results, times and tokens. By "
        "default, the first row.",
    ),
    "compare": Command(
        "compare runs over the same rows",
        "Compare runs, or files of results, over the same rows: what differs, and with gold, which rows became right "
        "and which became wrong, with exact tests.",
    ),
    "export": Command(
        "write the results of a run as a table or as JSON lines",
        "Write the results of a run, finished or not, to a file, in input order.",
    ),
    "score": Command(
        "show how many answers are right",
        "Compare the answers of a run, finished or not, or of a file of results with right answers, and print how many "
        "are right, with exact intervals. Exit status 6 if what --require asks is not met.",
    ),
    "certify": Command(
        "write or check the certificate of a promise",
        "Write the certificate of a run whose promise is kept, or with --check compare one with the record. Exit "
        "status 1 if certificate and record differ, with the first difference; 6 if the promise is not kept.",
    ),
    "copy": Command(
        "copy a run from Redis to a directory, or back",
        "Copy a recorded run that no process works on: from Redis to a new directory, or from a directory to Redis "
        "under a new name.",
    ),
    "delete": Command(
        "delete a run from Redis",
        "Delete all keys of a run from Redis. A run that a process works on is not deleted.",
        adds="commands.copy:add_delete_arguments",
        does="commands.copy:delete_command",
    ),
    "tools": Command(
        "list the tools of a spec and of its MCP servers",
        "List the tools that agents can call, with the descriptions that the model gets. MCP servers are started, or "
        "connected to, to list their tools.",
    ),
    "mcp": Command(
        "serve batches to coding agents, as an MCP server",
        "Run an MCP server on standard input and output. With its tools, a coding agent plans, starts and monitors "
        "batches, and reads their results.",
    ),
    "models": Command(
        "list and download the models of local://",
        "List the models that local:// can use on this machine: those in the cache, and those that it can download.",
    ),
    "doctor": Command(
        "show what is installed and which backends work",
        "Show what is installed, which backends work, and which one is the default. Each provider with a key or an "
        "address gets a free request for its list of models. With --thorough it asks one server many small questions "
        "and prints what works and what is missing. Exit status 1 if the default backend, or the given one, does not "
        "work.",
    ),
    "cache": Command(
        "list or delete the answers in the response cache",
        "Manage the answers that runs with --cache store on disk.",
    ),
    "simulate": Command(
        "serve a simulated engine, to test and plan runs without a GPU",
        "Serve a simulated inference engine over HTTP. Its answers and timings are invented.",
    ),
    "serve": Command(
        "serve the batch APIs of OpenAI and Anthropic on your own servers",
        "Serve the batch APIs of OpenAI and Anthropic, and interactive requests, in front of any backend. Batches "
        "survive restarts, and interactive requests go first.",
    ),
    "fleet": Command(
        "wait for, inspect, measure and proxy many servers",
        "Work with the servers of a hostfile: wait until they are up, show their status, measure their throughput, or "
        "serve them at one address.",
    ),
    "ticks": Command(
        "serve agents that decide at each tick of a simulation",
        "Serve agents that decide at each tick of a game or a simulation, over HTTP.",
    ),
    "completion": Command(
        "print the completion script for bash, zsh or fish",
        'Print the completion script of a shell. bash: eval "$(batch-agent completion bash)"; zsh: the same, after '
        "compinit; fish: batch-agent completion fish | source.",
    ),
}


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)  # a misspelt flag is refused, and never read as another one

    def error(self, message: str) -> NoReturn:
        # argparse exits with 2, which here means that rows failed. A long usage text would hide the message.
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
        gc.freeze()  # what was imported stays: the garbage collector need not look at it again and again
        gc.set_threshold(20_000, 20, 20)  # a run makes no cycles, and a result is dozens of objects
        return command(options)
    except InternalError:
        raise
    except BatchAgentError as error:
        safe = harmless_lines if isinstance(error, SpecError) else harmless  # one may show a place in a text
        text, notes = masked(safe(str(error))), getattr(error, "__notes__", ())  # how to continue
        text += "" if not notes or text.endswith((".", "?", "!")) else "."
        say(" ".join([f"batch-agent: {text}", *notes]), wrap=not notes)
        return UNREACHABLE if isinstance(error, RunUnreachable) else RUN_FAILED
    except BrokenPipeError:  # the reader, such as `| head`, has closed the pipe
        discard(sys.stdout)
        return SIGNALLED + signal.SIGPIPE
    except KeyboardInterrupt:
        return SIGNALLED + signal.SIGINT


def build_parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser and the parsers of the commands. ``add_arguments`` adds the arguments of a command."""
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
        _refuse_unknown_flags(arguments, name, parsers[name])
    elif name:
        parser.error(f"there is no command {name!r}{_meant(name, {command: command for command in COMMANDS})}")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        _refuse(unknown[0], name, parsers[name])
    return options


def _refuse_unknown_flags(arguments: Sequence[str], name: str, parser: argparse.ArgumentParser) -> None:
    """Exit with an error about an unknown flag. argparse itself would first complain about the word behind it."""
    known = {"--", "--version", *_flags(parser)}
    for argument in arguments:
        if argument == "--":
            return
        if argument.startswith("--") and argument.partition("=")[0] not in known and " " not in argument:
            _refuse(argument, name, parser)


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the flags of a command and of its actions."""
    for action in parser._actions:
        yield from action.option_strings
        for inner in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            yield from _flags(inner)


def _refuse(argument: str, name: str, parser: argparse.ArgumentParser) -> NoReturn:
    """Exit with an error about an unknown argument. It names the most similar flag, and ``--set`` if there is one."""
    known = {flag: flag for flag in _flags(parser)}
    if not argument.startswith("--") or SETTING not in known:
        parser.error(f"there is no argument {argument}{_meant(argument, known)}")
    meant = _meant(argument, {**_settings(), **known}) or "."
    hint = f"Options without a flag: {SETTING} NAME=VALUE. All flags: batch-agent {name} --help"
    parser.exit(RUN_FAILED, f"batch-agent: there is no argument {masked(argument)}{meant} {hint}\n")


def _settings() -> Mapping[str, str]:
    """Return how each option is given on the command line, by the option's name, its earlier name, and its name
    elsewhere."""
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
    """Return a hint with the known word that is most similar to ``given``, or "". Leading hyphens are ignored."""
    words = {word.lstrip("-"): meaning for word, meaning in known.items()}
    near = difflib.get_close_matches(given.partition("=")[0].lstrip("-"), words, n=1)
    return f"; did you mean {words[near[0]]}?" if near else ""
