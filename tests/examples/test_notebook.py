"""The notebook of the tour is the page's: it is as the page would write it, its cells run, and its links lead
somewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.notebook import NOTEBOOK, notebook_text, program


def test_the_notebook_is_written_from_the_page() -> None:
    assert NOTEBOOK.read_text(encoding="utf-8") == notebook_text(), "run: python -m tests.notebook"


@pytest.mark.slow
def test_its_cells_run_one_after_another(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "default", "-c", program()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "rows_done=16" in done.stdout


def test_its_links_lead_to_files() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    text = "".join(line for cell in cells if cell["cell_type"] == "markdown" for line in cell["source"])
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert links
    assert [link for link in links if not (NOTEBOOK.parent / link).exists()] == []


def test_each_cell_has_an_id_of_its_own() -> None:
    cells = json.loads(notebook_text())["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert [cell["cell_type"] for cell in cells].count("code") > 4


@pytest.mark.slow
def test_jupyter_runs_it(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs nbclient and ipykernel: make test-others")
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel: make test-others")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, timeout=60, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "rows_done=16" in printed
