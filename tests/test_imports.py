"""`import transferqueue` is light: no engine, no tensor library, nothing that its first use loads. (Who may import
whom: `make check`.)"""

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "transferqueue"
HEAVY = {"torch", "ray", "vllm", "transformers", "tensordict", "matplotlib", "rich", "typer", "prometheus_client"}
FOR_FIRST_USE = {"numpy", "pyarrow", "zmq"}
"""What costs most of the time of the first call, and none of the import."""

FOR_FEW = {"asyncio", "importlib.metadata"}
"""What only some programs need, such as those with an event loop: a tenth of what a process takes to load the
client."""

OF_EXTRAS = {"duckdb", "h11", "opentelemetry", "ray", "starlette", "tensordict", "torch", "uvicorn"}
"""What the core imports where an option asks for it. All else that it imports is installed with it."""

_PROBE = """
import json, sys
import transferqueue
at_once = {name.partition(".")[0] for name in sys.modules}
transferqueue.connect
print(json.dumps([sorted(at_once), sorted(sys.modules)]))
"""


def test_import_is_light() -> None:
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=60, check=True)
    at_once, at_first_use = map(set, json.loads(done.stdout))
    assert at_once & (HEAVY | FOR_FIRST_USE) == set()
    assert at_first_use & (HEAVY | FOR_FEW) == set()


def _imported_on_load(body: list[ast.stmt]) -> Iterator[tuple[int, str]]:
    """Top-level names that importing these statements would import: not those in functions or under TYPE_CHECKING."""
    for node in body:
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
            case ast.ImportFrom(module=str(module)):
                yield node.lineno, module.partition(".")[0]
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                yield from _imported_on_load(node.orelse)
            case ast.If() | ast.For() | ast.While():
                yield from _imported_on_load([*node.body, *node.orelse])
            case ast.With() | ast.ClassDef():
                yield from _imported_on_load(node.body)
            case ast.Try():
                handlers = [statement for handler in node.handlers for statement in handler.body]
                yield from _imported_on_load([*node.body, *handlers, *node.orelse, *node.finalbody])


def _core_files() -> list[Path]:
    rooms = [path for path in PACKAGE.iterdir() if path.name not in {"adapters", "workflows", "cli", "__pycache__"}]
    return [file for room in rooms for file in ([room] if room.suffix == ".py" else room.rglob("*.py"))]


def test_what_the_core_imports_is_among_its_dependencies_or_of_an_extra() -> None:
    nodes = [node for file in _core_files() for node in ast.walk(ast.parse(file.read_text()))]
    whole = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    parts = [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    found = {name.partition(".")[0] for name in whole + parts} - sys.stdlib_module_names - {"transferqueue"}
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {line.partition(">=")[0].replace("pyzmq", "zmq") for line in declared}
    assert found == names | OF_EXTRAS


def test_no_core_module_imports_an_engine_when_loaded() -> None:
    files = _core_files()
    assert files
    found = [
        f"{file.relative_to(ROOT)}:{line} imports {name}"
        for file in files
        for line, name in _imported_on_load(ast.parse(file.read_text()).body)
        if name in HEAVY
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import torch.nn", ["torch"]),
        ("from ray import init", ["ray"]),
        ("try:\n    import vllm\nexcept ImportError:\n    import rich", ["vllm", "rich"]),
        ("class A:\n    import torch", ["torch"]),
        ("if TYPE_CHECKING:\n    import torch\nelse:\n    import ray", ["ray"]),
        ("def f():\n    import torch", []),
    ],
)
def test_the_scan_sees_what_loading_imports(source: str, names: list[str]) -> None:
    assert [name for _, name in _imported_on_load(ast.parse(source).body)] == names


def test_nothing_imports_the_linked_folders_by_their_bare_names() -> None:
    """Ruff's TID251 says so file by file; this holds the names that the installed package offers."""
    assert [PACKAGE / name for name in ("adapters", "workflows") if not (PACKAGE / name).is_symlink()] == []
    assert {(PACKAGE / name).resolve() for name in ("adapters", "workflows")} == {ROOT / "adapters", ROOT / "workflows"}
