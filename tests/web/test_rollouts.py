"""The browser of recorded rows: questions, documents, and the page of a run's folder, asked with an HTTP client."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, urlencode, urlsplit

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import transferqueue as tq
from tests.client.test_recorded import wait_until_recorded
from tests.storage.test_row_files import change_a_value
from tests.web.recorded_run import ANSWERS, GROUP, JOB, MARKUP, STEPS, TABLE, make

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from starlette.requests import Request

from transferqueue.adapters.builtin import MARK
from transferqueue.web import run_page
from transferqueue.web.rollouts.document import PROMPTS, RESPONSES, TOKENS_MAX, content_of, encoded, short_rows
from transferqueue.web.rollouts.questions import PAGE_ROWS, GroupName, RecordColumns, RowFilter, RowName, asked
from transferqueue.web.rollouts.record import Page, RecordBrowser, RecordIndex
from transferqueue.web.rollouts.routes import WAITING_MAX, rollouts
from transferqueue.web.rollouts.tokenizer import RunTexts, pieces
from transferqueue.workflows.job.run.server import running_address

GENEROUS_S = 60
BASE = {"_tokens": 0}
TASKS = [tq.Task("train", needs=["x"])]
ROLES = (*RESPONSES, *PROMPTS, "prompt_ids", "loss_mask", "reward_terms", "turn_rewards", "advantages", "data")


# ---------------------------------------------------------------- questions and documents


def test_a_question_puts_values_beside_the_sql_and_quotes_names() -> None:
    columns = RecordColumns('a"b', ["_fate", "rewards", 'x"y'], ["rewards", 'x"y'])
    sql, values = columns.rows(RowFilter(table='a"b', step=3, worker="'; drop", reward='x"y', reward_min=0.5))
    assert 'from "a""b"' in sql
    assert '"x""y"::double' in sql
    assert "drop" not in sql
    assert values == [3, 0.5, "'; drop"]


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ({}, "missing required field `table`"),
        ({"table": "t", "stepp": "1"}, "unknown field `stepp`; it takes equal, fate, "),
        ({"table": "t", "step": "-1"}, r">= 0 - at `\$.step`"),
        ({"table": "t", "step": "x"}, "Expected `int | null`"),
        ({"table": "t", "step": "9" * 40}, "step"),
        ({"table": "t", "reward_min": "nan"}, "reward_min"),
        ({"table": "t", "order": "random"}, "Invalid enum value 'random'"),
        ({"table": "t", "page": "2001"}, "<= 2000"),
        ({"table": "x" * 257}, "length <= 256"),
    ],
)
def test_a_question_that_does_not_fit_is_refused_by_name(words: dict[str, str], match: str) -> None:
    with pytest.raises(tq.UsageError, match=match):
        asked(RowFilter, words)


@given(st.dictionaries(st.sampled_from([*RowFilter.__struct_fields__, "?"]), st.text(max_size=20)))
def test_any_words_are_a_question_or_refused(words: dict[str, str]) -> None:
    try:
        wanted = asked(RowFilter, words)
    except tq.UsageError:
        return
    sql, values = RecordColumns("t", ["_fate", "rewards"], ["rewards"]).groups(wanted)
    assert sql.count("?") == len(values)


def test_a_reward_that_is_no_column_of_numbers_says_which_are() -> None:
    columns = RecordColumns("t", ["_fate", "x"], ["x"])
    with pytest.raises(tq.NotFound, match='"y" of "t" is no column with one number for each row; those are x'):
        columns.reward("y")
    with pytest.raises(tq.UsageError, match=r"no column of rewards \(rewards, reward, score\); choose .*: x"):
        columns.rows(RowFilter(table="t", order="worst"))


def utf8(ids: Any) -> str:
    """Bytes as tokens."""
    return bytes(ids).decode(errors="replace")


@given(st.text(max_size=40))
def test_the_pieces_of_tokens_are_their_text(text: str) -> None:
    ids = list(text.encode())
    found = pieces(ids, utf8)
    assert (len(found), "".join(found)) == (len(ids), text)


def test_a_row_has_a_colour_for_each_column_with_a_value_a_token() -> None:
    row = BASE | {
        "response_ids": [65, 66, 67],
        "rollout_logprobs": [-0.5, float("nan"), -2.0],
        "token_versions": [1, 1, 2],
        "token_advantages": [0.5, -0.5, 0.0],
        "advantages": 0.25,
        "values": [1.0, 2.0],
        "entropy": [0.1, 0.2, 0.3],
    }
    content = content_of(row, "", (), utf8, tokens_max=2)
    assert [(one.column, one.scale) for one in content.colours] == [
        ("rollout_logprobs", "logprob"),
        ("token_advantages", "signed"),
        ("advantages", "signed"),
        ("token_versions", "version"),
        ("entropy", "number"),
    ]
    assert (content.colours[0].values, content.colours[2].values) == ([-0.5, None], [0.25, 0.25])
    assert (content.pieces, content.omitted, content.tokens) == (["A", "B"], 1, 3)
    assert content.columns == [("values", "[1, 2]")]


def test_an_episode_is_its_turns_with_rewards_and_calls() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"x": [1, "a"]}}</tool_call>'
    texts = [(f"a{call}", True), ("out", False), ("b<tool_call>no json</tool_call>", True)]
    row = BASE | {
        "response_ids": list("".join(text for text, _ in texts).encode()),
        "loss_mask": [drawn for text, drawn in texts for _ in text],
        "turn_rewards": [0.0, 2.0],
    }
    turns = content_of(row, "", (), utf8).turns
    assert [(one.who, one.reward) for one in turns] == [("model", 0.0), ("environment", None), ("model", 2.0)]
    assert [(call.name, call.arguments) for one in turns for call in one.calls] == [
        ("f", '{"x": [1, "a"]}'),
        ("", "no json"),
    ]
    assert turns[1].start == len(texts[0][0])


def episode(text: str) -> dict[str, Any]:
    """A row whose model said `text`, after an observation."""
    ids = list(text.encode())
    return BASE | {"response_ids": [65, *ids], "loss_mask": [False, *([True] * len(ids))]}


@given(
    st.text(max_size=40)
    | st.text(alphabet='"\\\\ud8019f{}:name,', max_size=40)
    | st.just('{"name": "\\\\ud800", "arguments": ["\\\\udfff"]}')
)
def test_any_text_in_a_tool_call_is_a_document(text: str) -> None:
    content = content_of(episode(f"<tool_call>{text}</tool_call>"), "", (), utf8)
    assert content.why_not == ""
    assert json.loads(encoded(content))["turns"][-1]["calls"]


def test_half_a_surrogate_pair_is_escaped() -> None:
    call = '<tool_call>{"name": "\\ud800", "arguments": {"\\udfff": 1}}</tool_call>'
    told = json.loads(encoded(content_of(episode(call), "", (), utf8)))
    assert told["turns"][-1]["calls"][0]["name"] == "\\ud800"


def test_a_tool_call_that_does_not_end_takes_no_time() -> None:
    blanks = "<tool_call>" + " " * 12_000
    begun = time.monotonic()
    assert [turn.calls for turn in content_of(episode(blanks), "", (), utf8).turns] == [[], []]
    assert content_of(episode("<tool_call>" * 1000), "", (), utf8).turns[-1].calls == []
    assert time.monotonic() - begun < 5.0


_NUMBERS = st.integers() | st.floats() | st.booleans() | st.none()
_ANYTHING = st.recursive(
    _NUMBERS | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
_MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "function"]), _ANYTHING, max_size=4), max_size=3
)


@given(
    st.dictionaries(
        st.sampled_from(["rewards", "x", "finish_reason", *ROLES]), _ANYTHING | st.lists(_NUMBERS, max_size=4)
    ),
    _MESSAGES,
)
def test_a_row_of_any_values_is_shown(row: dict[str, Any], messages: list[Any]) -> None:
    """A column counts as its role only if it has the values of that role."""
    for shown in (row, row | {"data": {"prompt": messages}}):
        for decode in (None, lambda ids: bytes(token % 128 for token in ids).decode()):
            content = content_of(BASE | shown, "rewards", ("exact",), decode)
            assert content.why_not == ""
            encoded(content)


def test_what_cannot_be_shown_says_why_and_the_life_is_there() -> None:
    content = content_of(BASE | {"response_ids": [1]}, "", (), lambda ids: "x" + 1)  # type: ignore[operator]
    assert content.why_not.startswith("what the row says cannot be shown: TypeError: ")


def test_a_prompt_may_be_messages_with_calls() -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
    ]
    content = content_of(BASE | {"data": {"prompt": messages, "answer": 3}, "response": "yes"}, "", (), None)
    assert [(one.who, one.text, [call.name for call in one.calls]) for one in content.prompt] == [
        ("user", "Hi", []),
        ("assistant", "", ["f"]),
    ]
    assert (content.text, content.columns) == ("yes", [("data.answer", "3")])


def test_data_with_a_prompt_alone_is_the_prompt() -> None:
    content = content_of(BASE | {"data": {"prompt": "Hi"}}, "", (), None)
    assert ([one.text for one in content.prompt], content.columns) == (["Hi"], [])


@pytest.mark.parametrize("job", ["x = 1", "not [toml", 'model = {path = "/none/such"}'])
def test_a_job_that_cannot_be_read_says_why_tokens_are_ids(tmp_path: Path, job: str) -> None:
    (tmp_path / "job.toml").write_text(job)
    texts = RunTexts(tmp_path)
    assert texts.decode is None
    assert texts.why_not.startswith("tokens are shown as ids, since the tokenizer of the run cannot be read: ")


def test_a_long_text_is_cut_and_says_so() -> None:
    content = content_of(BASE | {"response": "x" * 5000, "raw": b"123"}, "", (), None)
    assert content.text.endswith("1,000 more characters")
    assert content.columns == [("raw", "3 bytes")]


# ---------------------------------------------------------------- the page of a run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("duckdb")
    folder = tmp_path_factory.mktemp("runs") / "job"
    make(folder)
    return folder


class Browser:
    """The page of a run's folder."""

    def __init__(self, run: Path) -> None:
        command = [sys.executable, "-m", "transferqueue.cli", "page", str(run)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.link: SplitResult = urlsplit(self.process.stdout.readline().removeprefix("web ").strip())
        self.token = self.link.query.removeprefix("token=")

    def get(self, path: str, words: dict[str, Any] | None = None, **headers: str) -> tuple[int, str]:
        """Status and body of one answer."""
        client = http.client.HTTPConnection(self.link.hostname or "", self.link.port, timeout=GENEROUS_S)
        query = f"?{urlencode(words)}" if words else ""
        client.request("GET", path + query, headers={"Authorization": f"Bearer {self.token}"} | headers)
        answer = client.getresponse()
        body = answer.read().decode()
        client.close()
        return answer.status, body

    def ask(self, what: str = "", **words: Any) -> Any:
        """The answer to a question that is answered."""
        status, body = self.get(f"/rollouts{what}", words)
        assert status == 200, body
        return json.loads(body)

    def end(self) -> str:
        """Ctrl-C. Returns what it wrote to stderr."""
        self.process.send_signal(signal.SIGINT)
        _, errors = self.process.communicate(timeout=GENEROUS_S)
        assert self.process.returncode == 0
        return errors


@pytest.fixture(scope="module")
def page(run: Path) -> Iterator[Browser]:
    browser = Browser(run)
    yield browser
    assert browser.end() == ""


def test_a_finished_run_is_shown_without_a_queue(page: Browser, run: Path) -> None:
    assert page.ask() == {
        "live": False,
        "why_not_live": "",
        "path": str(run),
        "tables": [TABLE],
        "damaged": [],
    }
    about = page.ask("/about", table=TABLE)
    assert (about["rows"], about["first"], about["last"]) == ((STEPS + 1) * GROUP + 1, 1, STEPS)
    assert (about["finishes"], about["reasons"]) == (["length", "stop"], ["zero_advantage"])
    assert about["workers"] == ["generator-0", "generator-1", "prompts", "trainer"]
    assert about["why_not"] == ""
    assert page.get("/events")[0] == 404
    assert page.get("/")[0] == page.get("/rollouts.js")[0] == page.get("/row.js")[0] == 200


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        ({"step": 1}, [0, 1, 2, 3]),
        ({"step": 1, "until": 2, "order": "worst", "reward_max": 0}, [3, 7, 1, 5]),
        ({"step": 2, "order": "longest"}, [12, 7, 6, 5, 4]),
        ({"fate": "dropped"}, [8, 9, 10, 11]),
        ({"reason": "zero_advantage", "tokens_max": 1}, [8, 9, 10, 11]),
        ({"finish": "stop"}, [12]),
        ({"worker": "generator-1", "step": 2}, [4, 5, 6, 7]),
        ({"order": "worst", "reward_max": -0.4}, [3, 7]),
        ({"tokens_min": 30, "order": "shortest"}, [3, 7, 12]),
        ({"worker": MARKUP}, []),
        ({"order": "best", "page": 1}, []),
    ],
)
def test_rows_are_filtered_and_ordered(page: Browser, words: dict[str, Any], rows: list[int]) -> None:
    found = page.ask("/rows", table=TABLE, **words)
    assert ([line["row"] for line in found["rows"]], found["more"]) == (rows, False)


