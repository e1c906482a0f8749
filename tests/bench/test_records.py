"""The records that are kept: small, of one form, and each with a page that cites it.

Kept is what git has: a run that somebody made in this checkout and has not added yet fails nothing.
"""

import re
import subprocess
from pathlib import Path

import pytest

from bench.figures import figures
from bench.measurement_record import RECORD_BYTES_MAX, load_record, rounded
from bench.run_record import RECORDS, load_run
from bench.table import BEGIN, END, markdown
from tests.markdown import PAGES, ROOT


def kept_files() -> list[Path]:
    command = ["git", "ls-files", "-z", "--", str(RECORDS)]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted(ROOT / name for name in names if name and (ROOT / name).exists())


FILES = kept_files()
RECORD_FILES = [path for path in FILES if path.suffix == ".json"]
JSON_BYTES_MAX = 200_000
ALL_BYTES_MAX = 400_000
UNITS = {"s", "bytes", "ratio", "1/s", "count"}
CITED = re.compile(r"bench/records/([\w./-]*\w)")


@pytest.mark.parametrize("path", RECORD_FILES, ids=lambda path: str(path.relative_to(RECORDS)))
def test_a_kept_record_is_small_and_of_the_form(path: Path) -> None:
    assert path.stat().st_size <= RECORD_BYTES_MAX
    record = load_record(path)
    assert record.kind
    assert re.fullmatch(r"[0-9a-f]{9}( with changes)?", record.commit)
    assert record.command.startswith(("python -m ", "transferqueue "))
    assert record.start.startswith("20")
    for result in record.results:
        assert result.unit in UNITS
        assert result.n >= 1
        assert result.p10 <= result.median <= result.p90 or result.n == 1
        assert result == rounded(result), "three significant digits"
    names = [result.name for result in record.results]
    assert len(names) == len(set(names))


def test_all_records_together_are_small() -> None:
    assert sum(path.stat().st_size for path in RECORD_FILES) < JSON_BYTES_MAX
    assert sum(path.stat().st_size for path in FILES) < ALL_BYTES_MAX


def test_pages_cite_records_that_are_kept() -> None:
    cited = {name for page in PAGES for name in CITED.findall(page.read_text(encoding="utf-8"))}
    assert sorted(name for name in cited if not (RECORDS / name).exists()) == []


def test_every_record_is_listed_with_its_reader() -> None:
    listed = (ROOT / "bench" / "README.md").read_text(encoding="utf-8")
    kept = {RECORDS / path.relative_to(RECORDS).parts[0] for path in FILES}
    assert sorted(path.name for path in kept if path.stem not in listed) == []


def test_pictures_that_are_kept_are_shown_by_a_page() -> None:
    shown = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [path.name for path in FILES if path.suffix != ".json" and path.name not in shown] == []


def test_the_page_has_the_table_of_the_newest_run() -> None:
    run = load_run(max(path.parent for path in FILES if path.parent != RECORDS))
    assert [figure.work for figure in figures(run) if figure.value is None] == []
    page = (ROOT / "docs/understand/benchmarks.md").read_text(encoding="utf-8")
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == markdown(run)


def test_the_readme_has_figures_of_that_table() -> None:
    table = (ROOT / "docs/understand/benchmarks.md").read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Five figures")[2].partition("\n## ")[0]
    figures_shown = re.findall(r"\| ([\d.]+ ×)", readme)
    assert len(figures_shown) == 5
    assert [figure for figure in figures_shown if f"| {figure} |" not in table] == []


def test_raw_samples_are_ignored() -> None:
    assert "/bench/raw/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
