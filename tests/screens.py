"""Draw the screens of commands that pages show: ``python -m tests.screens`` writes top.svg, doctor.svg and inspect.svg
in docs/pictures. Each is the output of the command beside a small pipeline, of which the last two lack the trainer."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import time
from typing import Final

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

import transferqueue as tq
from tests.markdown import ROOT
from tests.web.pipeline import TRAINER, running

PICTURES: Final = ROOT / "docs" / "pictures"
COLUMNS: Final = 100
LOCAL_FONTS: Final = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
"""A picture fetches nothing: it uses the monospaced font of its reader."""
SHOWN_S: Final = 3.0
LOST_S: Final = 12.0


def draw(name: str, address: str, *words: str) -> None:
    """Run `transferqueue WORDS` as at a terminal, and draw its output."""
    command = [sys.executable, "-m", "transferqueue.cli", *words, "--address", address]
    ran = subprocess.run(
        command, env=os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(COLUMNS)}, capture_output=True, text=True
    )
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(ran.stdout.replace(address, "ipc:///tmp/q.sock".ljust(len(address)))))
    title = " ".join(("transferqueue", *words)).removesuffix(" --once")
    svg = console.export_svg(title=title, code_format=LOCAL_FONTS, unique_id=name)
    (PICTURES / f"{name}.svg").write_text(svg, encoding="utf-8")


def main() -> None:
    """Draw all screens."""
    with tq.connect("embedded", arena_bytes="256MiB") as queue, running(queue.address) as pipeline:
        pipeline.begun.wait()
        time.sleep(SHOWN_S)
        draw("top", queue.address, "top", "--once")
    with tq.connect("embedded", arena_bytes="256MiB") as queue, running(queue.address, without=(TRAINER,)):
        time.sleep(LOST_S)
        draw("doctor", queue.address, "doctor")
        draw("inspect", queue.address, "inspect", "rollouts", "0")


if __name__ == "__main__":
    main()