def test_a_line_says_who_worked_on_it_and_how_its_response_begins(page: Browser) -> None:
    first = page.ask("/rows", table=TABLE, step=1)["rows"][0]
    assert first["workers"] == ["prompts", "generator-0", "generator-1", "trainer"]
    assert (first["preview"], first["reward"], first["group"]) == (ANSWERS[0], 1.0, "0")


def test_groups_with_equal_rewards_are_found_and_a_group_is_shown_whole(page: Browser) -> None:
    found = page.ask("/groups", table=TABLE)["groups"]
    assert [(one["group"], one["count"]) for one in found] == [("3", 1), ("2", GROUP), ("1", GROUP), ("0", GROUP)]
    (equal,) = page.ask("/groups", table=TABLE, equal="true")["groups"]
    assert (equal["group"], equal["least"], equal["greatest"]) == ("2", 1.0, 1.0)
    group = page.ask("/group", table=TABLE, group=0, life=equal["life"])
    assert ["".join(one["content"]["pieces"]) for one in group["rows"]] == list(ANSWERS)
    assert group["more"] is False


def test_a_row_is_its_text_its_rewards_and_its_life(page: Browser) -> None:
    row = page.ask("/row", table=TABLE, row=12)
    content = row["content"]
    assert "Use the tool: what is 17 * 3?" in content["prompt"][0]["text"]
    assert content["terms"] == {"rewards:exact": 1.0, "rewards:short": 0.25}
    assert [turn["who"] for turn in content["turns"]] == ["model", "environment", "model"]
    assert content["turns"][0]["calls"] == [{"name": "search", "arguments": '{"query": "<b>17</b> * 3"}'}]
    assert [f"data.{MARKUP}", MARKUP] in content["columns"]
    failed = page.ask("/row", table=TABLE, row=0)
    events = [
        (one["what"], one["task"], by) for one, by in zip(failed["life"]["events"], failed["done_by"], strict=True)
    ]
    assert events[:5] == [
        ("put", "", "prompts"),
        ("leased", "rollout", "generator-0"),
        ("failed", "rollout", "generator-0"),
        ("leased", "rollout", "generator-1"),
        ("acked", "rollout", "generator-1"),
    ]
    assert failed["life"]["events"][2]["detail"] == "the engine was restarted"
    assert (failed["life"]["state"], failed["step"], failed["put_by"]) == ("done", 1, "prompts")


