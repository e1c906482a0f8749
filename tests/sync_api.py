"""Write the API for threads, `transferqueue/client/sync`, from the one for event loops, `transferqueue/client/aio`; and
so the service of `workflows/service`.

``python -m tests.sync_api`` writes the modules; `tests/client/test_sync_api.py` fails if one of them is not as this
would write it. Each rule replaces text, in code and docstrings alike; ruff then sorts imports, removes unused ones, and
wraps lines. Written by hand in both folders: `loader`, since threads need one of their own to fetch, and
`aio/awaitable.py`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
CLIENT: Final = ROOT / "transferqueue" / "client"
MODULES: Final = ("batch", "pipeline", "queue", "reservation", "table", "weight_channel")
SERVICE: Final = ROOT / "workflows" / "service"
WRITTEN: Final = {CLIENT / "sync" / f"{name}.py": CLIENT / "aio" / f"{name}.py" for name in MODULES} | {
    SERVICE / "sync.py": SERVICE / "aio.py"
}
"""Each module for threads, and the one for event loops that it is written from."""

RULES: Final = [
    (r"await asyncio\.to_thread\(([\w.]+)\)", r"\1()"),
    (r"(?<!\w)\(await ([\w.]+\([^()]*(?:\([^()]*\)[^()]*)*\))\)", r"\1"),
    (r"\bawait ", ""),
    (r"\basync (?=def |for |with )", ""),
    (r"(?<=``)async (?=(with|for)``)", ""),
    (r"\b__a(?=enter__|exit__|iter__|next__)", "__"),
    (r"AwaitableContext\[(\w+)\]", r"\1"),
    (r"\ban `Async(?!Flow)(?=[A-Z])", "a `"),
    (r"\bAsync(?!Flow)(?=[A-Z])", ""),
    (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\banext\(", "next("),
    (r"\basync(?=contextmanager\b)", ""),
    (r"\brun_async\b", "run_sync"),
    (r"\baconnect\b", "connect"),
    (r"\baclose\b", "close"),
    (r"\bclient\.aio\b", "client.sync"),
    (r"\bAwait it, or use it as", "Use it as"),
    (r"\bevent loop(?=s?\b)", "thread"),
    (r"\ba cancellation\b", "an interrupt"),
]
"""A pattern and what stands in its place, in the order in which they are applied."""


def sync_text(module: Path) -> str:
    """The text of a module for threads."""
    source = WRITTEN[module]
    text = _without_awaitables(source.read_text())
    for pattern, replacement in RULES:
        text = re.sub(pattern, replacement, text)
    named = "/".join(source.parts[-3:])
    text = f"# Written by `python -m tests.sync_api` from {named}: change it there.\n{text}"
    fixed = _ruff(text, "check", "--fix-only", "--select", "F401,I", "--stdin-filename", str(module))
    return _ruff(fixed, "format", "--stdin-filename", str(module))


def _without_awaitables(text: str) -> str:
    """``AwaitableContext(lambda: expression)`` becomes ``expression``."""
    while (found := re.search(r"AwaitableContext\(\s*lambda: ", text)) is not None:
        end, depth = found.end(), 1
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        text = text[: found.start()] + text[found.end() : end - 1].rstrip() + text[end:]
    return text


def _ruff(text: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", "--quiet", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def main() -> None:
    """Write all modules."""
    for module in WRITTEN:
        module.write_text(sync_text(module))


if __name__ == "__main__":
    main()
