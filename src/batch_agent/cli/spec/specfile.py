"""Spec files: the options of BatchSpec in YAML, TOML or JSON.

The names are those of the API. References stand for values that a file cannot hold: ``{file: prompt.txt}`` for a
prompt, a path for inputs, ``module:name`` for a function, tool or class. Paths and modules are resolved in the
directory of the spec file. BatchSpec checks the values; this module adds the file, and the line if known, to errors.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import sys
import tomllib
import traceback
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from batch_agent.agent.cascade import entries_of
from batch_agent.cli.spec.rows import STDIN
from batch_agent.errors import SpecError, about, explained, meant
from batch_agent.files.compression import format_of
from batch_agent.files.gold import is_gold_file
from batch_agent.files.read import KNOWN
from batch_agent.foreign import describe
from batch_agent.option import NotSettable, check_names, kinds, notes
from batch_agent.record.people import is_run
from batch_agent.spec import MCP, OLD_NAMES, BatchSpec
from batch_agent.tools.base import Tool, tools_at
from batch_agent.tools.mcp.address import expanded
from batch_agent.trust.escalate import is_reference

STAGES = "stages"  # key of a pipeline's stages
REFERENCE = re.compile(r"[\w.]+:[\w.]+")
EXPANDED = ("headers", "env")  # of an MCP server: often secrets, so ${NAME} is replaced from the environment

LINE = re.compile(r"(?:export\s+)?(?P<name>[A-Za-z_]\w*)\s*=\s*(?P<value>.*)")


@dataclass(frozen=True, slots=True)
class SpecFile:
    """The options of a spec file, with references not yet resolved. Without a ``text`` there is no file: the options
    come from the command line, and references are resolved in the directory of ``path``."""

    path: Path
    text: str
    options: Mapping[str, object]

    @contextmanager
    def named(self) -> Iterator[None]:
        """Add the name of this file to a SpecError that is raised in the block."""
        try:
            yield
        except SpecError as error:
            raise self.error(str(error)) from None

    def error(self, message: str) -> SpecError:
        """Return a SpecError that names this file and the line of the option in the message."""
        if not self.text:  # there is no file
            return SpecError(message)
        line = self._line(message)
        return SpecError(f"{self.path}{f' line {line}' if line else ''}: {message}")

    def _line(self, message: str) -> int | None:
        # Messages begin with the option, or with "there is no option '…'".
        option = next((word for word in re.findall(r"\w+", message)[:5] if word in self.options), None)
        if option is None:
            return None
        pattern = re.compile(rf"""\s*\{{?\s*["']?{option}["']?\s*[:=]""")
        lines = [number for number, line in enumerate(self.text.split("\n"), start=1) if pattern.match(line)]
        return lines[0] if len(lines) == 1 else None

    def resolve(self, overrides: Mapping[str, object]) -> BatchSpec:
        """Return the spec, with the references of the file resolved. ``overrides`` replace options of the file."""
        options = {**self.followed(leaving_out=overrides), **overrides}
        try:
            return BatchSpec(**options)
        except SpecError as error:
            if re.match(r"\w*", str(error))[0] in overrides:  # type: ignore[index]
                raise  # the error is about an override, not about the file
            raise self.error(str(error)) from None

    def followed(self, *, leaving_out: Container[str] = ()) -> dict[str, Any]:
        """Return the options with their references resolved."""
        own = {name: value for name, value in self.options.items() if name not in leaving_out}
        with self.named():
            return self.follow(own)

    def follow(self, options: Mapping[str, object]) -> dict[str, Any]:
        """Return the given options with their references resolved. A SpecError does not name the file."""
        resolvers: dict[str, Callable[[object], object]] = {
            **{name: self._text for name in BatchSpec.model_fields if kinds(BatchSpec, name) == {str}},
            **{name: self._directory for name in BatchSpec.model_fields if Path in kinds(BatchSpec, name)},
            "prompt": self._text,
            "tools": self._tools,
            "output_schema": self._schema,
            "runtime": self._runtime,
            "worker": self._worker,
            "gold": self._gold,
            "score": self._judges,
            "vote": self._vote,
            "cascade": self._cascade,
            "escalate": self._rule,
        }
        followed = dict(options)
        for name in resolvers.keys() & options.keys():
            with about(f"{name}: "):
                followed[name] = resolvers[name](options[name])
        return followed

    def inputs_path(self) -> str | None:
        """Return the path of the inputs; None if the file lists them or has none."""
        inputs = self.options.get("inputs")
        if not isinstance(inputs, str):
            return None
        return inputs if inputs == STDIN else str(self.path.parent / inputs)

    def _text(self, value: object) -> object:
        if not (isinstance(value, dict) and value.keys() == {"file"}):
            return value
        return read_text(self.path.parent / str(value["file"]))

    def _directory(self, value: object) -> object:
        return self.path.parent / value if isinstance(value, str | Path) else value

    def _gold(self, value: object) -> object:
        beside = isinstance(value, str) and is_run(self.path.parent / value)
        return self._directory(value) if is_gold_file(value) or beside else value

    def _judges(self, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        return {name: self.imported(each) if isinstance(each, str) else each for name, each in value.items()}

    def _runtime(self, value: object) -> object:
        if not (isinstance(value, Mapping) and "working_dir" in value):
            return value
        return {**value, "working_dir": self._directory(value["working_dir"])}

    def _tools(self, value: object) -> object:
        if not isinstance(value, list):
            raise SpecError('must be a list of names, such as ["read_file", "mytools:look_up"]')
        return [self._tool(item) for item in value]

    def _tool(self, item: object) -> object:
        if isinstance(item, dict) and "mcp" in item:
            return _mcp_entry(item, self.path.parent)
        if not isinstance(item, str):
            raise SpecError(f"{item!r} is not the name of a tool")
        if item.startswith(MCP):
            return _mcp_entry({"mcp": item.removeprefix(MCP)}, self.path.parent)
        return self.imported(item) if ":" in item else item

    def _schema(self, value: object) -> object:
        if isinstance(value, str):
            if ":" not in value:
                raise SpecError(f"{value!r} must be a JSON schema or module:Class")
            return self.imported(value)
        return value

    def _worker(self, value: object) -> object:
        worker = self.imported(value) if isinstance(value, str) else value
        if worker is not None and not callable(worker):
            raise SpecError(f"{value!r} must be a function, as module:function")
        return worker

    def _vote(self, value: object) -> object:
        if isinstance(value, Mapping):
            return {name: self._vote(how) for name, how in value.items()}
        return self._worker(value) if isinstance(value, str) and ":" in value else value

    def _cascade(self, value: object) -> object:
        """Return the entries of a cascade, which may be in a file of their own, with their references resolved."""
        if isinstance(value, str) and not value.lstrip().startswith("["):
            value = self.path.parent / value
        return [each if isinstance(each, str) else self.follow(each) for each in entries_of(value)]

    def _rule(self, value: object) -> object:
        return self._worker(value) if isinstance(value, str) and is_reference(value) else value

    def imported(self, reference: str) -> object:
        if not REFERENCE.fullmatch(reference):
            raise SpecError(f"{reference!r} must be module:name")
        module_name, _, names = reference.partition(":")
        value: object = _import_module(module_name, self.path.parent)
        for name in names.split("."):
            try:
                value = getattr(value, name)
            except AttributeError:
                known = (each for each in dir(value) if not each.startswith("_"))
                raise SpecError(f"there is no {names} in the module {module_name}{meant(name, known)}") from None
        return value


def _mcp_entry(entry: Mapping[str, object], beside: Path) -> list[Tool]:
    """Return the tools of an entry. Files and server commands are resolved in the directory ``beside``."""
    server = entry["mcp"]
    options = {name: value for name, value in entry.items() if name != "mcp"}
    in_file = isinstance(server, str) and server.endswith(".json")
    known = inspect.signature(Tool.mcp_file if in_file else Tool.mcp).parameters
    for name in options:
        if name not in list(known)[1:]:
            raise SpecError(f"there is no option {name!r} of an MCP server; there are {', '.join(list(known)[1:])}")
    if in_file:
        return tools_at(str(beside / str(server)), **options)
    if not isinstance(server, str | list):
        raise SpecError(f"{server!r} is not an MCP server")
    for name in EXPANDED:
        values = options.get(name)
        if isinstance(values, Mapping):
            options[name] = {key: expanded(value, os.environ) for key, value in values.items()}
    is_url = isinstance(server, str) and not server.startswith("stdio:")
    if not is_url:
        options["cwd"] = beside / str(options.get("cwd", ""))
    return tools_at(server, **options) if isinstance(server, str) else Tool.mcp(server, **options)  # type: ignore[arg-type]


def read_specfile(path: Path) -> SpecFile:
    """Return the spec file. A SpecError names an option that no batch has."""
    file = read_mapping(path)
    with file.named():
        check_names(BatchSpec, file.options.keys() - {STAGES, *OLD_NAMES}, OLD_NAMES)
    for name, refused in notes(BatchSpec, NotSettable).items():
        if name in file.options and refused.in_files:
            raise file.error(f"{name} cannot be given in a file: {refused.reason}")
    return file


def read_mapping(path: Path) -> SpecFile:
    """Return a file of options, whatever their names are."""
    parsers: dict[str, Callable[[str], object]] = {
        ".yaml": _parse_yaml,
        ".yml": _parse_yaml,
        ".toml": _parse_toml,
        ".json": _parse_json,
    }
    parse = parsers.get(path.suffix.lower())
    if parse is None:
        ends = f"a spec file ends in {', '.join(parsers)}"
        if format_of(path)[0] in KNOWN:
            ends = f"it holds rows, and {ends}. Say what to do with a row: batch-agent run --task 'Sum up {{…}}' {path}"
        raise SpecError(f"{path}: {ends}")
    text = read_text(path, "the spec")
    try:
        with about(f"{path} "):
            options = parse(text)
    except RecursionError:
        raise SpecError(f"{path} is nested too deeply") from None
    if options is None:
        raise SpecError(f"{path} is empty; it needs at least a task")
    if not isinstance(options, dict):
        kind = {list: "a list", str: "text", bool: "true or false"}.get(type(options), "a number")
        raise SpecError(f"{path} must be a mapping of options, such as task: …, not {kind}")
    wrong = next((key for key in options if not isinstance(key, str)), None)
    if wrong is not None:
        raise SpecError(f"{path}: {wrong!r} is not the name of an option")
    return SpecFile(path, text, options)


def _parse_yaml(text: str) -> object:
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_twice(node)
        value: object = loader.construct_document(node)
        return value
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise SpecError(f"line {mark.line + 1 if mark else '?'} is not YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError) as error:  # a control character; a date that does not exist
        raise SpecError(f"is not YAML: {' '.join(str(error).split())}") from None
    finally:
        if loader is not None:
            loader.dispose()


def _refuse_twice(root: yaml.Node) -> None:
    """Raise an error for duplicate keys, of which the parser would use the last. A key may override a merged one."""
    waiting, seen = [root], {id(root)}
    while waiting:
        node = waiting.pop()
        parts: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            keys: set[tuple[str, str]] = set()
            for key, value in node.value:
                parts += key, value
                name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
                if name in keys:
                    raise yaml.MarkedYAMLError(problem=f"{key.value!r} is given twice", problem_mark=key.start_mark)
                if name is not None:
                    keys.add(name)
        elif isinstance(node, yaml.SequenceNode):
            parts = node.value
        waiting += [part for part in parts if id(part) not in seen]
        seen.update(map(id, parts))


def _parse_toml(text: str) -> object:
    try:
        return tomllib.loads(text) or None
    except ValueError as error:
        raise SpecError(f"is not TOML: {error}") from None


def _parse_json(text: str) -> object:
    if not text.strip():
        return None
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise SpecError(f"line {error.lineno} is not JSON: {error.msg}") from None
    except SpecError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise SpecError(f"is not JSON: {error}") from None


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value: dict[str, object] = {}
    for name, item in pairs:
        if name in value:
            raise SpecError(f"has {name!r} twice")
        value[name] = item
    return value


def _import_module(name: str, beside: Path) -> object:
    directory = str(beside.resolve())
    if directory not in sys.path:
        sys.path.insert(0, directory)  # it stays there: a tool may import modules of its directory when it is called
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            modules = (path.stem for path in beside.glob("*.py"))
            where = f"in {directory} or among the installed packages"
            raise SpecError(f"there is no module {name} {where}{meant(name, modules)}") from None
        raise SpecError(_import_failure(name, error)) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # includes SystemExit of a script  # noqa: BLE001
        raise SpecError(_import_failure(name, error)) from None


def _import_failure(name: str, error: BaseException) -> str:
    """Return the message about an exception in the user's module, with its line and without our own frames."""
    message = f"importing {name} failed: {describe(error)}"
    if isinstance(error, SyntaxError):  # its message has the line; its last frame is in importlib
        return message
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{message} ({Path(frame.filename).name} line {frame.lineno})"


def read_text(path: Path, what: str = "") -> str:
    """Return the text of a file, without a byte order mark. Raises a SpecError that calls the file ``what``."""
    try:
        with explained(f"cannot read {f'{what} ' if what else ''}{path}"):
            return path.read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise SpecError(f"{path} is not UTF-8") from None


def load_env_file(path: Path) -> None:
    """Set the variables of the file. A SpecError names the wrong line but does not quote it: it may hold a secret."""
    for name, value in list(_variables(read_text(path, "the env file"), path)):
        os.environ.setdefault(name, value)


def _variables(text: str, path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = LINE.fullmatch(line)
        if match is None:
            raise SpecError(f"{path} line {number} is not NAME=VALUE")
        yield match["name"], _unquoted(match["value"])


def _unquoted(value: str) -> str:
    """Return the value without its quotes. In an unquoted value, `` #`` starts a comment."""
    quoted = re.fullmatch(r"""(["'])(.*)\1(?:\s+#.*)?""", value)
    return quoted[2] if quoted else re.split(r"\s+#", value, maxsplit=1)[0].rstrip()