@pytest.mark.parametrize(
    ("what", "words", "status", "match"),
    [
        ("/rows", {"table": "none"}, 404, 'table "none" has no files'),
        ("/rows", {"table": TABLE, "where": "1=1"}, 400, "unknown field `where`"),
        ("/rows", {"table": TABLE, "reward": "_row"}, 404, '"_row" of "rollouts" is no column'),
        ("/rows", {"table": '"; drop table x; --'}, 404, "has no files"),
        ("/row", {"table": TABLE, "row": 99}, 404, 'row 99 of "rollouts" is not recorded'),
        ("/row", {"table": TABLE, "row": 2**62 + 1}, 400, "row"),
        ("/row", {"table": TABLE, "row": 0, "life": "other"}, 404, "is not recorded"),
        ("/group", {"table": TABLE, "group": 77, "life": "x"}, 404, "has no recorded rows"),
        ("/group", {"table": TABLE, "group": 0}, 400, "missing required field `life`"),
        ("/about", {"table": "../../etc"}, 404, "has no files"),
    ],
)
def test_what_is_not_there_is_told(page: Browser, what: str, words: dict[str, Any], status: int, match: str) -> None:
    found, body = page.get(f"/rollouts{what}", words)
    assert (found, match in body) == (status, True), body


def test_nothing_is_told_without_the_token(page: Browser) -> None:
    for path in ("/", "/rollouts", "/rollouts/rows?table=rollouts", "/rollouts/row?table=rollouts&row=1"):
        assert page.get(path, Authorization="Bearer wrong")[0] == 401
        assert page.get(path, Host="evil.example")[0] == 421
        assert page.get(path, Origin="http://evil.example")[0] == 403


