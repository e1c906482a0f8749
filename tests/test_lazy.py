"""Names that are looked up late: every name of `__all__` is there, and old names work and warn."""

import ast
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import transferqueue
from tests.markdown import ROOT
from transferqueue.lazy import EXTRAS, naming_extra

PACKAGES = [
    "transferqueue",
    "transferqueue.weights",
    "transferqueue.workflows.flow",
    "transferqueue.workflows.service",
]
RENAMED = [
    ("transferqueue", "Release", "DeliverPartial"),
    ("transferqueue.policies", "Release", "DeliverPartial"),
    ("transferqueue.adapters.protocols", "Part", "PartialResult"),
    ("transferqueue.adapters.protocols", "Stage", "StageFunction"),
    ("transferqueue.adapters.weights", "Follower", "WeightUpdater"),
    ("transferqueue.adapters.weights", "Relay", "WeightHandoff"),
    ("transferqueue.testing.conformance.report", "Broken", "RuleBroken"),
    ("transferqueue.testing.conformance.report", "Outcome", "CheckOutcome"),
    ("transferqueue.weights", "Carrier", "RelayProcess"),
    ("transferqueue.weights", "Relay", "WeightRelay"),
]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_there(package):
    module = import_module(package)
    assert all(getattr(module, name) is not None for name in module.__all__)


@pytest.mark.parametrize(("module", "old", "new"), RENAMED)
def test_an_old_name_works_and_warns(module, old, new):
    with pytest.warns(DeprecationWarning, match=f"{module}.{old} is now {module}.{new}"):
        assert getattr(import_module(module), old) is getattr(import_module(module), new)


@pytest.mark.parametrize("package", [*PACKAGES, "transferqueue.adapters.protocols"])
def test_a_name_that_never_was_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match="has no attribute 'never_was'"):
        import_module(package).never_was  # noqa: B018


LAZY = [*PACKAGES, "transferqueue.adapters.engines", "transferqueue.adapters.stages", "transferqueue.adapters.trainers"]


def _imported_for_type_checkers(tree):
    """Names that a package imports under `TYPE_CHECKING`, by module."""
    guarded = [
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
    ]
    imports = [node for guard in guarded for node in guard.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module for node in imports for alias in node.names}


@pytest.mark.parametrize("package", LAZY[2:])
def test_names_that_need_an_engine_are_listed_as_they_are_looked_up(package):
    """Their engines need not be installed: what is compared is the text of the package."""
    tree = ast.parse(Path(find_spec(package).origin).read_text())
    call = next(
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy_names"
    )
    _check_lists(package, tree, ast.literal_eval(call.args[1]))


def test_the_public_names_of_the_package_are_listed_as_they_are_looked_up():
    tree = ast.parse(Path(find_spec("transferqueue").origin).read_text())
    _check_lists("transferqueue", tree, transferqueue._MODULES)


def _check_lists(package, tree, modules):
    """Compare the names that are looked up, those imported for type checkers, and `__all__`."""
    looked_up = {name: f"{package}.{module}" for module, names in modules.items() for name in names.split()}
    assert looked_up == _imported_for_type_checkers(tree)
    assert sorted(looked_up) == sorted(set(import_module(package).__all__) - {"__version__"})


def test_a_missing_library_names_the_extra_that_installs_it():
    with (
        pytest.raises(ModuleNotFoundError, match=r"x needs vllm, not installed here: pip install .*\[vllm\]") as caught,
        naming_extra("x"),
    ):
        raise ModuleNotFoundError("No module named 'vllm.engine'", name="vllm")
    assert caught.value.name == "vllm"  # importorskip and the like look at it


def test_an_unknown_missing_library_keeps_its_error():
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'mine'$"), naming_extra("x"):
        raise ModuleNotFoundError("No module named 'mine'", name="mine")


def test_every_extra_that_is_named_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS.values()) <= set(extras)
