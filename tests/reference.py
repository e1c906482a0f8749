"""Public names against the API reference: which are missing there, which have no example or unexplained parameters.
``python -m tests.reference`` prints the counts."""

import ast
import contextlib
import doctest
import enum
import importlib
import importlib.util
import inspect
import itertools
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transferqueue as tq
from tests.markdown import ROOT, blocks, scripts

PAGES = sorted((ROOT / "docs/reference").glob("*.md"))
DOCUMENTED = (
    "adapters.engines",
    "adapters.protocols",
    "adapters.registry",
    "adapters.scoring",
    "adapters.snapshots",
    "adapters.stages",
    "adapters.tensor_parallel",
    "adapters.trainers",
    "adapters.vllm",
    "adapters.weights",
    "workflows.dispatch.ranker",
    "workflows.flow",
    "workflows.service",
)
"""Modules below `transferqueue` whose names pages mention. Their engines may be missing here, so an example may be for
the eye (```py)."""
ASYNC_PREFIX = "Async"
"""Of the asyncio twins, whose methods are those of the classes for threads: the generated API holds this."""


def names_of(module: str) -> list[str]:
    """The public names of a documented module, without importing an engine."""
    tree = ast.parse(Path(str(_spec(module).origin)).read_text(encoding="utf-8"))
    for node in tree.body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return list(ast.literal_eval(node.value))  # type: ignore[attr-defined]
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


def _spec(module: str) -> importlib.machinery.ModuleSpec:
    spec = importlib.util.find_spec(f"transferqueue.{module}")
    assert spec
    return spec


def methods() -> Iterator[str]:
    """``Class.method`` of every public class but errors, policies and twins: what the class itself defines for its
    callers."""
    for name in tq.__all__:
        value = getattr(tq, name)
        handle = inspect.isclass(value) and "client" in value.__module__ and not name.startswith(ASYNC_PREFIX)
        if handle or name in ("Column", "Deployment"):
            yield from (
                f"{name}.{method}"
                for method in vars(value)
                if inspect.isfunction(vars(value)[method]) and method[0] != "_"
            )


def shown() -> set[str]:
    """Names that the reference has a signature and a contract of: ``::: module.name`` lines, lists of members, and the
    members of unions."""
    text = _prepare().with_members("\n".join(page.read_text(encoding="utf-8") for page in PAGES))
    names = set(re.findall(r"^::: transferqueue\.(\w+)$", text, re.MULTILINE))
    for module, members in re.findall(
        r"^::: transferqueue\.(\S+)\n    options:\n      members: \[(.*)\]$", text, re.MULTILINE
    ):
        names |= {f"{module}.{member}" for member in members.split(", ")}
    return names


def used(run: bool) -> set[str]:
    """Every name and attribute in the code of the pages: of what runs, or of all blocks."""
    code = [script.code for page in PAGES for script in scripts(page)]
    if not run:
        code += [block.code for page in PAGES for block in blocks(page) if block.info == "py"]
    return {word for text in code for word in re.findall(r"\w+", text)}


def missing_contracts() -> list[str]:
    """Public names that no page of the reference shows."""
    return sorted(_public() - shown())


def gone() -> list[str]:
    """Names that a page of the reference shows and that are public no more."""
    return sorted(shown() - _public())


def _public() -> set[str]:
    return {*tq.__all__, *(f"{module}.{name}" for module in DOCUMENTED for name in names_of(module))}


def without_example() -> list[str]:
    """Public names that no example uses: none of a page, and none of their docstring."""
    running, all_code = used(run=True), used(run=False)
    core = [name for name in tq.__all__ if name not in running and not _has_example(name, getattr(tq, name).__doc__)]
    return core + [f"{module}.{name}" for module in DOCUMENTED for name in names_of(module) if name not in all_code]


NEED_RAY = ("Deployment", "deploy_ray")
"""Their examples, and those of their methods, are for the eye: each would start a Ray cluster."""


def without_docstring_example() -> list[str]:
    """Public callables but errors, and public members of handles, whose docstrings have no example that runs: code
    under ``Example:`` with its output. A property needs none if the example of a class that has it uses it."""
    values = {name: getattr(tq, name) for name in tq.__all__ if callable(getattr(tq, name))}
    described = {name: value for name, value in values.items() if inspect.isfunction(value) or _is_described(value)}
    lacking = [name for name, value in described.items() if not _has_example(name, value.__doc__)]
    classes = {name: described[name] for name in dict.fromkeys(method.partition(".")[0] for method in methods())}
    classes |= {name: value for name, value in described.items() if name.startswith(ASYNC_PREFIX)}
    in_examples = {
        inspect.getattr_static(value, member, None)
        for value in classes.values()
        for example in _examples(value.__doc__)
        for member in re.findall(r"\.(\w+)", example.source)
    }
    return lacking + [
        f"{name}.{member}"
        for name, value in classes.items()
        for member, attribute, docstring in _public_members(value)
        if not _has_example(name, docstring) and attribute not in in_examples
    ]