@pytest.mark.slow
def test_any_words_in_a_path_are_answered_or_refused(page: Browser) -> None:
    for path in ("", "/about", "/rows", "/groups", "/row", "/group"):
        for query in (
            "%00",
            "table=%ff",
            "table=" + "x" * 5000,
            "table=rollouts&row=1e3",
            "&" * 500,
            f"table={quote(MARKUP)}",
        ):
            status, body = page.get(f"/rollouts{path}?{query}")
            assert status in (200, 400, 404), (path, query, body)


@pytest.mark.slow
def test_a_file_that_is_cut_and_a_page_that_changed_are_named_and_the_rest_is_shown(run: Path, tmp_path: Path) -> None:
    with tq.connect("embedded") as queue:
        table = queue.create_table(
            "t", tasks=[tq.Task("train", needs=["x"])], retention=tq.Recorded(str(tmp_path / "r"))
        )
        for step in range(3):
            table.put(x=[[1, 2]] * 4, reward=[float(step)] * 4)
            table.lease("train", rows=4).ack(step=step)
            table.checkpointed(step, task="train")
            wait_until_recorded(table, 4 * (step + 1))
    files = tq.open_run(tmp_path / "r").table().files
    os.truncate(files[0], files[0].stat().st_size - 50)
    change_a_value(files[1])
    record = RecordBrowser(tmp_path / "r")
    found = record.rows(RowFilter(table="t", order="best"))
    assert {line.step for line in found.rows} == {2}
    assert any(str(files[0]) in one and "was cut" in one for one in found.damaged)
    assert any(f"{files[1]}, row group 0" in one for one in found.damaged)
    with pytest.raises(tq.NotFound, match="its file is gone or damaged"):
        record.row(RowName(table="t", row=0))


