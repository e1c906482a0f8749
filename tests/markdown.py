"""The code blocks and links of a Markdown page, for the tests that hold the documentation to its word."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced block: `info` is what follows the opening fence, `line` where its code starts."""

    page: Path
    line: int
    info: str
    code: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, m.start("code")) + 1, m["info"].strip(), m["code"])
        for m in _FENCE.finditer(text)
    ]


def links(page: Path) -> list[str]:
    """The targets of a page's links, code blocks left out."""
    return [m["target"] for m in _LINK.finditer(_FENCE.sub("", page.read_text()))]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = _FENCE.sub("", page.read_text())
    headings = re.findall(r"^#+ (.+?) *$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"\s", "-", heading) for heading in plain}


def scripts(page: Path) -> list[Block]:
    """What a page asks to be run: its `python` blocks. `python continue` goes on from the block before it, and
    `python norun` is for the eye only (it needs a cluster, or an accelerator)."""
    found: list[Block] = []
    for block in blocks(page):
        if block.info == "python":
            found.append(block)
        elif block.info == "python continue":
            first = found.pop()
            gap = "\n" * (block.line - first.line - first.code.count("\n"))
            found.append(Block(page, first.line, first.info, first.code + gap + block.code))
        elif block.info.startswith("python") and block.info != "python norun":
            raise ValueError(f"{block}: ```{block.info}: say python, python continue or python norun")
    return found
