"""The documentation runs: Python blocks of the pages, examples in public docstrings; and its links lead somewhere."""

import ast
import asyncio
import doctest
import importlib
import inspect
import json
import subprocess
import sys
import types
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.markdown import PAGES, ROOT, Block, anchors, blocks, links, scripts
from tests.pictures import PICTURE, picture

SCRIPTS = [script for page in PAGES for script in scripts(page)]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for folder in ("", "adapters", "workflows")  # the two links are named here: not every Python's rglob follows them
    for path in (ROOT / "transferqueue" / folder).rglob("*.py")
    if ">>> " in path.read_text()
)


def test_the_readme_shows_code_that_runs() -> None:
    assert scripts(ROOT / "README.md")


_MODELS = "transformers.models.auto.modeling_auto"
PRELOADED = {"torch": "torch", "transformers": _MODELS, "tiny_model": _MODELS}
"""Modules that take seconds to load, by a word of the pages that load them: `PageRunner` loads each once, before the
first of its pages."""

SERVER = """
import gc, json, os, sys
import transferqueue.server.process.embedded
transferqueue.connect
for line in sys.stdin:
    page = json.loads(line)
    list(map(__import__, page["modules"]))
    gc.collect()
    gc.freeze()  # else each child looks through all of it when it ends: 0.6 s with torch
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(os.open(page["output"], os.O_WRONLY | os.O_CREAT), 1)
os.dup2(os.open(page["errors"], os.O_WRONLY | os.O_CREAT), 2)
os.chdir(page["folder"])
del gc, json, transferqueue, line, child
exec(compile(page["code"], page["name"], "exec"))
"""


class PageRunner:
    """Runs each page in a process of its own: a fork of one that has loaded the libraries, which took most of a page's
    processor time."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(self, script: Block, folder: Path) -> tuple[int, str]:
        """The exit code of a page, run in `folder` as a reader would run it, and its standard error."""
        if self._server is None or self._server.poll() is not None:
            command = [sys.executable, "-W", "default", "-c", SERVER]
            self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        output, errors = folder.with_suffix(".out"), folder.with_suffix(".err")
        page = {
            "modules": [
                module
                for word, module in PRELOADED.items()
                if word in script.code and find_spec(module.partition(".")[0])
            ],
            "code": "\n" * (script.line - 1) + script.code,
            "name": str(script.page),
            "folder": str(folder),
            "output": str(output),
            "errors": str(errors),
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(page) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline()), errors.read_text()

    def close(self) -> None:
        """End the process that forks."""
        if self._server is not None:
            self._server.communicate()


@pytest.fixture(scope="module")
def pages():
    """What runs the pages of this file."""
    runner = PageRunner()
    yield runner
    runner.close()


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_page_runs(script: Block, tmp_path: Path, pages: PageRunner) -> None:
    """In a process of its own, as a reader would run it; leaving something open shows on stderr."""
    code, errors = pages.run(script, tmp_path)
    assert code == 0, errors
    assert "Warning" not in errors
    assert "Exception ignored" not in errors


def test_the_readme_shows_what_its_code_prints(tmp_path: Path, pages: PageRunner) -> None:
    code, errors = pages.run(scripts(ROOT / "README.md")[0], tmp_path)
    assert code == 0, errors
    (shown,) = [block.code for block in blocks(ROOT / "README.md") if block.info == "text"]
    assert tmp_path.with_suffix(".out").read_text() == shown


def test_the_picture_of_the_readme_is_as_its_command_draws_it() -> None:
    assert PICTURE.read_text() == picture(), "run python -m tests.pictures"


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
    dead = []
    for link in (link for link in links(page) if "://" not in link):
        target, _, anchor = link.partition("#")
        there = (page.parent / target).resolve() if target else page
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            dead.append(link)
    assert dead == []


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
