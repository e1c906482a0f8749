"""The vocabulary of a table of keys: what becomes of one key of another stack.

A table is a tuple of `KeyRule`, one a key. Five functions make them: `kept` (the same value under our name), `mapped`
(a function computes it), `layout` (read together with others to place processes), `no_effect` and `refused`, each with
its reason. A name that ends with a star stands for all keys that begin so; a longer name goes before a shorter one. One
that begins with a star stands for all keys that end so, and goes before those.

A converting function gets the value and all settings, and returns the value of `KeyRule.to`, or `OurValues` of several
keys, or `Inactive` where another setting turns the key off. `Refuse` says that the value cannot be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from transferqueue.workflows.adopt.sources.shell import is_open
from transferqueue.workflows.job.settings.rules import LOGGERS

REWARDS: Final = "adopted_rewards.py"
"""The module beside a job file that calls a stack's own reward (`Stack.rewards`)."""
ABSENT: Final = object()
"""No value: the job leaves the key out, and the stack has no default that matters."""

Plain = Any
"""A value as YAML has it: None, a boolean, a number, a text, or a list or dict of these."""


class Refuse(Exception):
    """A converting function cannot keep the value. Its text is the reason."""


@dataclass(frozen=True)
class Inactive:
    """The key has no effect with these settings. why: the setting that turns it off."""

    why: str


@dataclass(frozen=True)
class OurValues:
    """OurValues of several keys of our job file, by key. why: what is computed, for the report."""

    by_key: Mapping[str, Plain]
    why: str = ""


class Settings:
    """The settings of a job: those that are given, above the stack's own defaults.

    Args:
        given: by the stack's names.
        defaults: of the stack, of keys that matter.
        entry: the program that the command line starts, such as ``train_async.py``. Default "": none is known.
    """

    def __init__(self, given: Mapping[str, Plain], defaults: Mapping[str, Plain], entry: str = "") -> None:
        self.given, self.defaults, self.entry = given, defaults, entry

    def __getitem__(self, name: str) -> Plain:
        """The value of a key: given, else the stack's default, else None. A value that is not known counts as left
        out."""
        value = self.given.get(name)
        is_known = value is not None and not (isinstance(value, str) and is_open(value))
        return value if is_known else self.defaults.get(name)

    def is_on(self, name: str) -> bool:
        """Whether a flag is on."""
        value = self[name]
        return value is not None and flag(value)

    def number(self, name: str) -> int | float:
        """The number of a key; 0 where there is none."""
        value = self[name]
        return 0 if value is None else number(value)

    def whole(self, name: str) -> int:
        """The whole number of a key; 0 where there is none."""
        value = self[name]
        return 0 if value is None else whole(value)


Convert = Callable[[Plain, Settings], "Plain | OurValues | Inactive"]


