"""Classes of the caller whose objects plain values may hold. A process stores and reads those that it registered.

A stored object is the name of its class and its parts, which are plain values. A reader makes it with the function that
was registered here under that name: bytes that arrive choose among registered classes, and run nothing else.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from enum import Enum, Flag
from typing import Any, Final, NamedTuple, TypeVar

from transferqueue.errors import UsageError
from transferqueue.errors.text import shown
from transferqueue.limits import NAME_CHARS_MAX

Class = TypeVar("Class", bound=type)


class RegisteredClass(NamedTuple):
    """A registered class, its name in stored values, and how its objects become plain values and objects again."""

    cls: type
    name: str
    to_plain: Callable[[Any], Any]
    from_plain: Callable[[Any], Any]


_by_class: Final[dict[type, RegisteredClass]] = {}
_by_name: Final[dict[str, RegisteredClass]] = {}
_guard: Final = threading.Lock()


def register_value(
    cls: Class,
    *,
    name: str = "",
    to_plain: Callable[[Any], Any] | None = None,
    from_plain: Callable[[Any], Any] | None = None,
) -> Class:
    """Let plain values hold objects of a class: columns of dtype ``"value"``, dicts and lists that a put is given.

    Every process that stores or reads such objects registers the class, best where it is defined (also as a decorator).
    Dataclasses, enums, named tuples and subclasses of ``dict`` or ``Mapping`` need no functions. A dataclass is read
    back field by field, without its ``__init__``. Subclasses register themselves.

    Args:
        cls: the class.
        name: that stored values have; default ``""``: the class's module and qualified name.
        to_plain: returns the parts of an object as a plain value; default None: by the kind of the class.
        from_plain: makes an object from what `to_plain` returned; default None, as above.

    Returns:
        `cls`.

    Raises:
        UsageError: the class is of no such kind and functions are missing, or another class has the name.

    Example:
        >>> import dataclasses
        >>> import transferqueue as tq
        >>> @tq.register_value
        ... @dataclasses.dataclass
        ... class ToolCall:
        ...     name: str
        ...     arguments: dict
        >>> with tq.connect("embedded") as queue:
        ...     table = queue.create_table("t", fields=[tq.Field("call", "value")])
        ...     rows = table.put(call=[ToolCall("search", {"q": "MessagePack"})])
        ...     table.read(rows)["call"].list()
        [ToolCall(name='search', arguments={'q': 'MessagePack'})]
    """
    if not isinstance(cls, type):
        raise UsageError(f"register_value({shown(cls)}): give a class")
    if (to_plain is None) != (from_plain is None):
        raise UsageError(f"register_value({cls.__qualname__}): give both functions, to_plain and from_plain, or none")
    name = name or f"{cls.__module__}.{cls.__qualname__}"
    if len(name) > NAME_CHARS_MAX:
        raise UsageError(
            f"register_value: the name {shown(name)} has {len(name)} characters; give name=, a shorter one"
        )
    functions = _functions(cls) if to_plain is None or from_plain is None else (to_plain, from_plain)
    registered = RegisteredClass(cls, name, *functions)
    with _guard:
        other = _by_name.get(name)
        if other is not None and (other.cls.__module__, other.cls.__qualname__) != (cls.__module__, cls.__qualname__):
            raise UsageError(
                f"register_value: {other.cls.__module__}.{other.cls.__qualname__} has the name {name!r}; give another "
                "by name="
            )
        _by_name[name] = _by_class[cls] = registered
    return cls


def registered_class(cls: type) -> RegisteredClass | None:
    """The registration of exactly this class."""
    return _by_class.get(cls)


def registered_name(name: str) -> RegisteredClass:
    """The registration under a name. `UsageError` if this process has none."""
    registered = _by_name.get(name)
    if registered is None:
        raise UsageError(
            f"a stored value holds an object of {shown(name)}, which is not registered in this process: import its "
            "module, and call transferqueue.register_value(cls) before reading"
        )
    return registered


def _functions(cls: type) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    if issubclass(cls, Flag):
        return lambda member: member.value, cls
    if issubclass(cls, Enum):
        return lambda member: member.name, cls.__getitem__
    if dataclasses.is_dataclass(cls):
        return _of_dataclass(cls)
    if issubclass(cls, tuple) and hasattr(cls, "_make"):
        return list, cls._make
    if issubclass(cls, Mapping):
        return dict, cls
    raise UsageError(
        f"register_value({cls.__qualname__}): it is no dataclass, enum, named tuple or mapping; give to_plain and "
        "from_plain"
    )


def _of_dataclass(cls: type) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    names = [field.name for field in dataclasses.fields(cls)]

    def to_plain(instance: Any) -> Any:
        return [getattr(instance, name) for name in names]

    def from_plain(parts: Any) -> Any:
        instance: Any = object.__new__(cls)
        for name, part in zip(names, parts, strict=True):
            object.__setattr__(instance, name, part)
        return instance

    return to_plain, from_plain
