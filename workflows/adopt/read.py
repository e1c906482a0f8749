"""Reads a job of another stack: which stack it is, and its settings by the stack's own names.

A job is a file (YAML, or a shell script), with or without words of the command line after it, or the words alone. In a
script the command counts that starts a stack's trainer; of several the last. A configuration that the command names
(``--config FILE``) is read too, and the words of the command go before it. A variable that a script does not set has
its value in the environment of this process, as it would have where the script is run.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from transferqueue.errors import UsageError
from transferqueue.workflows.adopt.mapping import Settings, Stack
from transferqueue.workflows.adopt.sources.arguments import options, overrides
from transferqueue.workflows.adopt.sources.shell import Script, read_script
from transferqueue.workflows.adopt.sources.yaml_files import flatten, interpolated, put, read_file, read_yaml
from transferqueue.workflows.adopt.stacks.nemo_rl import NEMO_RL
from transferqueue.workflows.adopt.stacks.openrlhf import OPENRLHF
from transferqueue.workflows.adopt.stacks.slime import SLIME
from transferqueue.workflows.adopt.stacks.trl import TRL
from transferqueue.workflows.adopt.stacks.verl import VERL

STACKS: Final = {stack.name: stack for stack in (VERL, NEMO_RL, TRL, OPENRLHF, SLIME)}
_CONFIG_OPTIONS: Final = ("--config", "--config-path", "--config-name", "-cn", "-cp")
_ARRAY: Final = re.compile(r"\$\{\w+\[[@*]\]\}")
"""An array that the script does not set."""
_YAML: Final = (".yaml", ".yml")


@dataclass(frozen=True, kw_only=True)
class ReadJob:
    """A job as it was read. source: its file, or the words. notes: what was read with a reservation, or not at all."""

    stack: Stack
    settings: Settings
    source: str
    notes: tuple[str, ...]


def read_job(words: Sequence[str], *, stack: str = "") -> ReadJob:
    """Return the job of a file with further words, or of the words of a command.

    Args:
        words: the path of a file, then overrides or options; or the words of a command line.
        stack: name of its stack. Default "": it is recognised.

    Raises:
        NotFound: A file does not exist.
        UsageError: No stack is recognised, a name is unknown, or a file cannot be read.
    """
    if stack and stack not in STACKS:
        raise UsageError(f"--stack {stack}: there are {', '.join(STACKS)}")
    if not words:
        raise UsageError("adopt needs a job: transferqueue adopt CONFIG, or the words of its command after --")
    wanted = STACKS.get(stack)
    path = Path(words[0])
    if path.suffix in _YAML:
        return _of_yaml(path, list(words[1:]), wanted, read_notes=())
    if path.is_file() or path.suffix == ".sh":
        return _of_script(path, list(words[1:]), wanted)
    return _of_words(list(words), wanted, folder=Path(), source=words[0], notes=())


# ---------------------------------------------------------------- sources


def _of_script(path: Path, more: list[str], wanted: Stack | None) -> ReadJob:
    script = read_script(read_file(path), os.environ)
    for command in reversed(script.commands):
        stack = wanted or _started(command.words)
        if stack and _is_start(stack, command.words):
            notes = (*script.notes, *command.notes)
            return _of_words([*command.words, *more], stack, folder=path.parent, source=str(path), notes=notes)
    raise UsageError(_unrecognised(path, script))


def _unrecognised(path: Path, script: Script) -> str:
    begun = sorted({command.words[0] for command in script.commands})[:8]
    entries = ", ".join(stack.entries[0] for stack in STACKS.values())
    return (
        f"{path}: none of its {len(script.commands)} commands ({', '.join(begun)}) starts a trainer that is known "
        f"({entries}); give --stack and the words of the command after --"
    )


def _of_words(words: list[str], wanted: Stack | None, *, folder: Path, source: str, notes: tuple[str, ...]) -> ReadJob:
    stack = wanted or _started(words) or _by_marks([word.lstrip("-+").partition("=")[0] for word in words])
    if stack is None:
        raise UsageError(
            f"{source} is neither a file nor the command of a known trainer; give --stack, one of {', '.join(STACKS)}"
        )
    entry, arguments = _after_entry(stack, words)
    arguments, config = _without_config(arguments)
    if config and (found := _found(config, folder)):
        return _of_yaml(found, arguments, stack, read_notes=notes, entry=entry, source=source)
    if config:
        notes = (*notes, f"not read: {config}, the configuration that the command names")
    unset = [word for word in arguments if _ARRAY.fullmatch(word)]
    arguments = [word for word in arguments if word not in unset]
    given, others = overrides(arguments) if stack.overrides else options(arguments)
    notes = (*notes, *_unread([*unset, *others]))
    return _job(stack, given, source, notes, entry)


def _of_yaml(
    path: Path, more: list[str], wanted: Stack | None, *, read_notes: tuple[str, ...], entry: str = "", source: str = ""
) -> ReadJob:
    bases = tuple(itertools.chain.from_iterable(stack.bases for stack in STACKS.values()))
    groups: list[str] = []
    values = read_yaml(path, missing=lambda name: name.rpartition("/")[2] in bases or _is_group(name, groups))
    stack = wanted or _by_marks(list(values))
    if stack is None:
        raise UsageError(f"{path}: its tables ({', '.join(list(values)[:8])}) are of no known stack; give --stack")
    given, others = overrides(more) if stack.overrides else options(more)
    if not stack.overrides:
        plain, others = overrides(others)
        given |= plain
    for key, value in given.items():
        put(values, key, value)
    return _job(
        stack,
        interpolated(flatten(values)),
        source or str(path),
        (*read_notes, *_unread(groups), *_unread(others)),
        entry,
    )


def _job(stack: Stack, given: dict[str, Any], source: str, notes: tuple[str, ...], entry: str) -> ReadJob:
    given = {key.replace("_", "-") if stack.name == "slime" else key: value for key, value in given.items()}
    return ReadJob(
        stack=stack, settings=Settings(given, stack.defaults, entry), source=source, notes=tuple(dict.fromkeys(notes))
    )


# ---------------------------------------------------------------- recognition


def _started(words: Sequence[str]) -> Stack | None:
    return next((stack for stack in STACKS.values() if _is_start(stack, words)), None)


def _is_start(stack: Stack, words: Sequence[str]) -> bool:
    return _after_entry(stack, words)[0] != ""


def _after_entry(stack: Stack, words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the word that starts the stack's trainer, and those after it; without one "" and all words."""
    for place, word in enumerate(words):
        two = " ".join(words[place : place + 2])
        for entry in stack.entries:
            if two == entry:
                return entry, list(words[place + 2 :])
            if word == entry or word.endswith((f"/{entry}", f".{entry}")) or word.startswith(f"{entry}."):
                return word, list(words[place + 1 :])
    return "", list(words)


