"""Write the notebook of the tour, `examples/tour.ipynb`, from `docs/learn/tour.md`: ``python -m tests.notebook``.

`tests/examples/test_notebook.py` fails if the notebook is not as this would write it, and runs its cells. The Python
program of the page becomes code cells, cut at its blank lines; all else, shell commands too, is text. Links are changed
to lead from the folder of examples.
"""

from __future__ import annotations

import json
import posixpath
import re
from typing import Any, Final

from tests.markdown import ROOT

PAGE: Final = ROOT / "docs" / "learn" / "tour.md"
NOTEBOOK: Final = ROOT / "examples" / "tour.ipynb"
_PROGRAM: Final = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"(\]\()(?!https?:|#)([^)]+)(\))")
_OWN_LINK: Final = " The same as [a notebook](../../examples/tour.ipynb)."
_INSTALL: Final = (
    "*Written from [the page](tour.md). It runs in any Jupyter whose Python has the package: `pip install "
    "'.[cli]'` in a checkout.*"
)


def notebook_text() -> str:
    """The notebook as JSON, in the format 4.5."""
    page = PAGE.read_text(encoding="utf-8").replace(_OWN_LINK, f"\n\n{_INSTALL}")
    parts = enumerate(_PROGRAM.split(page))  # text and programs in turn
    texts = [
        (("markdown", "code")[number % 2], text)
        for number, part in parts
        for text in (_pieces(part) if number % 2 else _sections(part))
    ]
    cells = [_cell(kind, number, text) for number, (kind, text) in enumerate(texts)]
    return json.dumps({"cells": cells, **_HEAD}, indent=1, ensure_ascii=False) + "\n"


def program() -> str:
    """The code cells of the notebook that is there, one below the other."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code") + "\n"


_HEAD: Final[dict[str, Any]] = {
    "metadata": {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    },
    "nbformat": 4,
    "nbformat_minor": 5,
}


def _pieces(code: str) -> list[str]:
    """The statements of a program between its blank lines. Imports stay together, and what is indented stays with what
    is above it."""
    return [piece.strip("\n") for piece in re.split(r"\n\n+(?=\S)(?!import |from )", code)]


def _sections(text: str) -> list[str]:
    """Text by its headings, with links that lead from the folder of examples."""
    linked = _LINK.sub(lambda link: f"{link[1]}{_from_examples(link[2])}{link[3]}", text)
    return [section.strip() for section in re.split(r"^(?=#)", linked, flags=re.MULTILINE) if section.strip()]


def _from_examples(target: str) -> str:
    return posixpath.relpath(posixpath.join("docs/learn", target), "examples")


def _cell(kind: str, number: int, text: str) -> dict[str, Any]:
    cell: dict[str, Any] = {
        "cell_type": kind,
        "id": f"cell-{number}",
        "metadata": {},
        "source": text.splitlines(keepends=True),
    }
    return cell | {"execution_count": None, "outputs": []} if kind == "code" else cell


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook_text(), encoding="utf-8")
