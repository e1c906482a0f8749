"""The page in a real browser, beside a pipeline that runs: `make test-web`.

Skipped where selenium, Chromium or its driver is missing. With TRANSFERQUEUE_SCREENS=DIRECTORY the pictures are left
there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

import transferqueue as tq
from tests.web.pipeline import Pipeline, running

webdriver = pytest.importorskip("selenium.webdriver")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

from transferqueue.web.subprocesses import start_page  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver (Debian: chromium-driver)"),
]
GENEROUS_S = 60
TROUBLE_S = 18  # longer than a verdict's patience and a sample
TOKEN = "token-of-the-test"  # noqa: S105
QUIET = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --force-color-profile=srgb --lang=en"
)


@pytest.fixture(scope="module")
def queue() -> Iterator[tq.Queue]:
    with (
        tempfile.TemporaryDirectory(prefix="tq-") as runtime,
        tq.connect(runtime=runtime, arena_bytes="64MiB") as found,
    ):
        yield found


@pytest.fixture(scope="module")
def link(queue: tq.Queue) -> Iterator[str]:
    process, link = start_page(queue.address, "127.0.0.1:0", TOKEN)
    yield link
    process.stdin.close()  # type: ignore[union-attr]
    assert process.wait(GENEROUS_S) == 0
    process.stdout.close()  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def driver(link: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in [*QUIET.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}", "--window-size=1180,1000"]:
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield found
    found.quit()


class Page:
    """The page as a person sees it."""

    def __init__(self, driver: webdriver.Chrome, link: str) -> None:
        self.driver, self.link = driver, link
        driver.get(link)

    def text(self, selector: str) -> str:
        """What stands there."""
        return str(
            self.driver.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", selector)
        )

    def until(self, selector: str, pattern: str, timeout_s: float = GENEROUS_S) -> str:
        """What stands there once it matches."""
        wait = WebDriverWait(self.driver, timeout_s, poll_frequency=0.1)
        return str(
            wait.until(
                lambda _: (found := self.text(selector)) if re.search(pattern, self.text(selector)) else "",
                f"{selector} never said {pattern}",
            )
        )

    def picture(self, name: str, width: int | None = 1180) -> None:
        """The whole page as a picture, where pictures are wanted: after a minute. width: of the window; None: as it
        is."""
        directory = os.environ.get("TRANSFERQUEUE_SCREENS")
        if directory:
            self.until("#pipeline-title", r"last ([6-9]\d|1\d\d) s|min", timeout_s=2 * GENEROUS_S)
            height = self.driver.execute_script("return document.documentElement.scrollHeight")
            if width is not None:
                self.driver.set_window_size(width, height + 150)
            Path(directory).mkdir(parents=True, exist_ok=True)
            assert self.driver.save_screenshot(str(Path(directory, f"{name}.png")))
            if width is not None:
                self.driver.set_window_size(width, 1000)


@pytest.fixture(scope="module")
def pipeline(queue: tq.Queue) -> Iterator[Pipeline]:
    with running(queue.address) as found:
        yield found


@pytest.fixture(scope="module")
def page(driver: webdriver.Chrome, link: str, pipeline: Pipeline) -> Page:
    found = Page(driver, link)
    assert pipeline.begun.wait(GENEROUS_S)
    found.until("#state", "^live$")
    found.until("#tables", r"[1-9][\d.,]* in/s")
    return found


def test_the_token_leaves_the_address_and_the_history(page: Page) -> None:
    assert urlsplit(page.driver.current_url).query == ""
    assert TOKEN not in page.driver.page_source
    assert page.driver.execute_script("return document.cookie") == "", "no script can read it"


def test_tables_and_tasks_are_live_with_rates_and_ages(page: Page) -> None:
    table = "section[aria-label='Table rollouts']"
    assert re.search(r"of 4,096 rows · [\d.]+ [KM]iB of 32.0 MiB", page.text(table))
    assert re.search(r"oldest \d+", page.text(f"{table} .facts"))
    done = int(re.sub(r"\D", "", page.text(f"{table} tbody tr:nth-child(2) td:nth-child(6)")))
    assert page.text(f"{table} tbody tr:nth-child(2) td") == "train"
    assert done > 0
    page.until(f"{table} tbody tr:nth-child(1) td:nth-child(9)", r"[1-9]")  # reward: done/s
    later = page.until(f"{table} tbody tr:nth-child(2) td:nth-child(6)", rf"^(?!{done:,}$)")
    assert int(later.replace(",", "")) > done, "it is live"


def test_staleness_the_arena_and_the_weights_are_told(page: Page) -> None:
    assert "(limit: 2)" in page.until(".lags + .facts", "Staleness at lease")
    assert 0 < float(page.driver.find_element(By.ID, "arena").get_attribute("value") or 0) <= 1
    assert re.search(r"[KM]iB lent of 64.0 MiB", page.text("#arena-text"))
    page.until("#channels tbody", r"^policy\d+2, [\d.]+ KiB.*of 1$")


def test_the_timeline_has_a_lane_for_everyone_with_idle_shares(page: Page) -> None:
    page.until("#pipeline .strip:nth-child(1) .share", r"idle \d+ %")
    names = [one.text for one in page.driver.find_elements(By.CSS_SELECTOR, "#pipeline .strip > span:first-child")]
    assert names == ["rollouts: producers", "rollouts: reward", "rollouts: train", ""], "the last is the axis"
    page.until("#pipeline .strip:nth-child(2) .share", r"idle \d+ %")
    drawn = "return [...document.querySelectorAll('#pipeline path')].map((one) => one.getAttribute('d').length)"
    assert sum(page.driver.execute_script(drawn)) > 0


def test_the_verdict_stands_first_and_in_the_title_and_symptoms_are_folded(page: Page) -> None:
    page.until("#verdict-text", "rollouts: all stages move")
    assert page.driver.title == "✓ rollouts: all stages move"
    stages = [one.text for one in page.driver.find_elements(By.CSS_SELECTOR, "#stages .stage h3")]
    assert stages == ["producers", "reward", "train"]
    page.until("#stages .stage:nth-child(2) .crew", "reward-0")
    page.until("#doctor", r"rollouts: .*(train|reward|reserve|waits)")
    assert page.driver.find_element(By.ID, "doctor").is_displayed() is False


@pytest.fixture(scope="module")
def graded(queue: tq.Queue) -> Iterator[tq.Table]:
    """A table in which nothing moves: one row is held, one lacks a field. Names are as bad as they may be."""
    name = "graded"
    table = queue.create_table(
        name, tasks=[tq.Task("grade", needs=["answer"], lease_s=600), tq.Task("train", needs=["answer", "score"])]
    )
    table.put(answer=["41", "42"], score=[0.5, 1.0], key=["sum/1", MARKUP], tags={"kind": "<script>alert(1)</script>"})
    table.put(answer=["43"], key="sum/3", group_id=7, group_size=1, policy_version=4, tokens=12)
    with tq.connect(queue.address, label="grader-1") as other, other.table(name).lease("grade", rows=3):
        yield table
    queue.drop_table(name)


MARKUP = "<img src=x onerror=alert(1)>"


def ask_row(page: Page, table: str, row: int) -> None:
    page.until("#row-table", table)
    names = [one.text for one in page.driver.find_elements(By.CSS_SELECTOR, "#row-table option")]
    page.driver.find_element(By.CSS_SELECTOR, f"#row-table option:nth-child({names.index(table) + 1})").click()
    field = page.driver.find_element(By.ID, "row-id")
    field.clear()
    field.send_keys(f"{row}\n")


def test_a_rows_life_is_shown_and_a_row_that_is_none_is_told(page: Page, graded: tq.Table) -> None:
    ask_row(page, "graded", 2)
    shown = page.until("#row", "Row 2 of graded")
    assert re.search(r"live · put .* ago by pid \d+ · key sum/3 · group 7 of 1 · policy version 4 · 12 tokens", shown)
    assert re.search("answer.*in block.*scoremissing", page.text("#row [aria-label=Fields]"))
    assert re.search("gradeleased0by grader-1, .* left.*trainpending0lacks score", page.text("#row [aria-label=Tasks]"))
    assert re.search("put.*pid.*leased.*grade.*grader-1", page.text("#row [aria-label=Events]"))
    page.picture("web")
    ask_row(page, "graded", 99999999)
    assert "99999999" in page.until("#row .bad", "99999999")


def test_names_are_shown_as_text_and_never_as_markup(page: Page, graded: tq.Table) -> None:
    ask_row(page, "graded", 1)
    shown = page.until("#row", "Row 1 of graded")
    assert MARKUP in shown
    assert "kind=<script>alert(1)</script>" in shown
    assert page.driver.execute_script("return document.querySelectorAll('#row img, #row script').length") == 0


def test_the_stages_show_who_holds_rows(page: Page, graded: tq.Table) -> None:
    shown = page.until("#stages", "grader-1")
    assert "grader-1 3 rows" in shown


def test_time_is_marked_by_the_clock_and_an_hour_may_be_shown(page: Page) -> None:
    page.until("#pipeline .axis", r"\d\d:\d\d")
    page.driver.find_element(By.CSS_SELECTOR, "#window input[value='3600']").click()
    page.until("#pipeline .axis", r"\d\d:\d\d")
    page.driver.find_element(By.CSS_SELECTOR, "#window input[value='300']").click()


def test_another_viewer_sees_the_minutes_before(page: Page, pipeline: Pipeline) -> None:
    first = page.driver.current_window_handle
    page.driver.switch_to.new_window("tab")
    other = Page(page.driver, page.link)
    other.until("#state", "^live$")
    drawn = "return document.querySelector('svg.rates polyline.put').getAttribute('points').split(' ').length"
    assert page.driver.execute_script(drawn) > 2
    page.driver.close()
    page.driver.switch_to.window(first)


def test_on_a_phone_nothing_is_wider_than_the_screen(page: Page, graded: tq.Table) -> None:
    metrics = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.until("#state", "live")
        assert page.driver.execute_script("return document.documentElement.scrollWidth") <= 390
        page.picture("phone", width=None)
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_it_asks_nobody_else_and_complains_of_nothing(page: Page) -> None:
    asked = {
        urlsplit(message["params"]["request"]["url"]).netloc
        for entry in page.driver.get_log("performance")
        if (message := json.loads(entry["message"])["message"])["method"] == "Network.requestWillBeSent"
        and message["params"]["request"]["url"].startswith("http")  # not the browser's own pages
    }
    assert asked == {urlsplit(page.link).netloc}
    told = [one for one in page.driver.get_log("browser") if "99999999" not in one["message"]]
    assert told == []


def test_a_page_that_is_opened_late_shows_the_trouble_that_was(driver: webdriver.Chrome, tmp_path: Path) -> None:
    with (
        tq.connect(runtime=tmp_path, arena_bytes="64MiB") as queue,
        tq.connect(queue.address, label="trainer-7") as other,
    ):
        process, link = start_page(queue.address, "127.0.0.1:0", TOKEN)
        table = queue.create_table("late", tasks=[tq.Task("train", needs=["x"])])
        with pytest.raises(tq.DeadlineExceeded):  # nobody looks meanwhile
            other.table("late").lease("train", rows=1, timeout_s=TROUBLE_S)
        table.put(x=[1.0])
        with other.table("late").lease("train", rows=1):
            pass
        found = Page(driver, link)
        shown = found.until("#troubles-list", r"\d\d:\d\d:\d\d to \d\d:\d\d:\d\d")
        assert "late: no producer connected" in shown
        assert driver.execute_script("return document.querySelectorAll('#pipeline path.trouble').length") == 1
        assert found.text("#state") == "live"
        found.picture("trouble-that-was")
        process.stdin.close()  # type: ignore[union-attr]
        assert process.wait(GENEROUS_S) == 0
        process.stdout.close()  # type: ignore[union-attr]


def test_without_the_token_there_is_nothing(driver: webdriver.Chrome, page: Page) -> None:
    driver.delete_all_cookies()
    driver.get(page.link.partition("?")[0])
    assert (
        driver.find_element(By.TAG_NAME, "body").text
        == "open the link that was printed; it holds the token, which programs send as Authorization: Bearer TOKEN"
    )