@dataclass(frozen=True)
class KeyRule:
    """What becomes of one key.

    Args:
        name: the stack's key.
        to: our key, or a list of keys for the report alone where `convert` returns `OurValues`. With a star at its end
            the key goes on as the stack's does.
        convert: computes our value. None: the key has no value here.
        default: the stack's own, where the job leaves the key out.
        why: the reason of a refusal, of no effect, or what a conversion does.
        harmless: values at which a refused key changes nothing.
        refused: the key cannot be kept.
    """

    name: str
    to: str = ""
    convert: Convert | None = None
    default: Plain = ABSENT
    why: str = ""
    harmless: tuple[Plain, ...] = ()
    refused: bool = False


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a job.

    Args:
        train: of the trainer.
        generate: of the engines.
        shared: both use the same ones in turn.
        nodes: machines.
        per_engine: GPUs of one engine.
    """

    train: int = 1
    generate: int = 1
    shared: bool = False
    nodes: int = 1
    per_engine: int = 1


@dataclass(frozen=True)
class Stack:
    """A stack whose jobs are read.

    Args:
        name: as ``--stack`` takes it.
        rules: the table of its keys.
        always: our keys whose values follow from the stack itself, each with the reason.
        entries: parts of the words by which a command line starts it.
        marks: keys of which a configuration of it has at least one.
        overrides: its command line has ``a.b=c``; else ``--key value``.
        bases: names of its own configurations that others build on; their values are the defaults of `rules`.
        gpus: reads the layout.
        on_queue: how its own trainer uses the queue, a line each; empty: there is no adapter.
        extra: of this package, which that needs.
        version: of the stack whose keys the table has.
        rewards: the text of a module, `REWARDS`, that calls the stack's own reward. "": none is needed.
        of_model: keys that the job leaves out and whose value is then the model's own, where it matters here: the key,
            that value as a text ("": the model's files are not here), and the reason.
    """

    name: str
    rules: tuple[KeyRule, ...]
    always: Mapping[str, tuple[Plain, str]]
    entries: tuple[str, ...]
    marks: tuple[str, ...]
    overrides: bool
    gpus: Callable[[Settings], Gpus]
    on_queue: tuple[str, ...]
    version: str
    extra: str = ""
    bases: tuple[str, ...] = ()
    rewards: Callable[[Settings], str] = field(default=lambda settings: "")
    of_model: Callable[[Settings], Iterable[tuple[str, str, str]]] = field(default=lambda settings: ())

    @cached_property
    def rule_by_name(self) -> dict[str, KeyRule]:
        """Its rules by their names."""
        return {rule.name: rule for rule in self.rules}

    @property
    def defaults(self) -> dict[str, Plain]:
        """The stack's defaults of the keys that have one."""
        return {rule.name: rule.default for rule in self.rules if rule.default is not ABSENT}


# ---------------------------------------------------------------- rules


def kept(name: str, to: str, *, default: Plain = ABSENT, why: str = "") -> KeyRule:
    """The same value under our key `to`."""
    return KeyRule(name, to, lambda value, settings: value, default, why)


def mapped(name: str, to: str, convert: Convert, *, default: Plain = ABSENT, why: str = "") -> KeyRule:
    """A value that `convert` computes for our key `to`."""
    return KeyRule(name, to, convert, default, why)


def layout(name: str, *, default: Plain = ABSENT) -> KeyRule:
    """A number that places processes: read by the stack's `gpus`."""
    return KeyRule(name, "engine, trainer", lambda value, settings: OurValues({}, "places the processes"), default)


def no_effect(name: str, why: str, *, default: Plain = ABSENT) -> KeyRule:
    """A key that changes nothing here."""
    return KeyRule(name, why=why, default=default)


def refused(name: str, why: str, *, unless: tuple[Plain, ...] = (), default: Plain = ABSENT) -> KeyRule:
    """A key that cannot be kept, but for the values `unless`, at which it changes nothing. None is always one."""
    return KeyRule(name, why=why, harmless=unless, refused=True, default=default)


# ---------------------------------------------------------------- values


def number(value: Plain) -> int | float:
    """Return a number, whole where it is. Texts are read.

    >>> number("1e-6"), number("20"), number(2.0)
    (1e-06, 20, 2)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise Refuse(f"{value!r} is not a number")
    try:
        found = float(value)
        return int(found) if found.is_integer() else found
    except (ValueError, OverflowError) as error:
        raise Refuse(f"{value!r} is not a number") from error


def whole(value: Plain) -> int:
    """Return a whole number."""
    found = number(value)
    if isinstance(found, float):
        raise Refuse(f"{value!r} is not a whole number")
    return found


def flag(value: Plain) -> bool:
    """Return a boolean. Texts are read.

    >>> flag("True"), flag(0), flag("no")
    (True, False, False)
    """
    texts = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if (found := texts.get(str(value).lower())) is None:
        raise Refuse(f"{value!r} is neither true nor false")
    return found


def is_same(ours: Plain, value: Plain) -> bool:
    """Return whether two values are the same; of a number, also its texts.

    >>> is_same(0.01, "1e-2"), is_same(True, "true"), is_same(1, "2")
    (True, True, False)
    """
    if ours == value or str(ours).lower() == str(value).lower():
        return True
    if isinstance(ours, bool) or not isinstance(ours, int | float):
        return False
    try:
        return float(value) == ours
    except (TypeError, ValueError):
        return False


def texts(value: Plain) -> list[str]:
    """Return a list of texts; a single text is one.

    >>> texts("a"), texts(["a", "b"])
    (['a'], ['a', 'b'])
    """
    return [str(each) for each in value] if isinstance(value, list | tuple) else [str(value)]


def one_of(by_name: Mapping[str, Plain]) -> Convert:
    """Return a function that replaces the stack's names by ours, and refuses others."""

    def convert(value: Plain, settings: Settings) -> Plain:
        name = str(value).lower()
        if name not in by_name:
            raise Refuse(f"there is none of {value!r} here; there are {', '.join(by_name)}")
        return by_name[name]

    return convert


def only_if(condition: Callable[[Settings], bool], why: str, convert: Convert | None = None) -> Convert:
    """Return a function for a key that other settings turn on. why: the setting that turns it off."""

    def converted(value: Plain, settings: Settings) -> Any:
        if not condition(settings):
            return Inactive(why)
        return value if convert is None else convert(value, settings)

    return converted


def divided(is_divided: bool, eps: float) -> OurValues:
    """Return whether a group's centred rewards are divided by their deviation. eps: what the stack adds to that."""
    return OurValues({"algorithm.std": "sample", "algorithm.std_eps": eps} if is_divided else {"algorithm.std": "none"})


def interval(value: Plain, settings: Settings) -> int:
    """Return steps between two events; none at 0 or below is 0."""
    return max(0, whole(value))


def parts_of(total: int, part: int, name: str) -> int:
    """Return how many `part` make `total`, for updates of a step.

    >>> parts_of(1024, 256, "ppo_mini_batch_size")
    4
    """
    if part <= 0 or total % part:
        raise Refuse(f"{name}={part} does not divide {total}: updates of a step have equal parts here")
    return total // part


def directory(value: Plain, settings: Settings) -> str:
    """Return a path or an id as a text."""
    return str(value)


SCHEDULES: Final = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}
"""Learning rates by the names of transformers and Megatron."""
KL_ESTIMATORS: Final = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2"}
"""Estimators of the KL by their names."""
DTYPES: Final = {"bf16": "bfloat16", "fp16": "float16", **{name: name for name in ("bfloat16", "float16", "float32")}}


