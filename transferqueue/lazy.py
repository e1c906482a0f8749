"""Names that are looked up at first use: names of other modules, old names of renamed objects, plug-ins. What installs
a library that is missing."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from transferqueue.errors import UsageError

DISTRIBUTION: Final = "asyncflow-transferqueue"
"""The name under which the package is installed."""

EXTRAS: Final = {
    "PIL": "train",
    "aiohttp": "http",
    "jinja2": "train",
    "matplotlib": "demo",
    "ml_dtypes": "web",
    "omegaconf": "drop-in",
    "opentelemetry": "tracing",
    "ray": "ray",
    "reasoning_gym": "demo",
    "rich": "cli",
    "safetensors": "transformers",
    "starlette": "web",
    "tensordict": "torch",
    "torch": "torch",
    "transformers": "transformers",
    "trl": "trl",
    "typer": "cli",
    "uvicorn": "web",
    "vllm": "vllm",
    "yaml": "train",
}
"""The extra of this package that installs each optional library."""


@contextmanager
def naming_extra(subject: str, extra: str = "") -> Iterator[None]:
    """In an error for a missing optional library, say which extra of this package installs it. Other errors pass.

    subject: what needs the library. extra: the extra to name instead of that of the library.

    >>> with naming_extra("the example"):  # doctest: +ELLIPSIS
    ...     raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
    Traceback (most recent call last):
    ModuleNotFoundError: the example needs vllm, not installed here: pip install ...[vllm]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        installs = extra or EXTRAS.get((error.name or "").partition(".")[0], "")
        if not installs or "pip install" in str(error):
            raise
        raise ModuleNotFoundError(
            f"{subject} needs {error.name}, not installed here: {install_line(installs)}", name=error.name
        ) from error


def install_line(extra: str = "", *, upgrade: bool = False) -> str:
    """The pip command that adds an extra to this installation, and works in any folder: from the checkout, the wheel,
    the repository or the index that the installation came from.

    >>> install_line("cli")  # doctest: +SKIP
    "pip install -e '/home/me/transferqueue[cli]'"
    """
    import shlex
    from importlib import metadata

    checkout = Path(__file__).resolve().parent.parent
    options = ["--upgrade"] if upgrade else []
    if (checkout / "pyproject.toml").is_file():
        return shlex.join(["pip", "install", *options, "-e", f"{checkout}{_bracketed(extra)}"])
    try:
        origin = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        origin = None
    return shlex.join(["pip", "install", *options, requirement(extra, origin)])


def requirement(extra: str, origin: str | None) -> str:
    """What pip installs this package from, with an extra.

    Args:
        extra: its name; "": none.
        origin: the text of ``direct_url.json`` (PEP 610), which pip writes unless it installs from an index; None: from
            an index.
    """
    import json
    from urllib.parse import unquote, urlsplit

    told = json.loads(origin or "{}")
    url, version = told.get("url", ""), told.get("vcs_info")
    path = Path(unquote(urlsplit(url).path))
    if url.startswith("file:"):
        return f"{path if path.exists() else DISTRIBUTION}{_bracketed(extra)}"
    if version:
        url = f"{version['vcs']}+{url}@{version['commit_id']}"
    return f"{DISTRIBUTION}{_bracketed(extra)}{f' @ {url}' if url else ''}"


def _bracketed(extra: str) -> str:
    return f"[{extra}]" if extra else ""


def lazy_names(package: str, names_by_module: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of `package`, which imports a name from its module at first use.

    names_by_module: for each module, relative to the package, its names, separated by spaces.

    A package that assigns it also lists the names in `__all__` and imports them under `TYPE_CHECKING`, for editors and
    type checkers.
    """
    modules = {name: f"{package}.{module}" for module, names in names_by_module.items() for name in names.split()}

    def getattr_of_package(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with naming_extra(f"{package}.{name}"):
            value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return getattr_of_package


def renamed_names(
    module: str, new_by_old: Mapping[str, str], otherwise: Callable[[str], Any] | None = None
) -> Callable[[str], Any]:
    """The `__getattr__` of `module` that keeps old names working: an old name warns (`DeprecationWarning`) and gives
    the renamed object.

    otherwise: looks up all other names; None: there are none.
    """

    def getattr_of_module(name: str) -> Any:
        new = new_by_old.get(name)
        if new is not None:
            warnings.warn(f"{module}.{name} is now {module}.{new}", DeprecationWarning, stacklevel=2)
            return getattr(sys.modules[module], new)
        if otherwise is not None:
            return otherwise(name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return getattr_of_module


@dataclass(frozen=True)
class Plugins:
    """Classes or functions of one kind, by name. Each is imported when it is first asked for.

    Args:
        group: The entry points at which other packages register theirs.
        ours: Those of this package: for each name a place, ``module:attribute``. They win over entry points of the same
            name, so that a name means the same in every installation.
    """

    group: str
    ours: Mapping[str, str]

    @property
    def places(self) -> dict[str, str]:
        """For each name its place."""
        from importlib.metadata import entry_points

        return {point.name: point.value for point in entry_points(group=self.group)} | dict(self.ours)

    def found(self) -> Mapping[str, Any]:
        """The plug-ins that are installed now, by name. Searches the packages (20 ms), so that later look-ups do not;
        each is still imported when it is first asked for, as by `load`."""
        return _Found(self.places)

    def load(self, name: str) -> Any:
        """Import the plug-in `name`, which is in `places`.

        Raises:
            UsageError: The import fails, since a library is missing for instance.
        """
        return _imported(name, self.places[name])


class _Found(Mapping[str, Any]):
    """See `Plugins.found`."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> Any:
        return _imported(name, self._places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _imported(name: str, place: str) -> Any:
    module, _, attribute = place.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{name!r} ({place}) cannot be imported: {error}; install its requirements") from error
