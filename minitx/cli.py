"""The command line of every command: a dataclass, YAML files over it, flags over those.

    --config configs/x.yaml --kernel triton --model.n_layer 2

A user's mistake is one line on stderr and exit code 2, never a stack trace; MINITX_DEBUG=1 shows
the trace too.
"""

import argparse
import dataclasses
import errno
import itertools
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import yaml
from jsonargparse import (
    ArgumentError,
    ArgumentParser,
    DefaultHelpFormatter,
    set_parsing_settings,
)

from minitx.kernels import KernelUnavailableError

# The text under a field is its --help.
set_parsing_settings(docstring_parse_attribute_docstrings=True)

Config = TypeVar("Config")

EXIT_OUT_OF_MEMORY = 1
EXIT_USER_ERROR = 2
EXIT_PARITY_FAILED = 3
EXIT_NON_FINITE = 5  # 4 is eval.py's: a later token moves an earlier loss
EXIT_NOT_WRITTEN = 6
# As jsonargparse names them, and as the line about a mistake does.
TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list": "a list as [1,2]",
    "NoneType": "null",
}
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


class UserError(ValueError):
    """A mistake the user can mend; the message says what was wrong, what was expected, what to
    do."""


class RunStopped(RuntimeError):
    """Work that was under way and cannot go on: the line that says why, and the exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class _HelpFormatter(DefaultHelpFormatter):
    """Leaves a description its paragraphs, and what is indented, such as commands, its lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        paragraphs = text.strip().split("\n\n")
        return "\n\n".join(p if p.startswith(" ") else fill(p, width, indent) for p in paragraphs)


def make_parser(config_class: type, prog: str, description: str) -> ArgumentParser:
    parser = ArgumentParser(
        prog=prog,
        description=description,
        exit_on_error=False,
        formatter_class=_HelpFormatter,
    )
    if "config" not in _setting_names(config_class):
        parser.add_argument(
            "--config", action="config", help="YAML file with any of the settings below"
        )
    parser.add_class_arguments(config_class)
    return parser


def parse_config(
    config_class: type[Config],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    default_config: Path | None = None,
) -> Config:
    """argv -> an instance of config_class. Raises UserError with one line for anything unknown or
    bad.

    default_config: the YAML file to start from when argv names none.
    """
    parser = make_parser(config_class, prog, description)
    argv = _with_true(list(argv), _switches(config_class))
    if default_config is not None and not any(a.split("=")[0] == "--config" for a in argv):
        argv = ["--config", str(default_config), *argv]
    for path in _config_paths(argv):
        _check_file(path, config_class)
    try:
        namespace = parser.parse_args(argv)
        namespace = parser.instantiate(namespace)
    except ArgumentError as error:
        raise UserError(_one_line(_in_words(str(error)))) from error
    names = _setting_names(config_class)
    return config_class(**{k: v for k, v in vars(namespace).items() if k in names})


def _check_file(path: str, config_class: type) -> None:
    """Raises UserError, naming the file, for what the parser does not tell in words of ours, or
    passes over."""
    if not os.path.isfile(path):
        raise UserError(f"--config {path}: no such file")
    try:
        settings = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"--config {path}: not YAML: {_one_line(str(error))}") from error
    if not isinstance(settings, dict):
        raise UserError(f"--config {path}: no settings in it; expected lines as 'max_steps: 100'")
    _check_groups(settings, config_class, path)


def _check_groups(settings: dict, config_class: type, path: str, prefix: str = "") -> None:
    """Groups that are empty: unknown ones, and those whose settings are all commented out."""
    fields = {field.name: field.type for field in dataclasses.fields(config_class)}
    for name, value in settings.items():
        kind = fields.get(name)
        if value == {} and kind is None:
            raise UserError(f"--config {path}: unknown setting {prefix}{name}; --help lists all")
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            continue
        if isinstance(value, dict):
            _check_groups(value, kind, path, f"{prefix}{name}.")
        else:
            got = "nothing" if value is None else repr(value)
            raise UserError(
                f"--config {path}: {prefix}{name} is a group of settings, got {got}; give some of "
                "them, or leave it out"
            )