def label_column(value: Plain, settings: Settings) -> OurValues:
    """Return the key of the column that rewards get as ``label``."""
    return OurValues({"data.columns.label": str(value)}, "rewards get it as label")


def loggers(value: Plain, settings: Settings) -> list[str]:
    """Return our loggers of a list of theirs; the console is always there."""
    names = [name.lower() for name in texts(value)]
    if others := [name for name in names if name not in (*LOGGERS, "console", "none", "file", "jsonl")]:
        raise Refuse(f"there is no logger {', '.join(others)}; name a function of yours in log.to")
    return [name for name in names if name in LOGGERS]


DRAWN_WHOLE: Final = "responses are drawn from the whole distribution, so that log-probs are those of the trained model"
PACKED: Final = "rows are packed up to trainer.micro_tokens, which is memory and not the result"
SHARDED: Final = "where weights and states lie; here trainer.parallel shards them"
KERNELS: Final = "a kernel or a layout of memory, not the result"
LOGS: Final = "names and places of logs; a run has its folder"
RESUMES: Final = "a run goes on by --resume"
EPSILON: Final = "AdamW's epsilon is 1e-8"
EXPERTS: Final = "experts have no loss of their own"
OWN_QUEUE: Final = "the transport of the stack; here rows are in the queue"
IMAGES: Final = "rows with images or sound: a job here reads images by data.images, which is not written from theirs"
"""Reasons that several tables give."""
