"""Nothing received is executed: no way to run what came over the wire or off the disk appears in the code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("transferqueue", "adapters", "workflows")

MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "jsonpickle",
    "multiprocessing",
}
BUILTINS = {"eval", "exec", "compile", "__import__"}
# A class that says how to rebuild itself invites others to rebuild what they received.
REBUILDS = {"__reduce__", "__reduce_ex__"}
# By last name, whatever the module is called where it is imported (np.load is handled by allow_pickle below).
METHODS = {"recv_pyobj", "send_pyobj", "read_pickle", "to_pickle", "unsafe_load", "full_load", "PyExtensionType"}
QUALIFIED = {"torch.load", "torch.save", "torch.jit.load", "yaml.load", "yaml.load_all", "torch.package"}


def _dotted(node: ast.expr) -> str:
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return f"{_dotted(node.value)}.{node.attr}"
    return "?"


def executes_what_it_reads(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of each thing in the source that could run what it is given."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                yield from ((node.lineno, a.name) for a in node.names if a.name.partition(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)):
                names = [f"{module}.{alias.name}" for alias in node.names]
                yield from ((node.lineno, n) for n in names if n.partition(".")[0] in MODULES or n in QUALIFIED)
            case ast.Attribute() if node.attr in METHODS or _dotted(node) in QUALIFIED:
                yield node.lineno, _dotted(node)
            case ast.Call(func=ast.Name(id=name)) if name in BUILTINS:
                yield node.lineno, name
            case ast.FunctionDef(name=name) if name in REBUILDS:
                yield node.lineno, name
            case ast.keyword(arg="allow_pickle") if not (
                isinstance(node.value, ast.Constant) and node.value.value is False
            ):
                yield node.value.lineno, "allow_pickle"


def test_no_code_executes_what_it_receives() -> None:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > len(FOLDERS)
    found = [
        f"{file.relative_to(ROOT)}:{line} {name}"
        for file in files
        for line, name in executes_what_it_reads(file.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from cloudpickle import loads",
        "import marshal",
        "torch.load(path)",
        "from torch import load",
        "yaml.load(text, Loader=Loader)",
        "socket.recv_pyobj()",
        "eval(text)",
        "compile(text, name, 'exec')",
        "class A:\n    def __reduce__(self): ...",
        "from multiprocessing.connection import Client",
        "pa.PyExtensionType",
        "exec(text)",
        "__import__(name)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
    ],
)
def test_the_scan_finds(source: str) -> None:
    assert list(executes_what_it_reads(source))


@pytest.mark.parametrize(
    "source",
    ["model.eval()", "json.load(f)", "np.load(path, allow_pickle=False)", "yaml.safe_load(text)", "re.compile(text)"],
)
def test_the_scan_lets_pass(source: str) -> None:
    assert not list(executes_what_it_reads(source))
