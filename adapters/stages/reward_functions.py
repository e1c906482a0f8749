"""Reward functions in TRL's form: their names, parameters and return values.

A function is called with lists, one entry a row: ``prompts``, ``completions``, ``completion_ids`` if it names them, and
columns of the data by its other parameters. It returns one number for each row, or None for a row to which it does not
apply. Coroutine functions work too.

>>> def exact(completions, answer, **columns):
...     return [float(text == right) for text, right in zip(completions, answer, strict=True)]
>>> call = RewardCall.of(exact)
>>> call.wants, call.takes_all
(('answer',), True)
>>> call({"completions": ["4", "5"], "answer": ["4", "4"]}, rows=2).tolist()
[1.0, 0.0]
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from transferqueue.errors import NotFound, UsageError, listing
from transferqueue.errors.text import counted, shown, visible

RewardFunction = Callable[..., "Sequence[float | None] | Awaitable[Sequence[float | None]]"]
"""``(prompts, completions, **columns)``, each with one entry a row. A result of None: the function does not apply to
that row."""

GIVEN: Final = ("prompts", "completions", "completion_ids")
"""Parameters that are not columns of the data."""
_SHOWN_CHARS: Final = 200
_ERROR_CHARS: Final = 500


_importing = threading.RLock()
"""Held while a file is imported, which may import others so."""
_OF_HTTP: Final = frozenset({"TransportError", "ClientConnectionError", "APIConnectionError"})
"""Errors of httpx, aiohttp and openai that are no OSError: no answer came."""


class RewardFailed(UsageError):
    """A reward function raised, or returned an invalid score.

    Args:
        name: of the function.
        at: position of the row among those of the call (-1: unknown).
        of_call: the call as a whole failed, and would fail with every row.
        may_pass: the system or the network failed, such as a judge that refused the connection.
    """

    def __init__(self, text: str, *, name: str, at: int = -1, of_call: bool = False, may_pass: bool = False) -> None:
        super().__init__(text)
        self.name = name
        self.at = at
        self.of_call = of_call
        self.may_pass = may_pass


# ---------------------------------------------------------------- one function


@dataclass(frozen=True, kw_only=True)
class RewardCall:
    """A reward function and its parameters.

    Args:
        given: those of `GIVEN` that it names.
        wants: columns that it must get.
        takes: columns that it gets if the rows have them.
        takes_all: it has ``**kwargs``, and gets all columns.
        parameters: those among `wants` that are keyword-only: rather an argument than a column.
    """

    name: str
    function: RewardFunction
    given: tuple[str, ...] = ()
    wants: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    takes_all: bool = False
    parameters: tuple[str, ...] = ()

    @classmethod
    def of(cls, function: RewardFunction, *, name: str = "", args: Mapping[str, Any] | None = None) -> RewardCall:
        """Read a function's parameters.

        `args` are values for some of them. A class is called with them and makes the function, and so is a function
        without

        Raises `UsageError` for an argument that is no parameter, and for positional-only parameters.
        """
        name = name or _name(function)
        args = dict(args or {})
        if inspect.isclass(function) or (args and not _is_reward(function)):
            function, args = _made(function, args, name), {}
        parameters = inspect.signature(function).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        _check_parameters(name, parameters, args, takes_all)
        named = [p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        columns = [p for p in named if p.name not in GIVEN and p.name not in args]
        return cls(
            name=name,
            function=partial(function, **args) if args else function,
            given=tuple(name for name in GIVEN if name in parameters),
            wants=tuple(p.name for p in columns if p.default is p.empty),
            takes=tuple(p.name for p in columns if p.default is not p.empty),
            takes_all=takes_all,
            parameters=tuple(p.name for p in columns if p.default is p.empty and p.kind is p.KEYWORD_ONLY),
        )

    def columns(self, has: Collection[str], *, offered: Collection[str] | None = None) -> tuple[str, ...]:
        """Return the columns among `has` that it gets. `offered`: those for ``**kwargs`` (None: all).

        Raises `NotFound` for a column that it must get and that is missing.
        """
        if missing := [name for name in self.wants if name not in has]:
            raise NotFound(self._without(missing[0], has))
        more = (has if offered is None else offered) if self.takes_all else ()
        named = (*self.wants, *(name for name in self.takes if name in has), *more)
        return tuple(name for name in dict.fromkeys(named) if name not in GIVEN)

    def _without(self, column: str, has: Collection[str]) -> str:
        close = get_close_matches(column, list(has), n=1)
        argument = f"give the reward args = {{ {column} = VALUE }}, or " if column in self.parameters else ""
        return (
            f'reward {self.name} wants "{column}"; data has {listing(has)}: {argument}set data.columns = {{ {column} = '
            f'"{close[0] if close else "COLUMN"}" }}'
        )

    def __call__(self, columns: Mapping[str, Sequence[Any]], *, rows: int) -> npt.NDArray[np.float64]:
        """Call the function and return a score for each row: float64 ``[rows]``, NaN for None.

        Raises `RewardFailed` if it raises or does not return a score for each row.
        """
        try:
            returned = self.function(**columns)
            scores = asyncio.run(_awaited(returned)) if inspect.isawaitable(returned) else returned
        except RewardFailed:
            raise
        except (Exception, SystemExit) as error:  # sys.exit() of a library would end the process without a word
            text = f"reward {self.name} raised {type(error).__name__}: {_cut(error)}"
            raise RewardFailed(text, name=self.name, may_pass=may_pass(error)) from error
        return checked_scores(self.name, scores, rows)


def may_pass(error: BaseException) -> bool:
    """Whether another try may succeed: after an error of the system, or of a library for HTTP, whose own are named
    so."""
    return isinstance(error, OSError) or any(kind.__name__ in _OF_HTTP for kind in type(error).__mro__)


def _name(function: RewardFunction) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _is_reward(function: RewardFunction) -> bool:
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return takes_all or "completions" in parameters or "completion_ids" in parameters


def _made(kind: Callable[..., Any], args: Mapping[str, Any], name: str) -> RewardFunction:
    try:
        made = kind(**args)
    except (Exception, SystemExit) as error:  # as of a call
        why = f"{type(error).__name__}: {_cut(error)}"
        raise UsageError(f"reward {name} cannot be made with args {listing(args)}: {why}") from error
    if not callable(made):
        raise UsageError(f"reward {name} made {type(made).__name__}, which cannot be called; it must make a function")
    function: RewardFunction = made
    return function


def _check_parameters(
    name: str, parameters: Mapping[str, inspect.Parameter], args: Mapping[str, Any], takes_all: bool
) -> None:
    for parameter in parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise UsageError(f"reward {name}: parameter {parameter.name} is positional-only; remove the / after it")
    if not takes_all and not {"completions", "completion_ids"} & parameters.keys():
        raise UsageError(
            f"reward {name} has the parameters {listing(parameters)}: none of them is completions; a reward function "
            "is called as (prompts, completions, **columns)"
        )
    if unknown := [arg for arg in args if arg not in parameters and not takes_all]:
        raise UsageError(f"reward {name}: args has {unknown[0]!r}, which is no parameter; it has {listing(parameters)}")


async def _awaited(scores: Awaitable[Sequence[float | None]]) -> Sequence[float | None]:
    return await scores


# ---------------------------------------------------------------- its result


def checked_scores(name: str, scores: Any, rows: int) -> npt.NDArray[np.float64]:
    """Return scores as float64 ``[rows]``, NaN for None. Raises `RewardFailed` for anything but a finite number or None
    for each row."""
    try:
        listed = list(scores)
    except Exception as error:  # of an iterator of the function's, too
        why = "" if isinstance(error, TypeError) else f", which raised {type(error).__name__}: {_cut(error)}"
        raise RewardFailed(
            f"reward {name} returned {type(scores).__name__}{why}; return a list with one number for each row",
            name=name,
            of_call=True,
        ) from error
    if len(listed) != rows:
        raise RewardFailed(
            f"reward {name} gave {counted(len(listed), 'value')} for {counted(rows, 'row')}; give one for each",
            name=name,
            of_call=True,
        )
    return np.array([_score(name, score, at) for at, score in enumerate(listed)], dtype=np.float64)


def _score(name: str, score: Any, at: int) -> float:
    if score is None:
        return np.nan
    try:
        value = float(score)
    except Exception as error:  # 10**400 has no float, a tensor of two numbers none either
        raise RewardFailed(
            f"reward {name} gave {_shown(score)} ({type(score).__name__}); give a number, or None", name=name, at=at
        ) from error
    if not np.isfinite(value):
        raise RewardFailed(f"reward {name} gave {value}; give a finite number, or None", name=name, at=at)
    return value


def described_row(prompt: Any, completion: Any) -> str:
    """Return a row's prompt and completion, shortened, for a message.

    >>> described_row("2+2?", [{"role": "assistant", "content": "4"}])
    "prompt '2+2?', completion '4'"
    """
    return f"prompt {_shown(_text(prompt))}, completion {_shown(_text(completion))}"


def _text(value: Any) -> Any:
    """Return the content of the last message of a conversation; other values as they are."""
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        return value[-1].get("content")
    return value


def _cut(error: BaseException) -> str:
    """The text of an error, on one line, since a run that ends shows the last one."""
    return visible(str(error))[:_ERROR_CHARS]


def _shown(value: Any) -> str:
    if isinstance(value, int):
        return shown(value)
    text = visible(str(value))
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS // 2]} … {text[-_SHOWN_CHARS // 2 :]}")


# ---------------------------------------------------------------- by name


def load_reward(named: str, args: Mapping[str, Any] | None = None) -> RewardCall:
    """Import ``package.module:function`` or ``path/to/file.py:function``; a class is made with `args`, a function
    called with them.

    Raises `UsageError` for a text that names none, and for a module that fails; `NotFound` if there is no such module,
    file or function.
    """
    return RewardCall.of(load_callable(named), name=named, args=args)


def load_callable(named: str, key: str = "reward.function") -> Callable[..., Any]:
    """Import ``package.module:name`` or ``path/to/file.py:name``. `key` is that of the setting, for error texts. Raises
    as `load_reward` does."""
    module_name, _, name = named.rpartition(":")
    if not module_name or not name:
        raise UsageError(f"{key} {named!r} names no function; write module:function, or path/to/file.py:function")
    module = (
        _file_module(Path(module_name), f"{key} {named}")
        if module_name.endswith(".py")
        else _module(module_name, f"{key} {named}")
    )
    function = getattr(module, name, None)
    if function is None:
        has = [member for member, value in vars(module).items() if callable(value) and not member.startswith("_")]
        raise NotFound(f"{key} {named}: the module has no {name}; it has {listing(has)}")
    if not callable(function):
        raise UsageError(f"{key} {named} is {type(function).__name__}; give a function")
    return function  # type: ignore[no-any-return]


def _module(module_name: str, named: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise NotFound(
                f"{named}: there is no module {error.name}; put it beside the job file, install it, or give the "
                "path of the file"
            ) from error
        raise _failed(named, error) from error
    except (Exception, SystemExit) as error:  # a script without a __main__ guard may end with sys.exit()
        raise _failed(named, error) from error


def _file_module(path: Path, named: str) -> ModuleType:
    """Import a file by its path. Modules beside it can be imported by it."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise NotFound(f"{named}: there is no file {path}")
    name = f"reward_function_{path.stem}_{abs(hash(path))}"
    with _importing:  # a module that another thread imports is there before it has its functions
        return sys.modules[name] if name in sys.modules else _executed(name, path, named)


def _executed(name: str, path: Path, named: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{named}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failed(named, error) from error
    return module


def _failed(named: str, error: BaseException) -> UsageError:
    return UsageError(f"{named}: its module raised {type(error).__name__}: {_cut(error)}")
