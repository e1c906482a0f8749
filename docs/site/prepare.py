"""Copies what the documentation site shows into one folder, in which every link of a page leads to a page.

    python docs/site/prepare.py build/docs-source

Where a page shows a union of policies (``::: transferqueue.Selector``), its members follow, in the order of the union.
Pages keep their paths of the repository, so their relative links stay true. A linked source file becomes a page that
shows it, and a linked folder a page that lists it: the site needs no public host of the repository. Decisions, sources
and what only contributors read are not in the search. A link that leads nowhere ends the command.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("*.md", "docs/**/*.md", "bench/**/*.md", "deploy/*.md", "examples/*.md")
LINK = re.compile(r"(?P<before>\[[^\]]*\]\()(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?P<after>\))")
CONTINUED = re.compile(r"^(```\w+) (?:continue|norun)$", re.MULTILINE)
"""The opening of a block with a word for the tests, which Markdown does not know."""
FENCE = re.compile(r"^```.*?^```\s*?$", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".sbatch": "sh"}
STYLE = ROOT / "docs/site/phone.css"
SHOWN_AS_IT_IS = {".png", ".svg", ".ipynb"}
NOT_SEARCHED = ("docs/decisions/", "docs/contribute/", "bench/", "CHANGELOG", "CONTRIBUTING")
HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"


CONTRACT = re.compile(r"^::: transferqueue\.(\w+)$", re.MULTILINE)


def unions() -> dict[str, list[str]]:
    """The members of each public union of policies, those of unions inside it too."""
    found: dict[str, list[str]] = {}
    for node in ast.parse((ROOT / "transferqueue/policies.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) and isinstance(node.value.op, ast.BitOr):
            names = [part.strip() for part in ast.unparse(node.value).split("|")]
            found[ast.unparse(node.targets[0])] = [each for name in names for each in found.get(name, [name])]
    return found


def with_members(text: str) -> str:
    """The text of a page, with the contracts of all members behind that of each union."""
    members = unions()
    return CONTRACT.sub(
        lambda shown: "\n\n".join(f"::: transferqueue.{name}" for name in [shown[1], *members.get(shown[1], [])]), text
    )


class Site:
    """The folder that is being filled, and what it lacks so far."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.missing: list[str] = []
        self.written: set[Path] = set()

    def add_page(self, page: Path) -> None:
        """Copy one page, and whatever it links to that is not a page itself."""
        where = page.relative_to(ROOT)
        text = page.read_text(encoding="utf-8")
        linked = outside_fences(text, lambda part: LINK.sub(lambda link: self._link(page, link), with_members(part)))
        shown = CONTINUED.sub(r"\1", linked)
        self._write(where, HIDDEN * str(where).startswith(NOT_SEARCHED) + shown)

    def add_file(self, path: Path) -> None:
        """Copy a file that is shown or loaded as it is."""
        where = path.relative_to(ROOT)
        if where not in self.written:
            self.written.add(where)
            (self.out / where).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, self.out / where)

    def _link(self, page: Path, link: re.Match[str]) -> str:
        target, anchor = link["target"], link["anchor"] or ""
        if "://" in target or target.startswith("mailto:"):
            return link[0]
        # normpath, not resolve: the package's links to adapters and workflows would become other paths
        path = Path(os.path.normpath(page.parent / target))
        if not path.exists() or not path.is_relative_to(ROOT):
            self.missing.append(f"{page.relative_to(ROOT)}: {target}")
            return link[0]
        return f"{link['before']}{os.path.relpath(ROOT / self._place(path), page.parent)}{anchor}{link['after']}"

    def _place(self, path: Path) -> Path:
        """The path, inside the site, of the page or picture that shows `path`."""
        where = path.relative_to(ROOT)
        if path.is_dir():
            return self._listing(path, where / "index.md")
        if path.suffix == ".md":
            return where
        if path.suffix in SHOWN_AS_IT_IS:
            self.add_file(path)
            return where
        shown = where.with_name(where.name + ".md")
        if shown not in self.written:
            code = path.read_text(encoding="utf-8")
            self._write(shown, f"{HIDDEN}# {where}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{code}\n````\n")
        return shown

    def _listing(self, folder: Path, shown: Path) -> Path:
        if (folder / "README.md").exists():
            return folder.relative_to(ROOT) / "README.md"
        if shown not in self.written:
            self.written.add(shown)
            entries = [entry for entry in sorted(folder.iterdir()) if entry.is_file() and entry.name[0] not in "._"]
            lines = [f"- [{title(entry)}]({os.path.relpath(ROOT / self._place(entry), folder)})" for entry in entries]
            self._write(shown, f"{HIDDEN}# {folder.relative_to(ROOT)}\n\n" + "\n".join(lines) + "\n")
        return shown

    def _write(self, where: Path, text: str) -> None:
        self.written.add(where)
        (self.out / where).parent.mkdir(parents=True, exist_ok=True)
        (self.out / where).write_text(text, encoding="utf-8")


def title(path: Path) -> str:
    """The heading of a page, or the name of another file."""
    first = path.read_text(encoding="utf-8").partition("\n")[0] if path.suffix == ".md" else ""
    return first.lstrip("# ") or path.name


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """Apply `change` to what is outside of code blocks."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def prepare(out: Path) -> list[str]:
    """Fill `out` anew and return the links that lead nowhere."""
    shutil.rmtree(out, ignore_errors=True)
    site = Site(out)
    for page in sorted(path for pattern in PAGES for path in ROOT.glob(pattern)):
        site.add_page(page)
    site.add_file(STYLE)
    return site.missing


if __name__ == "__main__":
    dead = prepare(Path(sys.argv[1]))
    print("\n".join(f"dead link: {link}" for link in dead) or f"pages written to {sys.argv[1]}; dead links: 0")
    sys.exit(bool(dead))
