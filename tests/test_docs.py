"""The documentation runs: Python blocks of the pages, examples in public docstrings; and its links lead somewhere."""

import ast
import asyncio
import doctest
import importlib
import inspect
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.markdown import PAGES, ROOT, Block, blocks, links, scripts

SCRIPTS = [script for page in PAGES for script in scripts(page)]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for folder in ("", "adapters", "workflows")  # the two links are named here: not every Python's rglob follows them
    for path in (ROOT / "transferqueue" / folder).rglob("*.py")
    if ">>> " in path.read_text()
)


def test_the_readme_shows_code_that_runs() -> None:
    assert scripts(ROOT / "README.md")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_page_runs(script: Block, tmp_path: Path) -> None:
    """In a process of its own, as a reader would run it; leaving something open shows on stderr."""
    code = "\n" * (script.line - 1) + script.code
    command = [sys.executable, "-W", "default", "-c", f"exec(compile({code!r}, {str(script.page)!r}, 'exec'))"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_docstring_examples_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One test for all modules: a module without examples is no case of its own."""
    monkeypatch.setattr(doctest, "exec", run_example, raising=False)
    runner = doctest.DocTestRunner(
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
    )
    failed = {}
    for name in dict.fromkeys(MODULES):
        for example in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name)):
            result = runner.run(example, compileflags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if result.failed:
                failed[example.name] = result
    assert not failed


def run_example(code: types.CodeType, names: dict[str, Any]) -> None:
    """Run a line of an example, in an event loop if it awaits anything, as ``python -m asyncio`` does."""
    running = eval(code, names)
    if inspect.iscoroutine(running):
        asyncio.run(running)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    local = [target.split("#")[0] for target in links(page) if "://" not in target and not target.startswith("#")]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_blocks_are_found_with_their_line(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\na = 1\n```\ntext\n```python continue\nprint(a)\n```\n```sh\nls\n```\n")
    assert [(b.line, b.info, b.code) for b in blocks(page)] == [
        (4, "python", "a = 1\n"),
        (8, "python continue", "print(a)\n"),
        (11, "sh", "ls\n"),
    ]
    (script,) = scripts(page)
    assert script.code == "a = 1\n\n\n\nprint(a)\n"
