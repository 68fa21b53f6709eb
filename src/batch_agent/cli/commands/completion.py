"""``batch-agent completion``: scripts that complete commands and flags in bash, zsh and fish.

They are made from the parsers, so they have exactly the existing flags. A script has a fixed list of words: completing
does not start Python.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from batch_agent.cli.exit_status import ALL_OK
from batch_agent.cli.main import COMMANDS, add_arguments, build_parser
from batch_agent.cli.output.streams import put


@dataclass(frozen=True, slots=True)
class ShellFlag:
    names: tuple[str, ...]
    help: str
    choices: tuple[str, ...]
    takes_value: bool


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help="the shell")


def completion_command(options: argparse.Namespace) -> int:
    _, parsers = build_parser()
    flags: dict[str, list[ShellFlag]] = {}
    actions: dict[str, list[str]] = {}
    for name, parser in parsers.items():
        add_arguments(name, parser)
        flags[name] = list({flag.names: flag for flag in _flags(parser)}.values())
        actions[name] = [word for nested in _nested(parser) for word in nested.choices]
    put({"bash": _bash, "zsh": _zsh, "fish": _fish}[options.shell](flags, actions))
    return ALL_OK


def _nested(parser: argparse.ArgumentParser) -> Iterator[argparse._SubParsersAction[argparse.ArgumentParser]]:
    """Yield the subcommands of a command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield action


def _flags(parser: argparse.ArgumentParser) -> Iterator[ShellFlag]:
    """Yield the flags of a command and of its subcommands. Too many are harmless."""
    for nested in _nested(parser):
        for inner in nested.choices.values():
            yield from _flags(inner)
    for action in parser._actions:
        if action.option_strings and action.help is not argparse.SUPPRESS:
            choices = tuple(map(str, action.choices or ()))
            text = (action.help or "").partition("; ")[0].replace("%(default)s", str(action.default))
            yield ShellFlag(tuple(action.option_strings), text, choices, action.nargs != 0)


def _bash(flags: Mapping[str, list[ShellFlag]], actions: Mapping[str, list[str]]) -> str:
    """Return the script for bash. It completes flags after ``-``, values of flags with choices, and file names."""
    cases = "\n".join(
        f"        {name}) flags={shlex.quote(' '.join(word for flag in known for word in flag.names))} ;;"
        for name, known in flags.items()
    )
    values = "\n".join(
        f"        {shlex.quote(f'{name} {word}')}) values={shlex.quote(' '.join(flag.choices))} ;;"
        for name, known in flags.items()
        for flag in known
        for word in flag.names
        if flag.choices
    )
    values += "".join(
        f"\n        {shlex.quote(f'{name} {name}')}) values={shlex.quote(' '.join(words))} ;;"
        for name, words in actions.items()
        if words
    )
    return f"""\
_batch_agent() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" flags="" values=""
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W {shlex.quote(" ".join([*COMMANDS, "--help", "--version"]))} -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}} $before" in
{values}
    esac
    if [ -n "$values" ]; then
        COMPREPLY=($(compgen -W "$values" -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    case "$word" in
        -*) COMPREPLY=($(compgen -W "$flags" -- "$word")) ;;
    esac
}}
complete -o bashdefault -o default -F _batch_agent batch-agent"""


def _zsh(flags: Mapping[str, list[ShellFlag]], actions: Mapping[str, list[str]]) -> str:
    commands = "\n".join(f"        {_pair(name, command.help)}" for name, command in COMMANDS.items())
    cases = "\n".join(
        f"        {name})\n            _arguments \\\n"
        + " \\\n".join(f"                {spec}" for flag in known for spec in _zsh_flag(flag))
        + (f" \\\n                '1:action:({' '.join(actions[name])})'" if actions[name] else "")
        + " \\\n                '*:file:_files'\n            ;;"
        for name, known in flags.items()
    )
    return f"""\
#compdef batch-agent
_batch_agent() {{
    local -a commands
    commands=(
{commands}
    )
    if (( CURRENT == 2 )); then
        _describe command commands
        return
    fi
    local command="$words[2]"
    shift words
    (( CURRENT-- ))
    case "$command" in
{cases}
    esac
}}
compdef _batch_agent batch-agent"""


def _pair(name: str, text: str) -> str:
    return shlex.quote(f"{name}:{text.replace(':', ' ')}")


def _zsh_flag(flag: ShellFlag) -> Iterator[str]:
    text = flag.help.replace("[", "(").replace("]", ")").replace(":", " ")
    value = ""
    if flag.takes_value:
        value = f":value:({' '.join(flag.choices)})" if flag.choices else ":value:_files"
    for name in flag.names:
        yield shlex.quote(f"{name}[{text}]{value}")


def _fish(flags: Mapping[str, list[ShellFlag]], actions: Mapping[str, list[str]]) -> str:
    lines = [
        f"complete -c batch-agent -n __fish_use_subcommand -f -a {name} -d {_fish_quoted(command.help)}"
        for name, command in COMMANDS.items()
    ]
    for name, inner in actions.items():
        if inner:
            here = f"'__fish_seen_subcommand_from {name}; and not __fish_seen_subcommand_from {' '.join(inner)}'"
            lines.append(f"complete -c batch-agent -n {here} -f -a '{' '.join(inner)}'")
    for name, known in flags.items():
        for flag in known:
            words = " ".join(
                f"-l {word.removeprefix('--')}" if word.startswith("--") else f"-s {word.removeprefix('-')}"
                for word in flag.names
            )
            value = (
                f" -x -a {_fish_quoted(' '.join(flag.choices))}" if flag.choices else " -r" if flag.takes_value else ""
            )
            here = f"-n '__fish_seen_subcommand_from {name}'"
            lines.append(f"complete -c batch-agent {here} {words}{value} -d {_fish_quoted(flag.help)}")
    return "\n".join(lines)


def _fish_quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
