"""Write the tables of figures: in docs/reference/figures.md from their declarations in `transferqueue.wire.answers`, in
docs/reference/run-figures.md from `transferqueue.workflows.job.run.figures`.

``python -m tests.figures`` writes them; `tests/observe/test_figures.py` and `tests/workflows/job/test_run_figures.py`
fail if a page is not as this would write it. A table stands between ``<!-- figures: KIND -->`` and ``<!-- end -->``,
that of the metrics after ``<!-- metrics -->``, those of a run after ``<!-- run -->`` and ``<!-- held out -->``.
"""

from __future__ import annotations

import re
import types
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin

from transferqueue.observe.prometheus import exposition
from transferqueue.wire.answers import answer, coordinators, doctor, events, row, sessions, snapshots, stats
from transferqueue.wire.answers.answer import Answer, Figure, figures
from transferqueue.workflows.job.run.figures import FIGURES, HELD_OUT_FIGURES

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "reference" / "figures.md"
MODULES: Final = (answer, coordinators, doctor, events, row, sessions, snapshots, stats)
RUN_PAGE: Final = PAGE.with_name("run-figures.md")
KINDS: Final[dict[str, type[Answer]]] = {
    name: kind
    for module in MODULES
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, Answer) and kind.__struct_fields__
}
_METRICS: Final = re.compile(r"(<!-- metrics -->\n).*?(<!-- end -->)", re.DOTALL)
_RUN: Final = re.compile(r"(<!-- run -->\n).*?(<!-- end -->)", re.DOTALL)
_HELD_OUT: Final = re.compile(r"(<!-- held out -->\n).*?(<!-- end -->)", re.DOTALL)
_TABLE: Final = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def page(text: str) -> str:
    """The page with its tables as they are declared."""
    text = _METRICS.sub(lambda found: f"{found[1]}{_metrics()}{found[2]}", text)
    return _TABLE.sub(lambda found: f"{found[1]}{_table(KINDS[found[2]])}{found[3]}", text)


def run_page(text: str) -> str:
    """The page of a run's figures with its tables as they are described."""
    lines = ["| figure | unit | meaning | made by | warning |", "|---|---|---|---|---|"]
    for each in FIGURES:
        name = f"{each.name}NAME" if each.name.endswith("/") else each.name
        rule = f"{each.rule.about}: {each.rule.remedy}" if each.rule else ""
        lines.append(f"| `{name}` | {each.unit} | {each.meaning} | {each.made} | {rule} |")
    text = _RUN.sub(lambda found: "\n".join([found[1].rstrip(), *lines, found[2]]), text)
    names = {"reward/": "reward/NAME", "pass@": "pass@K"}
    held_out = ["| figure | unit | meaning | jobs |", "|---|---|---|---|"]
    held_out += [
        f"| `{names.get(each.name, each.name)}` | {each.unit} | {each.meaning} | {each.made} |"
        for each in HELD_OUT_FIGURES
    ]
    return _HELD_OUT.sub(lambda found: "\n".join([found[1].rstrip(), *held_out, found[2]]), text)


def documented(text: str) -> set[str]:
    """The kinds of answers whose tables a page has."""
    return {found[2] for found in _TABLE.finditer(text)}


def _metrics() -> str:
    """Each metric of an exposition in which every label has a value."""
    task = stats.TaskStats()
    table = stats.TableStats(
        rows_put=0, rows_live=0, rows_done=0, rows_dropped=0, balanced=True, rows_limit=0, tasks={"t": task},
        **{name: {"x": 0} for name in ("dropped", "staleness", "staleness_in_flight", "staleness_in_queue")},
    )  # fmt: skip
    turns = {"frame": stats.TurnStats(bounds_s=[1.0], counts=[0, 0], late={"Put": 0})}
    server = stats.ServerStats(address="", spill=stats.SpillStats(), turns=turns)
    waiting = [stats.Waiting(session=0, label="", request="Lease", waited_s=0.0, left_s=0.0, why="")]
    all_stats = stats.Stats(
        now_s=0.0, epoch=0, sessions=0, tables={"t": table}, channels={"c": stats.ChannelStats(newest=0)},
        server=server, waiting=waiting,
    )  # fmt: skip
    text = exposition(all_stats).decode()
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    lines = ["| metric | type | |", "|---|---|---|"]
    for name, about in re.findall(r"^# HELP (\w+) (.*)$", text, re.MULTILINE):
        sample = re.search(rf"^{name}(?:_bucket)?\{{(.*)\}} ", text, re.MULTILINE)
        labels = ",".join(re.findall(r'(\w+)="', sample[1])) if sample else ""
        lines.append(f"| `{name}{f'{{{labels}}}' if labels else ''}` | {kinds[name]} | {about} |")
    return "\n".join([*lines, ""])


def _table(kind: type[Answer]) -> str:
    own = [figure for name, figure in figures(kind).items() if name in kind.__annotations__]
    base = kind.__base__
    beside = f" Beside those of `{base.__name__}`:" if base is not None and base in KINDS.values() else ""
    about = " ".join((kind.__doc__ or "").split())
    lines = [f"`{kind.__name__}`: {about}{beside}", "", "| figure | type | |", "|---|---|---|"]
    return "\n".join([*lines, *map(_line, own), ""])


def _line(figure: Figure) -> str:
    grows = ", only grows" if figure.grows else ""
    return f"| `{figure.name}` | {shown(figure.type)}{grows} | {figure.meaning} |"


def shown(hint: Any) -> str:
    """A type in few words: ``{str: TaskStats}``, ``int or None``."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is dict:
        return f"{{{shown(parts[0])}: {shown(parts[1])}}}"
    if origin is list:
        return f"list of {shown(parts[0])}"
    if origin is Literal:
        return ", ".join(map(str, parts))
    if origin is types.UnionType or parts:
        return " or ".join(map(shown, parts))
    return "None" if hint is type(None) else getattr(hint, "__name__", str(hint))


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    RUN_PAGE.write_text(run_page(RUN_PAGE.read_text()))
