"""Recorded rows in a real browser, on a desktop and on a phone: `make test-web`.

Skipped where selenium, Chromium, its driver or DuckDB is missing. With TRANSFERQUEUE_SCREENS=DIRECTORY a picture is
left there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import transferqueue as tq
from tests.markdown import ROOT
from tests.web.pictures import DESKTOP, PHONE, browser
from tests.web.recorded_run import ANSWERS, MARKUP, TABLE, make

pytest.importorskip("selenium.webdriver")
pytest.importorskip("starlette")
pytest.importorskip("duckdb")
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="needs chromium and chromedriver (Debian: chromium-driver)",
    ),
]
GENEROUS_S = 60
NO_MARKUP = "return document.querySelectorAll('#rollouts img, #rollouts script, #rollouts b').length"
COLOURED = "return [...document.querySelectorAll('#row .tokens span')].filter(one => one.style.backgroundColor).length"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place") / "runs" / "sums"
    make(folder)
    return folder


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    found = browser(str(tmp_path_factory.mktemp("profile")))
    yield found
    found.quit()


@pytest.fixture(scope="module")
def page(run: Path, driver: Any) -> Iterator[Rollouts]:
    with opened(run, driver) as found:
        yield found


@contextmanager
def opened(run: Path, driver: Any) -> Iterator[Rollouts]:
    """The page of a run in the browser."""
    place = run.parent.parent
    command = [sys.executable, "-m", "transferqueue.cli", "page", str(run.relative_to(place))]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=place, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Rollouts(driver, process.stdout.readline().removeprefix("web ").strip())
        finally:
            process.kill()


class Rollouts:
    """The browser of rows as a person sees it."""

    def __init__(self, driver: Any, link: str) -> None:
        self.driver = driver
        self.screen(DESKTOP)
        driver.get(link)
        self.until("#list [aria-label=Rows]", ".+")

    def screen(self, metrics: dict[str, Any]) -> None:
        """See it on such a screen."""
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def text(self, selector: str) -> str:
        """What stands there."""
        return str(
            self.driver.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
        )

    def until(self, selector: str, part: str) -> str:
        """What stands there once it has that part."""
        WebDriverWait(self.driver, GENEROUS_S, poll_frequency=0.05).until(
            lambda _: re.search(part, self.text(selector)), f"{selector} never said {part}"
        )
        return self.text(selector)

    def click(self, selector: str) -> None:
        """Click what is there."""
        self.driver.execute_script("document.querySelector(arguments[0]).click()", selector)

    def choose(self, name: str, value: str) -> None:
        """Set a filter."""
        script = "document.getElementById('questions').elements[arguments[0]].value = arguments[1]"
        self.driver.execute_script(script, name, value)

    def show_row(self, row: int) -> str:
        """Ask for a row by its id."""
        field = self.driver.find_element(By.ID, "row-id")
        field.clear()
        field.send_keys(f"{row}\n")
        return self.until("#row h3", f"Row {row} of {TABLE}") and self.text("#row")

    def lines(self) -> list[str]:
        """The ids in the list."""
        script = "return [...document.querySelectorAll('#list tbody tr')].map(one => one.cells[0].textContent)"
        return list(self.driver.execute_script(script))


def test_it_opens_on_the_newest_step_without_a_queue(page: Rollouts) -> None:
    assert page.text("#record-facts") == "13 rows · steps 1 to 2"
    assert page.lines() == ["4", "5", "6", "7", "12"]
    assert page.text("#state") == "not running"
    assert page.driver.find_element(By.ID, "verdict").is_displayed() is False


def test_ready_questions_and_filters(page: Rollouts) -> None:
    page.click("#worst")
    page.until("#list tbody tr td", "^7$")
    assert page.lines() == ["7", "5", "4", "6", "12"]
    page.click("#equal")
    page.until("#list [aria-label=Groups]", "least reward")
    assert page.lines() == ["2"]
    page.choose("show", "rows")
    page.choose("fate", "dropped")
    page.click("#questions button")
    page.until("#list", "zero_advantage")
    assert page.lines() == ["8", "9", "10", "11"]
    page.choose("reward_min", "much")
    page.click("#questions button")
    page.until("#list .bad", r"the question is not understood: .* reward_min")
    page.choose("reward_min", "")
    page.choose("fate", "")
    page.choose("step", "77")
    page.click("#questions button")
    page.until("#list", "no such rows; dropped rows have no step")
    page.choose("step", "")
    page.click("#worst")
    page.until("#list tbody tr td", "^7$")


def test_an_episode_has_turns_with_its_tool_call_and_the_row_a_life(page: Rollouts) -> None:
    shown = page.show_row(12)
    assert page.text("#row .call") == 'search({"query": "<b>17</b> * 3"})'
    turns = [one.text for one in page.driver.find_elements(By.CSS_SELECTOR, "#row .completion h4")]
    assert turns == ["model · reward 0", "environment", "model · reward 1"]
    assert "rewards:exact" in page.text("#row [aria-label='Reward terms']")
    assert MARKUP in shown
    shown = page.show_row(0)
    lanes = [one.text for one in page.driver.find_elements(By.CSS_SELECTOR, "#row .strip.life > span:first-child")]
    assert lanes == ["producer", "rollout", "train"]
    assert "generator-0" in shown
    failed = "return document.querySelectorAll('#row .life path.trouble').length"
    assert page.driver.execute_script(failed) == 1
    assert "the engine was restarted" in page.text("#row [aria-label=Events]")


def test_tokens_are_coloured_by_the_column_that_is_chosen(page: Rollouts) -> None:
    page.show_row(12)
    offered = [one.text for one in page.driver.find_elements(By.CSS_SELECTOR, "#colour option")]
    assert offered == ["rollout_logprobs", "token_advantages", "token_versions", "no colour"]
    assert page.driver.execute_script(COLOURED) > 50
    for name, legend in {"token_versions": "versions 2, 3", "token_advantages": "green: up to"}.items():
        page.driver.find_element(By.CSS_SELECTOR, f"#colour option:nth-child({offered.index(name) + 1})").click()
        page.until("#row .legend", legend)
    title = page.driver.find_element(By.CSS_SELECTOR, "#row .tokens span").get_attribute("title")
    assert title.startswith("token 0 · id ")
    assert "token_versions 2" in title
    page.driver.find_element(By.CSS_SELECTOR, "#colour option:nth-child(4)").click()
    assert page.driver.execute_script(COLOURED) == 0
    page.driver.find_element(By.CSS_SELECTOR, "#colour option:nth-child(1)").click()


def test_a_group_stands_beside_each_other(page: Rollouts) -> None:
    page.click("#worst")
    page.until("#list tbody tr td", "^7$")
    page.click("#list tbody tr td:nth-child(4) button")
    page.until("#row h3", "Group 1 of rollouts")
    cards = page.driver.find_elements(By.CSS_SELECTOR, "#row .members article")
    assert [one.find_element(By.CSS_SELECTOR, ".tokens").text for one in cards] == list(ANSWERS)
    tops = {one.location["y"] for one in cards}
    assert len(tops) == 1
    page.click("#row .members article button")
    page.until("#row h3", "Row 4 of rollouts")


def test_texts_are_shown_as_text_and_nothing_is_executed(page: Rollouts) -> None:
    """Markup in a prompt, a response, a tool call, a value and the name of a column."""
    page.driver.execute_script("window.alert = () => { document.title = 'executed'; }")
    for row in (7, 12):
        shown = page.show_row(row)
        assert f"data.{MARKUP}" in shown
        assert page.driver.execute_script(NO_MARKUP) == 0
    page.click("#list tbody tr td:nth-child(4) button")
    page.until("#row h3", "Group")
    assert MARKUP in page.text("#row .prompt")
    assert MARKUP in page.text("#list")
    assert page.driver.execute_script(NO_MARKUP) == 0
    assert page.driver.title.startswith("Rollouts of ")


def test_on_a_phone_nothing_is_wider_than_the_screen(page: Rollouts) -> None:
    page.screen(PHONE)
    try:
        for row in (12, 7):
            page.show_row(row)
            assert page.driver.execute_script("return document.documentElement.scrollWidth") <= PHONE["width"]
        page.click("#row > button")
        page.until("#row h3", "Group")
        assert page.driver.execute_script("return document.documentElement.scrollWidth") <= PHONE["width"]
    finally:
        page.screen(DESKTOP)


def test_a_picture_is_left_where_one_is_wanted(page: Rollouts) -> None:
    page.click("#worst")
    page.show_row(12)
    directory = os.environ.get("TRANSFERQUEUE_SCREENS")
    if directory:
        page.screen(DESKTOP | {"width": 1180})
        page.driver.execute_script("window.scrollTo(0, 0)")
        height = page.driver.execute_script(
            "return document.querySelector('#row [aria-label=Columns]').getBoundingClientRect().top"
        )
        page.screen(DESKTOP | {"width": 1180, "height": int(height)})
        Path(directory).mkdir(parents=True, exist_ok=True)
        assert page.driver.save_screenshot(str(Path(directory, "rollouts.png")))
        page.screen(DESKTOP)


def test_it_complains_of_nothing_but_refused_questions(page: Rollouts) -> None:
    told = [one["message"] for one in page.driver.get_log("browser")]
    assert [one for one in told if "status of 400" not in one] == []


@pytest.fixture
def server() -> Iterator[str]:
    """A server with its socket where that of a job's run has it."""
    with tempfile.TemporaryDirectory(prefix="tq-") as directory:
        address = f"ipc://{directory}/control.sock"
        command = [sys.executable, "-m", "transferqueue.cli", "serve", "--address", address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                assert process.stdout.readline().startswith("ready")
                yield address
            finally:
                process.kill()


def test_a_run_that_goes_on_shows_its_queue_and_live_rows_too(driver: Any, run: Path, server: str) -> None:
    """The folder of a job has a file `runtime`, which names the directory of its server's socket."""
    (run / "runtime").write_text(str(Path(server.removeprefix("ipc://")).parent))
    with tq.connect(server, label="prompts") as queue:
        table = queue.create_table(TABLE, tasks=[tq.Task("train", needs=["rewards"])])
        for _ in range(20):
            table.put(prompt=[MARKUP], response_ids=[[46, 47]], rollout_logprobs=[[-1.0, -2.0]], rewards=[1.0])
        with opened(run, driver) as page:
            page.until("#state", "live")
            shown = page.show_row(12)  # the record has a row of an earlier life with this id
            assert "live" in shown
            assert "life " not in page.text("#row p")
            page.click("#list tbody tr td button")
            page.until("#row p", "done · life ")
            shown = page.show_row(17)
            assert "live" in shown
            assert MARKUP in page.text("#row .prompt")
            assert page.text("#row .completion") == "IJ"
            assert driver.execute_script(NO_MARKUP) == 0
    (run / "runtime").unlink()