def _setting_names(config_class: type) -> set[str]:
    return {field.name for field in dataclasses.fields(config_class)}


def _switches(config_class: type, prefix: str = "--") -> set[str]:
    """Flags of the boolean settings, groups included."""
    flags: set[str] = set()
    for field in dataclasses.fields(config_class):
        kind = field.type
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            flags |= _switches(kind, f"{prefix}{field.name}.")
        elif kind is bool:
            flags.add(prefix + field.name)
    return flags


def _with_true(argv: list[str], switches: set[str]) -> list[str]:
    """A switch that stands alone, `--compile`, means true."""
    completed = []
    for arg, following in itertools.zip_longest(argv, argv[1:], fillvalue="--"):
        completed.append(arg)
        if arg in switches and following.startswith("-"):
            completed.append("true")
    return completed


def _config_paths(argv: list[str]) -> list[str]:
    paths = [value for flag, value in itertools.pairwise(argv) if flag == "--config"]
    return paths + [a.split("=", 1)[1] for a in argv if a.startswith("--config=")]


def _in_words(message: str) -> str:
    """What jsonargparse says of a value of another type: the flag, what was expected, what was
    given. Any other message as it is."""
    # Of a whole group on the command line, as --optim={lr: x}, its setting is named last.
    flags = re.findall(r'^\W*Parser key "([^"]+)":', message, re.MULTILINE)
    types = re.findall(r"Expected a (.+?)(?:\. Got value: .*)?$", message, re.MULTILINE)
    value = re.search(r"(?:Got|Given) value: (.*)", message)
    if not (flags and types and value):
        return message
    expected = " or ".join(_type_in_words(each) for each in types)
    return f"--{flags[-1]}: expected {expected}, got {value[1] or 'nothing'}"


def _type_in_words(text: str) -> str:
    if text.startswith("typing.Literal"):
        values = re.findall(r"'([^']*)'", text)
        return f"one of {', '.join(values)}"
    name = text.removeprefix("<class '").removesuffix("'>")
    return TYPES.get(name, name)


def _one_line(message: str) -> str:
    """jsonargparse explains itself over several lines, the cause first."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return "; ".join(line.rstrip(".:") if line.endswith((".", ":")) else line for line in lines)


def path_argument(text: str) -> Path:
    """argparse's type of a path. Refuses an empty one, which would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("is empty; give a path")
    return Path(text)


def run_cli(
    main: Callable[[Config], int | None],
    config_class: type[Config],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    description: str,
    default_config: Callable[[Sequence[str]], Path | None] | None = None,
) -> int:
    """Parses, runs `main(config)` and returns the exit code: main's, 2 after a user's mistake, 6
    where the disk is full or fails, or what a RunStopped says."""
    argv = sys.argv[1:] if argv is None else argv
    # What takes time, or runs otherwise than one might think, is said: one plain line each.
    logging.basicConfig(format="%(message)s")
    logging.getLogger("minitx").setLevel(logging.INFO)
    try:
        default = default_config(argv) if default_config is not None else None
        config = parse_config(
            config_class, argv, prog=prog, description=description, default_config=default
        )
        return main(config) or 0
    except RunStopped as stopped:
        if os.environ.get("MINITX_DEBUG") == "1":
            raise
        print(f"{prog}: stopped: {_one_line(str(stopped))}", file=sys.stderr)
        return stopped.exit_code
    except (ValueError, TypeError, OSError, KernelUnavailableError) as error:
        if os.environ.get("MINITX_DEBUG") == "1":
            raise
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:  # no mistake in a setting
            where = f"{error.filename}: " if error.filename else ""
            print(f"{prog}: stopped: {where}{error.strerror}; see to the disk", file=sys.stderr)
            return EXIT_NOT_WRITTEN
        print(f"{prog}: error: {_one_line(str(error))}", file=sys.stderr)
        return EXIT_USER_ERROR