def _public_members(value: type) -> Iterator[tuple[str, Any, str | None]]:
    """Methods and properties of a class, inherited ones too: name, attribute and docstring."""
    for member in dir(value):
        attribute = inspect.getattr_static(value, member)
        attribute = getattr(attribute, "__func__", attribute)  # of a class method
        function = getattr(attribute, "fget", getattr(attribute, "func", attribute))  # of a property
        is_ours = inspect.isfunction(function) and function.__module__.startswith("transferqueue.")
        if is_ours and member[0] != "_":
            yield member, attribute, attribute.__doc__


def _examples(docstring: str | None) -> list[doctest.Example]:
    """What stands under ``Example:`` of a docstring."""
    return doctest.DocTestParser().get_examples(inspect.cleandoc(docstring or "").partition("\nExample:\n")[2])


def _has_example(name: str, docstring: str | None) -> bool:
    return any(
        example.want and (name in NEED_RAY or not example.options.get(doctest.SKIP)) for example in _examples(docstring)
    )


def without_arguments() -> list[str]:
    """Parameters of public callables that their docstring does not explain: ``Table.put: timeout_s``.

    A callable is a public function, a public method of a public class, or a class that its users make; not a method
    that a class has from elsewhere. A line of ``Args:`` names one parameter.
    """
    unexplained = []
    for name, value, docstring in _callables():
        explained = _arguments(docstring or "")
        lacking = [parameter for parameter in _parameters(value) if parameter not in explained]
        if lacking:
            unexplained.append(f"{name}: {', '.join(lacking)}")
    return unexplained


MADE_BY_A_CALL = (
    *("Column", "Deployment", "RecordedRows", "Rows", "Run", "Weights"),
    *("CompletionStream", "ExperienceStream", "JobService", "Service"),
)
"""Classes, beside the handles of both APIs, whose objects come from a call: how they are made is no contract."""


def _callables() -> Iterator[tuple[str, Any, str | None]]:
    handles = {name for name in tq.__all__ if name.startswith(ASYNC_PREFIX)}
    handles |= {name.removeprefix(ASYNC_PREFIX) for name in handles}
    for name, value in _public_values():
        last = name.rpartition(".")[2]
        made_by_a_call = last in handles or last.removeprefix(ASYNC_PREFIX) in MADE_BY_A_CALL
        if inspect.isfunction(value) or (_is_described(value) and not made_by_a_call and not _is_abstract(value)):
            yield name, value, value.__doc__
        if _is_described(value):
            yield from _methods_of(name, value)


def _public_values() -> Iterator[tuple[str, Any]]:
    """Every public name with its value, but those whose engine or framework is not installed."""
    yield from ((name, getattr(tq, name)) for name in tq.__all__)
    for module in DOCUMENTED:
        for name in names_of(module):
            with contextlib.suppress(ModuleNotFoundError):
                yield f"{module}.{name}", getattr(importlib.import_module(f"transferqueue.{module}"), name)


def _is_abstract(value: type) -> bool:
    """Whether it is a protocol or an enumeration, whose objects are not made by calls."""
    return getattr(value, "_is_protocol", False) or issubclass(value, enum.Enum)


def _is_described(value: Any) -> bool:
    return inspect.isclass(value) and not issubclass(value, BaseException)


def _methods_of(name: str, value: type) -> Iterator[tuple[str, Any, str | None]]:
    for member in dir(value):
        function = inspect.getattr_static(value, member)
        function = getattr(function, "__func__", function)  # of a class method
        is_ours = inspect.isfunction(function) and function.__module__.startswith("transferqueue.")
        if is_ours and (member == "__call__" or not member.startswith("_")):
            yield f"{name}.{member}", function, function.__doc__


def _parameters(value: Any) -> list[str]:
    return [name for name in inspect.signature(value).parameters if name not in ("self", "cls")]


def _arguments(docstring: str) -> set[str]:
    """The names that the ``Args:`` section of a docstring explains."""
    lines = inspect.cleandoc(docstring).split("\n")
    if "Args:" not in lines:
        return set()
    section = itertools.takewhile(lambda line: line.startswith(" "), lines[lines.index("Args:") + 1 :])
    return set(re.findall(r"^    \*{0,2}(\w+): ", "\n".join(section), re.MULTILINE))


def dead_links(out: Path) -> list[str]:
    """Links of all pages that lead to no file, as the documentation site is prepared into `out`."""
    return list(_prepare().prepare(out))


def _prepare() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("prepare", ROOT / "docs/site/prepare.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        counts = {
            "public names without a contract in the reference": missing_contracts(),
            "names in the reference that are gone": gone(),
            "public names without an example": without_example(),
            "public callables whose docstring has no example": without_docstring_example(),
            "public callables with unexplained parameters": without_arguments(),
            "dead links": dead_links(Path(folder)),
        }
    for subject, entries in counts.items():
        print(f"{subject}: {len(entries)} {', '.join(entries)}".rstrip())
    sys.exit(any(counts.values()))