@pytest.mark.slow
def test_a_record_that_grows_is_read_as_it_is(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    with tq.connect("embedded") as queue:
        table = queue.create_table(
            "t", tasks=[tq.Task("train", needs=["x"])], retention=tq.Recorded(str(tmp_path / "r"))
        )
        record = RecordBrowser(tmp_path / "r")
        assert record.about("t").rows == 0
        assert record.rows(RowFilter(table="t")).rows == []
        with pytest.raises(tq.NotFound, match="has no recorded rows"):
            record.group(GroupName(table="t", group=1, life="x"))
        table.put(x=[[1]] * (PAGE_ROWS + 1), group_id=1, group_size=PAGE_ROWS + 1)
        table.lease("train", rows=PAGE_ROWS + 1).ack()
        wait_until_recorded(table, PAGE_ROWS + 1)
        found = record.rows(RowFilter(table="t"))
        assert (len(found.rows), found.more, record.about("t").rows) == (PAGE_ROWS, True, PAGE_ROWS + 1)
        assert len(record.rows(RowFilter(table="t", page=1)).rows) == 1
        group = record.group(GroupName(table="t", group=1, life=found.rows[0].life))
        assert (len(group.rows), group.more) == (PAGE_ROWS + 1, False)


def test_the_tokens_of_one_answer_are_bounded() -> None:
    content = content_of(BASE | {"response_ids": [65] * (TOKENS_MAX + 5)}, "", (), utf8)
    assert (len(content.pieces), content.omitted) == (TOKENS_MAX, 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "match"),
    [
        ("none", "is no directory; name the one in which a server records rows"),
        ("empty", "is neither the folder of a job's run (it has no job.toml) nor a record"),
    ],
)
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, folder: str, match: str) -> None:
    pytest.importorskip("duckdb")
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "-m", "transferqueue.cli", "page", str(tmp_path / folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=GENEROUS_S)
    assert (done.returncode, match in " ".join(done.stderr.split())) == (2, True), done.stderr


