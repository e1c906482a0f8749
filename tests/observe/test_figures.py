"""Figures are declared once: the page shows what is declared, and answers read as dicts for one more release."""

import json
import warnings

import msgspec
import pytest

from tests.figures import KINDS, PAGE, documented, page
from tests.observe.snapshots import stats, table, task
from transferqueue.wire.answers import answer
from transferqueue.wire.answers.answer import figures, readable
from transferqueue.wire.answers.coordinators import (
    UnreachableCoordinator,
    by_coordinator,
    sessions_together,
    stats_together,
)
from transferqueue.wire.answers.sessions import Sessions, SessionStats
from transferqueue.wire.answers.stats import Stats, TableStats, TaskStats


@pytest.fixture(autouse=True)
def warned_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "_WARNED", set())


def test_the_page_shows_each_figure_as_it_is_declared() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "run python -m tests.figures"
    assert documented(PAGE.read_text()) == KINDS.keys() - {"StatsOfSeveral", "DoctorAnswerOfSeveral", "StoredSnapshot"}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_each_figure_says_what_it_means(kind: type[answer.Answer]) -> None:
    assert [figure.name for figure in figures(kind).values() if not figure.meaning.endswith(".")] == []


def test_a_figure_that_only_grows_is_declared_so() -> None:
    about = figures(TableStats)
    assert [name for name in ("rows_put", "rows_live", "rows_done") if about[name].grows] == ["rows_put", "rows_done"]


def test_a_repr_shows_what_differs_and_fits_a_terminal() -> None:
    assert repr(task(ready=3)) == "TaskStats(ready=3)"
    many = {f"task-{number}": task(ready=number, holders=["worker"] * 20, done=5) for number in range(1, 20)}
    text = repr(stats(tables={"rollouts": table(rows_put=8, tasks=many)}))
    assert max(map(len, text.splitlines())) <= 100
    assert "… 11 more" in text
    assert "rows_put=8" in text


def test_keys_work_until_the_next_release_and_each_warns_once() -> None:
    found = stats(tables={"t": table(rows_put=8, tasks={"train": task(ready=2)})})
    with pytest.warns(DeprecationWarning, match=r"Stats\['tables'\].*use Stats\.tables"):
        tables = found["tables"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert tables["t"]["tasks"]["train"]["ready"] == 2
        assert tables["t"].get("rows_put") == 8
        assert tables["t"].get("never", 7) == 7
        assert "rows_put" in tables["t"]
        assert dict(tables["t"])["rows_put"] == {**tables["t"]}["rows_put"] == 8
        assert dict(tables["t"].items()) == dict(zip(tables["t"], tables["t"].values(), strict=True))
        with pytest.raises(KeyError):
            found["never"]
    assert found["tables"] is tables, "the second time without a warning"


def test_plain_answers_are_dicts_as_json_has_them() -> None:
    found = stats(tables={"t": table()})
    assert json.loads(json.dumps(found.plain())) == json.loads(msgspec.json.encode(found))
    assert Sessions({"1": SessionStats(session=1, label="a")}).plain()["1"]["label"] == "a"
    assert readable(Sessions({"1": SessionStats(session=1)})) == "{'1': SessionStats(session=1)}"


def test_of_several_coordinators_a_figure_of_one_says_where_it_is() -> None:
    gone = UnreachableCoordinator(address="b", unreachable="no answer")
    together = stats_together({"a": stats(tables={"t": table()}), "b": gone})
    assert list(together.tables) == ["t"]
    assert by_coordinator("a,b", together) == {"a": stats(tables={"t": table()}), "b": gone}
    with pytest.raises(
        AttributeError, match=r"server belongs to one coordinator; read it from \.coordinators\[ADDRESS\]"
    ):
        _ = together.server
    assert {"server", "now_s", "waiting"}.isdisjoint(together.plain())


def test_sessions_of_several_coordinators_are_told_apart() -> None:
    each = {"a": Sessions({"1": SessionStats(session=1)}), "b": Sessions({"1": SessionStats(session=1, pid=2)})}
    together = sessions_together(each)
    assert [(name, one.pid) for name, one in together.items()] == [("a 1", 0), ("b 1", 2)]
    assert by_coordinator("a,b", together) == each
    with pytest.warns(DeprecationWarning, match=r"Sessions\.coordinators"):
        assert together["coordinators"] == each
    with pytest.raises(KeyError):
        together["1"]


def test_the_only_coordinators_answer_is_the_whole() -> None:
    only: Stats = stats(tables={"t": table(tasks={"train": TaskStats()})})
    assert stats_together({"a": only}) is only
    assert by_coordinator("a", only) == {"a": only}