def _by_marks(names: Sequence[str]) -> Stack | None:
    tops = {name.partition(".")[0] for name in names}
    for stack in STACKS.values():
        if all(mark in names or mark in tops for mark in stack.marks):
            return stack
    return None


def _without_config(words: list[str]) -> tuple[list[str], str]:
    """Return the words without the options that name a configuration, and its path."""
    rest, found = [], {}
    waiting = iter(words)
    for word in waiting:
        name, equals, value = word.partition("=")
        if name in _CONFIG_OPTIONS:
            found[name] = value if equals else next(waiting, "")
        else:
            rest.append(word)
    if "--config" in found:
        return rest, found["--config"]
    name = found.get("--config-name", found.get("-cn", ""))
    return rest, os.path.join(found.get("--config-path", found.get("-cp", "")), name) if name else ""


def _found(config: str, folder: Path) -> Path | None:
    """The configuration that a command names: from here, from the script's folder, or from one above it."""
    names = [config] if config.endswith(_YAML) else [f"{config}.yaml"]
    places = [Path(), folder, *folder.resolve().parents]
    return next((place / name for place in places for name in names if (place / name).is_file()), None)


def _is_group(name: str, groups: list[str]) -> bool:
    """Whether a name of ``defaults`` is of a group of Hydra's; then it is appended to `groups`."""
    is_group = "@" in name or "${" in name or name.startswith(("override ", "optional "))
    if is_group:
        groups.append(f"{name}, which the file's defaults name")
    return is_group


def _unread(words: Sequence[str]) -> list[str]:
    return [f"not read: {word}" for word in words if word]
