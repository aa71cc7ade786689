"""`--help` of a command: what it does, and the flags that it takes."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence

from absl import flags

HELP = ("--help", "-help", "-h", "--h", "--helpshort", "-helpshort", "--helpfull", "-helpfull")
# Those whose flags others take too, beside their own.
LIKE = {"linear": "run", "attention": "run"}
# Of `run`'s flags, those that another command takes.
SHARED = {
    "memory": ("case", "json"),
    "latency": ("case", "json"),
    "merge": ("json", "csv"),
    "profile": ("case", "forward_only", "dtype"),
    "table": ("case", "suite"),
    "whole": ("another_machine", "compiled", "within_s"),
}


def asked(arguments: Sequence[str]) -> bool:
    return any(argument in HELP for argument in arguments)


def flags_of(command: str) -> list[flags.Flag]:
    """By what their texts begin with, `run: ...` or `run --suite=NAME: ...`."""
    every = {flag.name: flag for name in flags.FLAGS for flag in [flags.FLAGS[name]]}
    prefixes = tuple(f"{LIKE.get(command, command)}{end}" for end in (": ", " --suite="))
    return [
        flag
        for name, flag in sorted(every.items())
        if told(flag).startswith(prefixes) or name in SHARED.get(command, ())
    ]


def told(flag: flags.Flag) -> str:
    """The text of a flag; absl puts the values of one that has a few before it."""
    return re.sub(r"^<[^>]*>: ", "", " ".join((flag.help or "").split()))


def foreign(command: str) -> list[str]:
    """The flags of other commands that were given."""
    own = {flag.name for flag in flags_of(command)}
    return [
        flag.name
        for module, of_module in flags.FLAGS.flags_by_module_dict().items()
        for flag in of_module
        if module.startswith("benchmarks.") and flag.present and flag.name not in own
    ]


def text(command: str, commands: Mapping[str, Callable[..., object]], of_all: str) -> str:
    """Of a command, or of all of them where it is none."""
    if command not in commands:
        return of_all.strip()
    module = inspect.getmodule(commands[LIKE.get(command, command)])
    parts = [f"python -m benchmarks {command}", (inspect.getdoc(module) or "").strip()]
    lines = []
    for flag in flags_of(command):
        # Without the command's name; a suite's stays.
        said = told(flag).partition(" ")[2]
        said += f" [{flag.default}]" if flag.default not in (None, "", [], False) else ""
        values = [one for one in getattr(flag.parser, "enum_values", []) if one]
        said += f", one of {', '.join(values)}" * bool(values)
        value = "" if flag.boolean else "=..."
        lines.append(textwrap.fill(f"--{flag.name}{value}  {said}", 96, subsequent_indent="      "))
    if lines:
        parts.append("Flags:\n" + textwrap.indent("\n".join(lines), "  "))
    return "\n\n".join(parts)
