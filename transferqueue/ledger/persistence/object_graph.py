"""Writes any graph of registered objects as plain values, column by column, and reads it back.

All objects of one class are written together, one column per attribute. A column of numbers or text is written
unchanged, a column of lists as their lengths and one column of all items, a column of objects as their numbers. So a
hundred thousand objects of one class cost a few long columns.

- Only registered classes (`ClassLayout`, and message structs) are written and restored, and attributes are set
  directly. No constructor runs, and no name in the data is called.
- An object that is referred to twice is one object again. Containers and arrays are values: each reference gets its
  own.
- The same graph gives the same bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter
from types import GenericAlias, MethodType, NoneType
from typing import Any, Final

import msgspec
import numpy as np

from transferqueue.errors import Corruption, InternalError

_PLAIN: Final = frozenset({int, float, str, bytes, bool, NoneType})
_SEQUENCES: Final[dict[str, Callable[[Iterable[Any]], Any]]] = {
    "list": list,
    "tuple": tuple,
    "deque": deque,
    "frozenset": frozenset,
}

Column = list[Any]
"""A kind, and the data of that kind: see `GraphWriter.column`."""
Values = Sequence[Any]


@dataclass(frozen=True)
class ClassLayout:
    """How objects of one class are written: all their attributes, without `omitted`, and with `derived` ones.

    A derived attribute is a property. It is set last, when all objects have their other attributes.
    """

    cls: type
    omitted: frozenset[str] = frozenset()
    derived: tuple[str, ...] = ()

    def names(self, like: object) -> list[str]:
        """The attributes of an object of this class."""
        slots = [name for cls in self.cls.__mro__ for name in getattr(cls, "__slots__", ())]
        return [name for name in (slots or vars(like)) if name not in self.omitted] + list(self.derived)

    def fingerprint(self) -> str:
        """Changes if the class gets other attributes: its slots, or the names that its constructor uses."""
        code = getattr(self.cls.__init__, "__code__", None)  # type: ignore[misc]
        used = [] if code is None else [*code.co_varnames, *code.co_names]
        return f"{self.cls.__qualname__} {getattr(self.cls, '__slots__', '')} {getattr(self.cls, '_fields', '')} {used}"


class ClassRegistry:
    """The classes of a graph: also named tuples (`tuples`), and names of bound methods as attributes (`methods`)."""

    def __init__(
        self, forms: Sequence[ClassLayout], structs: Sequence[type], tuples: Sequence[type], methods: Sequence[str]
    ) -> None:
        self.forms: Final = list(forms)
        self.structs: Final = list(structs)
        self.tuples: Final = list(tuples)
        self.methods: Final = list(methods)
        self.form_of: Final = {form.cls: number for number, form in enumerate(forms)}
        self.struct_of: Final = {cls: number for number, cls in enumerate(structs)}
        self.tuple_of: Final = {cls: number for number, cls in enumerate(tuples)}

    def fingerprint(self) -> str:
        """Equal for two registries if each can read the graphs of the other."""
        structs = [
            f"{cls.__module__}.{cls.__qualname__} {cls.__struct_fields__}"  # type: ignore[attr-defined]
            for cls in self.structs
        ]
        tuples = [f"{cls.__qualname__} {cls._fields}" for cls in self.tuples]  # type: ignore[attr-defined]
        return "\n".join([*(form.fingerprint() for form in self.forms), *structs, *tuples, *self.methods])


class GraphWriter:
    """Writes one graph."""

    def __init__(self, known: ClassRegistry) -> None:
        self._known = known
        self._numbers: dict[int, int] = {}
        self._found: list[list[object]] = [[] for _ in known.forms]

    def heap(self, root: object) -> list[Any]:
        """Everything that `root` leads to: its column, then (class, names, columns) of each batch of objects."""
        first, batches = self.column([root]), []
        written = [0] * len(self._found)
        while any(len(objects) > done for objects, done in zip(self._found, written, strict=True)):
            for number, objects in enumerate(self._found):
                batch = objects[written[number] :]
                written[number] = len(objects)
                if batch:
                    batches.append(self._batch(number, batch))
        return [[len(objects) for objects in self._found], first, batches]

    def _batch(self, number: int, batch: Values) -> list[Any]:
        names = self._known.forms[number].names(batch[0])
        return [number, names, [self.column(list(map(attrgetter(name), batch))) for name in names]]

    def column(self, values: Values) -> Column:
        """Encode values of any registered kinds."""
        kinds = dict.fromkeys(map(type, values))
        if kinds.keys() <= _PLAIN:
            return ["plain", values]
        if len(kinds) == 1:
            return self._column_of_one_class(next(iter(kinds)), values)
        return self._mixed(list(kinds), values)

    def _mixed(self, kinds: list[type], values: Values) -> Column:
        others = [kind for kind in kinds if kind not in _PLAIN]
        group_of = {kind: others.index(kind) + 1 if kind in others else 0 for kind in kinds}
        groups = [group_of[type(value)] for value in values]
        columns = [
            self.column([value for value, its in zip(values, groups, strict=True) if its == group])
            for group in range(len(others) + 1)
        ]
        return ["mixed", groups, columns]

    def _column_of_one_class(self, kind: type, values: Values) -> Column:
        known = self._known
        if kind in known.form_of:
            return ["object", known.form_of[kind], self._refer(known.form_of[kind], values)]
        if kind in known.struct_of:
            return ["struct", known.struct_of[kind], msgspec.msgpack.encode(values)]
        if kind in known.tuple_of:
            return ["named", known.tuple_of[kind], self.column(list(chain.from_iterable(values)))]
        if kind is dict:
            keys = self.column([key for value in values for key in value])
            return [
                "dict",
                [len(value) for value in values],
                keys,
                self.column([item for value in values for item in value.values()]),
            ]
        if kind.__name__ in _SEQUENCES:
            parts = map(sorted, values) if kind is frozenset else values
            return [kind.__name__, [len(value) for value in values], self.column(list(chain.from_iterable(parts)))]
        if issubclass(kind, np.ndarray):
            return [
                "array",
                [value.dtype.str for value in values],
                [value.shape for value in values],
                [value.tobytes() for value in values],
            ]
        if issubclass(kind, np.generic):
            return ["scalar", np.dtype(kind).str, np.array(values).tobytes()]
        if kind is MethodType:
            return self._methods(values)
        raise InternalError(
            f"{kind.__module__}.{kind.__qualname__} cannot be written to an image of the state: {values[0]!r}"
        )

    def _refer(self, number: int, values: Values) -> list[int]:
        numbers, objects = self._numbers, self._found[number]
        referred = []
        for value in values:
            at = numbers.get(id(value))
            if at is None:
                at = numbers[id(value)] = len(objects)
                objects.append(value)  # also keeps it alive, so that its id stays unique
            referred.append(at)
        return referred

    def _methods(self, values: Values) -> Column:
        names = [method.__func__.__name__ for method in values]
        if not set(names) <= set(self._known.methods):
            raise InternalError(f"methods {sorted(set(names))} cannot be written to an image of the state")
        return [
            "method",
            [self._known.methods.index(name) for name in names],
            self.column([method.__self__ for method in values]),
        ]


class GraphReader:
    """Reads one graph. Raises `LookupError`, `TypeError` or `ValueError` for data that does not fit, which `read`
    converts.
    """

    def __init__(self, known: ClassRegistry) -> None:
        self._known = known
        self._made: list[list[Any]] = []
        self._last: list[tuple[object, str, object]] = []

    def heap(self, data: list[Any]) -> Any:
        """The root of the heap."""
        counts, first, batches = data
        self._made = [
            [object.__new__(form.cls) for _ in range(count)]
            for form, count in zip(self._known.forms, counts, strict=True)
        ]
        fillers = [iter(made) for made in self._made]
        (root,) = self.column(first)
        for number, names, columns in batches:
            self._fill(self._known.forms[number], fillers[number], names, columns)
        for owner, name, value in self._last:
            setattr(owner, name, value)
        return root

    def _fill(self, form: ClassLayout, objects: Iterator[Any], names: list[str], columns: list[Column]) -> None:
        values = [self.column(column) for column in columns]
        batch = list(islice(objects, len(values[0])))
        for name, column in zip(names, values, strict=True):
            if name in form.derived:
                self._last += [(owner, name, value) for owner, value in zip(batch, column, strict=True)]
            else:
                for owner, value in zip(batch, column, strict=True):
                    setattr(owner, name, value)

    def column(self, data: Column) -> list[Any]:
        """Decode the values of `GraphWriter.column`."""
        kind, *rest = data
        made: list[Any] = _READERS[kind](self, *rest)
        return made

    def _plain(self, values: list[Any]) -> list[Any]:
        return values

    def _mixed(self, groups: list[int], columns: list[Column]) -> list[Any]:
        parts = [iter(self.column(column)) for column in columns]
        return [next(parts[group]) for group in groups]

    def _object(self, number: int, at: list[int]) -> list[Any]:
        made = self._made[number]
        return [made[index] for index in at]

    def _struct(self, number: int, values: bytes) -> list[Any]:
        kind: Any = GenericAlias(list, (self._known.structs[number],))
        structs: list[Any] = msgspec.msgpack.decode(values, type=kind)
        return structs

    def _named(self, number: int, items: Column) -> list[Any]:
        made: Any = self._known.tuples[number]
        flat = iter(self.column(items))
        return [made(*values) for values in zip(*[flat] * len(made._fields), strict=True)]

    def _dict(self, lengths: list[int], keys: Column, values: Column) -> list[Any]:
        items = iter(zip(self.column(keys), self.column(values), strict=True))
        return [dict(islice(items, length)) for length in lengths]

    def _array(self, dtypes: list[str], shapes: list[list[int]], data: list[bytes]) -> list[Any]:
        # Copied, because the ledger writes to its arrays.
        return [
            np.frombuffer(content, dtype).reshape(shape).copy()
            for dtype, shape, content in zip(dtypes, shapes, data, strict=True)
        ]

    def _scalar(self, dtype: str, data: bytes) -> list[Any]:
        return list(np.frombuffer(data, dtype))

    def _method(self, names: list[int], owners: Column) -> list[Any]:
        methods = self._known.methods
        return [getattr(owner, methods[name]) for name, owner in zip(names, self.column(owners), strict=True)]


def _sequence(make: Callable[[Iterable[Any]], Any]) -> Callable[[GraphReader, list[int], Column], list[Any]]:
    def read_sequence(reader: GraphReader, lengths: list[int], items: Column) -> list[Any]:
        flat = iter(reader.column(items))
        return [make(islice(flat, length)) for length in lengths]

    return read_sequence


_READERS: Final[Mapping[str, Callable[..., list[Any]]]] = {
    "plain": GraphReader._plain,
    "mixed": GraphReader._mixed,
    "object": GraphReader._object,
    "struct": GraphReader._struct,
    "named": GraphReader._named,
    "dict": GraphReader._dict,
    "array": GraphReader._array,
    "scalar": GraphReader._scalar,
    "method": GraphReader._method,
    **{name: _sequence(make) for name, make in _SEQUENCES.items()},
}


def write(root: object, known: ClassRegistry) -> bytes:
    """The graph of `root` as bytes. `InternalError` for objects of classes that are not registered."""
    try:
        return msgspec.msgpack.encode(GraphWriter(known).heap(root))
    except (OverflowError, TypeError) as error:
        raise InternalError(f"the state cannot be written: {error}") from error


def read(data: bytes, known: ClassRegistry) -> Any:
    """The root of a graph. `Corruption` if the data is damaged."""
    try:
        return GraphReader(known).heap(msgspec.msgpack.decode(data))
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise Corruption(f"{len(data)} bytes are no image of a state: {error!r}") from error