@pytest.mark.slow
def test_a_run_without_rows_and_an_address_for_others(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "job", ignore=shutil.ignore_patterns("rows"))
    browser = Browser(tmp_path / "job")
    assert browser.ask()["tables"] == []
    assert browser.end() == ""
    command = [sys.executable, "-m", "transferqueue.cli", "page", str(run), "--web", "0.0.0.0:0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=GENEROUS_S)
    assert (done.returncode, "the page is not encrypted" in done.stderr) == (2, True)


# ---------------------------------------------------------------- several lives, slow questions, runs that may go on


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of a table that began anew: each row id and group is there twice."""
    pytest.importorskip("duckdb")
    folder = tmp_path_factory.mktemp("lives") / "r"
    for life in range(2):
        with tq.connect("embedded") as queue:
            table = queue.create_table("t", tasks=TASKS, retention=tq.Recorded(str(folder)))
            for group in range(PAGE_ROWS):
                rewards = [1.0, float("nan"), 0.0] if group == 0 else [1.0, 1.0, 0.5 if group == 1 else 1.0]
                ids = [np.arange(TOKENS_MAX // 4)] * 3
                table.put(
                    x=[[life]] * 3, reward=rewards, response_ids=ids, prompt_ids=ids, group_id=group, group_size=3
                )
            table.lease("train", rows=3 * PAGE_ROWS).ack(step=1)
            table.checkpointed(1, task="train")
            wait_until_recorded(table, 3 * PAGE_ROWS)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("order", ["newest", "worst", "best", "longest", "shortest"])
def test_pages_have_each_row_and_group_of_each_life_once(lives: Path, order: Any) -> None:
    record = RecordBrowser(lives)
    rows, groups = [], []
    for page in range(6):
        found = record.rows(RowFilter(table="t", order=order, page=page))
        assert found.more == (page < 5)
        rows += [(line.life, line.row) for line in found.rows]
    for page in range(2):
        groups += [
            (line.life, line.group) for line in record.groups(RowFilter(table="t", order=order, page=page)).groups
        ]
    assert (len(rows), len(set(rows))) == (6 * PAGE_ROWS, 6 * PAGE_ROWS)
    assert (len(groups), len(set(groups))) == (2 * PAGE_ROWS, 2 * PAGE_ROWS)


@pytest.mark.slow
def test_filters_choose_groups_that_are_counted_whole(lives: Path) -> None:
    record = RecordBrowser(lives)
    equal = record.groups(RowFilter(table="t", equal=True, reward_min=0.9)).groups
    assert len(equal) == PAGE_ROWS
    assert not {"0", "1"} & {line.group for line in equal}
    low = record.groups(RowFilter(table="t", reward_max=0.6, order="worst")).groups
    assert [(line.group, line.count, line.least, line.greatest) for line in low] == [
        ("0", 3, 0.0, 1.0), ("0", 3, 0.0, 1.0), ("1", 3, 0.5, 1.0), ("1", 3, 0.5, 1.0)
    ]  # fmt: skip


@pytest.mark.slow
def test_a_reward_that_is_not_a_number_is_none(lives: Path) -> None:
    record = RecordBrowser(lives)
    for order in ("best", "worst"):
        assert record.rows(RowFilter(table="t", order=order)).rows[0].reward is not None
        last = record.rows(RowFilter(table="t", order=order, page=5)).rows[-2:]
        assert [line.reward for line in last] == [None, None]


@pytest.mark.slow
def test_a_group_is_cut_before_it_is_read_and_has_its_prompt_once(lives: Path) -> None:
    record = RecordBrowser(lives)
    line = record.groups(RowFilter(table="t")).groups[0]
    group = record.group(GroupName(table="t", group=int(line.group), life=line.life))
    tokens, each = TOKENS_MAX // 4, TOKENS_MAX // 3
    assert [one.content.tokens for one in group.rows] == [tokens] * 3
    assert [len(one.content.ids) for one in group.rows] == [min(tokens, each)] * 3
    assert [bool(one.content.prompt) for one in group.rows] == [True, False, False]
    assert {one.record for one in group.rows} == {line.life}


def test_lists_are_cut_in_arrow_and_keep_their_lengths() -> None:
    table = pa.table({
        "response_ids": pa.array([[1, 2, 3, 4], [5]], pa.large_list(pa.int32())),
        "entropy": pa.array([[0.5, 1, 2, 3], None], pa.list_(pa.float16())),
        "pair": pa.array([[1, 2, 3], [4, 5, 6]], pa.list_(pa.int8(), 3)),
    })  # fmt: skip
    first, second = (content_of(BASE | row, "", (), None) for row in short_rows(table, 2))
    assert (first.ids, first.omitted, first.tokens) == ([1, 2], 2, 4)
    assert [(one.column, one.values) for one in first.colours] == [("entropy", [0.5, 1.0])]
    assert first.columns == [("pair", "[1, 2, … 1 more]")]
    assert (second.ids, second.omitted) == ([5], 0)


@pytest.mark.slow
def test_a_question_has_one_deadline_for_all_its_parts(lives: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = RecordBrowser(lives)
    monkeypatch.setattr("transferqueue.web.rollouts.record.QUERY_S", 1e-9)
    for question in (record.about, lambda table: record.row(RowName(table=table, row=1))):
        with pytest.raises(tq.DeadlineExceeded, match="the question takes longer than"):
            question("t")
    with pytest.raises(tq.DeadlineExceeded, match="the read took longer"):
        tq.open_run(lives).table("t").arrow(timeout_s=0)


class Slow:
    """A record whose rows take their time."""

    path, name = Path("slow"), "slow"

    def __init__(self) -> None:
        self.go, self.asked = threading.Event(), 0

    def index(self) -> RecordIndex:
        """At once."""
        return RecordIndex(tables=["t"], damaged=[])

    def rows(self, _wanted: RowFilter) -> Page:
        """When it may."""
        self.asked += 1
        assert self.go.wait(GENEROUS_S)
        return Page()

    about = groups = row = group = rows


def test_abandoned_questions_are_not_asked_and_lock_nobody_out() -> None:
    record = Slow()
    routes = rollouts(record, live=True)  # type: ignore[arg-type]

    def request(left: asyncio.Event) -> Request:
        async def receive() -> Any:
            await left.wait()
            return {"type": "http.disconnect"}

        return Request({"type": "http", "query_string": b"table=t", "headers": [], "path": "/"}, receive)

    async def ask() -> None:
        left, stays = asyncio.Event(), asyncio.Event()
        abandoned = [asyncio.ensure_future(routes["/rollouts/rows"](request(left))) for _ in range(WAITING_MAX)]
        await asyncio.sleep(0)
        with pytest.raises(tq.Full):
            await routes["/rollouts/rows"](request(stays))
        told = json.loads((await routes["/rollouts"](request(stays))).body)
        assert (told["live"], told["tables"]) == (True, ["t"])
        left.set()
        await asyncio.gather(*abandoned)
        later = asyncio.ensure_future(routes["/rollouts/rows"](request(stays)))
        await asyncio.sleep(0)
        record.go.set()
        assert (await later).status_code == 200
        assert record.asked <= 2

    asyncio.run(asyncio.wait_for(ask(), GENEROUS_S))


@pytest.mark.parametrize("listens", [True, False])
def test_a_run_that_cannot_be_reached_says_why_and_an_ended_one_is_not_running(
    tmp_path: Path, listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that does not answer is no ended one; a socket that an ended server left is."""
    monkeypatch.setattr(run_page, "CONNECT_S", 0.2)

    async def reason() -> str:
        async with run_page._queue_of(tmp_path) as (queue, why_not):
            assert queue is None
            return why_not

    assert asyncio.run(reason()) == ""
    with tempfile.TemporaryDirectory(prefix="tq-") as runtime, socket.socket(socket.AF_UNIX) as server:
        (tmp_path / "runtime").write_text(runtime)
        server.bind(f"{runtime}/control.sock")
        if listens:
            server.listen()
        else:
            server.close()
        assert asyncio.run(reason()).startswith("its queue cannot be shown: ") == listens


def test_the_socket_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runtime").write_text(str(tmp_path / "closed"))
    (tmp_path / "closed").mkdir(mode=0)
    me = os.geteuid()
    os.seteuid(me or 65534)  # root may look everywhere
    try:
        with pytest.raises(tq.PermissionDenied, match=r"cannot be seen: .* is not yours; ask as its user"):
            running_address(tmp_path)
    finally:
        os.seteuid(me)


def test_a_chat_template_that_fails_hides_no_text_and_paths_are_relative_to_the_place(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    (tmp_path / "model").mkdir()
    folder.mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({MARK: 1}))
    (tmp_path / "template").write_text("{{ raise_exception('no') }}")
    job = JOB.format(model="model").replace("[model]", f'[model]\nchat_template = "{tmp_path / "template"}"')
    (folder / "job.toml").write_text(job)
    start = {"began": "", "python": "", "packages": {}, "place": str(tmp_path)}
    (folder / "run.json").write_text(json.dumps([start]))
    texts = RunTexts(folder)
    assert texts.why_not == ""
    assert texts.decode is not None
