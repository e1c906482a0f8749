"""Pictures of the page in seven states of a job: `python -m tests.web.pictures --out DIR`, with the interpreter of
`make test-web`.

Each state is a real job: an embedded server, its page, and a process for each worker, which is stopped, left out or
made to fail. The pictures are taken with Chromium on a desktop (1280 x 800) and on a phone (390 x 844), light and, with
--dark, dark. What the first screen says is printed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

import transferqueue as tq
from transferqueue.web.subprocesses import start_page
from transferqueue.wire.answers.stats import TableStats

TOKEN: Final = "token-of-the-pictures"  # noqa: S105
TABLE: Final = "rollouts"
DESKTOP: Final = {"width": 1280, "height": 800, "deviceScaleFactor": 1, "mobile": False}
PHONE: Final = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
UNTIL_S: Final = 60.0
ROWS: Final = 48

# ---------------------------------------------------------------- the workers, each a process


def prompts(table: tq.Table, rows: int = 0) -> None:
    """Puts prompts by fours as the pacing admits them; with `rows`, so many, and then seals."""
    put = 0
    while not rows or put < rows:
        with table.reserve(4, timeout_s=3600) as reserved:
            table.put(
                prompt=[f"{put + at} + 1 = ?" for at in range(4)], reservation=reserved, policy_version=reserved.version
            )
            put += 4
            time.sleep(0.1)
    table.seal()


def few_prompts(table: tq.Table) -> None:
    """Puts a number of prompts, and seals the table."""
    prompts(table, ROWS)


def rollout(table: tq.Table) -> None:
    """Answers two prompts at a time."""
    for batch in table.leases("rollout", rows=2, timeout_s=3600):
        with batch:
            time.sleep(0.3)
            batch.ack(response_ids=[np.arange(8, dtype=np.int32) for _ in range(len(batch))])


def reward(table: tq.Table) -> None:
    """Scores two answers at a time."""
    for batch in table.leases("reward", rows=2, timeout_s=3600):
        with batch:
            time.sleep(0.05)
            batch.ack(rewards=np.ones(len(batch), np.float32))


def failing_reward(table: tq.Table) -> None:
    """Raises in each batch."""
    while True:
        with suppress(KeyError), table.lease("reward", rows=2, timeout_s=3600):
            time.sleep(0.05)
            raise KeyError("answer")


def train(table: tq.Table) -> None:
    """Takes batches, and moves the clock."""
    for step, batch in enumerate(table.leases("train", rows=8, timeout_s=3600)):
        with batch:
            time.sleep(0.3)
        table.advance(step + 1)


def hasty_train(table: tq.Table) -> None:
    """Moves the clock faster than any row comes."""
    threading.Thread(target=_hurry, args=(table,), daemon=True).start()
    train(table)


def _hurry(table: tq.Table) -> None:
    for version in range(1, 1 << 30):
        table.advance(version)
        time.sleep(0.15)


WORKERS: Final[dict[str, Callable[[tq.Table], None]]] = {
    worker.__name__: worker for worker in (prompts, few_prompts, rollout, reward, failing_reward, train, hasty_train)
}
CREW: Final = {
    "prompts": "prompts",
    "rollout-0": "rollout",
    "rollout-1": "rollout",
    "reward-0": "reward",
    "trainer": "train",
}


def work(address: str, label: str, worker: str) -> None:
    """One worker, until the table ends or the server does."""
    with suppress(tq.TransferQueueError), tq.connect(address, label=label) as queue:
        WORKERS[worker](queue.table(TABLE))


# ---------------------------------------------------------------- the jobs


class Job:
    """A queue with its page and workers."""

    def __init__(self, runtime: Path, **limits: Any) -> None:
        self.queue = tq.connect(runtime=runtime, arena_bytes="64MiB")
        pacing = tq.Pacing("train", batch_rows=8, depth=1, max_staleness=limits.pop("max_staleness", 4))
        self.queue.create_table(
            TABLE,
            tasks=[
                tq.Task("rollout", needs=["prompt"], gives=["response_ids"]),
                tq.Task("reward", needs=["response_ids"], gives=["rewards"]),
                tq.Task("train", needs=["response_ids", "rewards"]),
            ],
            pacing=pacing,
            retention=limits.pop("retention", tq.Acked()),
            limits=tq.Limits(**{"rows": 256, **limits}),
        )
        self.page, self.link = start_page(self.queue.address, "127.0.0.1:0", TOKEN)
        self.workers: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, **changed: str) -> None:
        """Start the usual workers; changed: another program for a label, "" for none. Labels have _ in place of -."""
        crew = CREW | {label.replace("_", "-"): worker for label, worker in changed.items()}
        for label, worker in crew.items():
            if worker:
                command = [sys.executable, "-m", "tests.web.pictures", "--work", self.queue.address, label, worker]
                self.workers[label] = subprocess.Popen(
                    command, stderr=subprocess.DEVNULL
                )  # they complain, as they should

    def until(self, true: Callable[[TableStats], bool]) -> None:
        """Wait until the statistics of the table are so."""
        deadline = time.monotonic() + UNTIL_S
        while not true(self.queue.stats().tables[TABLE]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the job did not come so far: {self.queue.stats().tables[TABLE]}")
            time.sleep(0.05)

    def close(self) -> None:
        """End everything."""
        for process in self.workers.values():
            process.kill()
            process.wait()
        self.queue.close()
        if self.page.stdin and self.page.stdout:
            self.page.stdin.close()
            self.page.wait()
            self.page.stdout.close()


def _done(rows: int) -> Callable[[TableStats], bool]:
    return lambda table: table.rows_done >= rows


def healthy(job: Job) -> None:
    """All stages move."""
    job.start()
    job.until(_done(ROWS))


def no_trainer(job: Job) -> None:
    """No process works on train."""
    job.start(trainer="")


def frozen_rollouts(job: Job) -> None:
    """Both rollouts are stopped while they have rows."""
    job.start()
    job.until(_done(ROWS))
    for label in ("rollout-0", "rollout-1"):
        while True:
            os.kill(job.workers[label].pid, signal.SIGSTOP)
            time.sleep(0.2)  # what it had sent before arrives
            held = {one.label: one.rows_leased for one in job.queue.sessions().values()}
            if held[label]:
                break
            os.kill(job.workers[label].pid, signal.SIGCONT)
            time.sleep(0.05)


def failing_rewards(job: Job) -> None:
    """Each lease of reward raises KeyError."""
    job.start(reward_0="failing_reward")
    job.until(lambda table: table.tasks["reward"].failed >= 4)


def all_stale(job: Job) -> None:
    """The clock runs ahead of all rows."""
    job.start(trainer="hasty_train")
    job.until(lambda table: table.dropped.get("stale", 0) >= 8)


def full(job: Job) -> None:
    """Rows that ended are kept, and fill the table."""
    job.start()


def finished(job: Job) -> None:
    """All rows are done, and the table is sealed."""
    job.start(prompts="few_prompts")
    job.until(lambda table: table.sealed and not table.rows_live)


STATES: Final[dict[str, tuple[Callable[[Job], None], dict[str, Any], str]]] = {
    "healthy": (healthy, {}, "healthy"),
    "no-trainer": (no_trainer, {}, "missing"),
    "frozen-rollouts": (frozen_rollouts, {}, "silent"),
    "failing-reward": (failing_rewards, {}, "failing"),
    "all-stale": (all_stale, {"max_staleness": 0}, "stale"),
    "full": (full, {"rows": 16, "retention": tq.Manual()}, "full"),
    "ended": (finished, {}, "finished"),
}
"""Each with its limits, and the state of its verdict."""


@contextmanager
def running(name: str) -> Iterator[Job]:
    """The job of a state, started."""
    begin, limits, _ = STATES[name]
    with tempfile.TemporaryDirectory(prefix="tq-") as runtime:
        job = Job(Path(runtime), **limits)
        try:
            begin(job)
            yield job
        finally:
            job.close()


# ---------------------------------------------------------------- the pictures


def browser(profile: str) -> Any:
    """Chromium without a window."""
    import shutil

    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--lang=en"):
        options.add_argument(word)
    options.add_argument(f"--user-data-dir={profile}")
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


def kind(driver: Any) -> str:
    """The class of the verdict that the page shows."""
    return str(driver.execute_script("return document.getElementById('verdict')?.className ?? ''"))


def wait_for(driver: Any, state: str) -> bool:
    """Wait until the page's newest verdict is of a state. False: it did not come."""
    deadline = time.monotonic() + UNTIL_S
    while time.monotonic() < deadline:
        if driver.execute_script("return newest?.report.verdict.state ?? ''") == state:
            return True
        time.sleep(0.3)
    return False


def take(driver: Any, out: Path, name: str, *, dark: bool) -> None:
    """The first screen, on a desktop and on a phone."""
    schemes = ("light", "dark") if dark else ("light",)
    for scheme in schemes:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        for place, metrics in (("desktop", DESKTOP), ("phone", PHONE)):
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            time.sleep(0.3)  # drawn anew
            suffix = "" if scheme == "light" else f"-{scheme}"
            driver.save_screenshot(str(out / f"{name}-{place}{suffix}.png"))


def picture(driver: Any, out: Path, name: str, *, dark: bool) -> bool:
    """The pictures of one state. False: the page never came to its verdict."""
    with running(name) as job:
        driver.get(job.link)
        came = wait_for(driver, STATES[name][2])
        if name == "ended":
            job.queue.close()
            deadline = time.monotonic() + UNTIL_S
            while "gone" not in driver.find_element("id", "state").text and time.monotonic() < deadline:
                time.sleep(0.1)
        text = driver.execute_script("return document.getElementById('verdict-text').innerText.replace(/\\n/g, ' ')")
        print(f"{name:16} {'ok ' if came else 'NOT'} {driver.title!r:44} {text}", flush=True)
        take(driver, out, name, dark=dark)
    return came


def main() -> int:
    """Take the pictures, or work in one of the jobs."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--out", type=Path, default=Path("pictures"))
    words.add_argument("--only", nargs="*", choices=STATES, default=list(STATES))
    words.add_argument("--dark", action="store_true")
    words.add_argument("--work", nargs=3)
    options = words.parse_args()
    if options.work:
        work(*options.work)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        driver = browser(stack.enter_context(tempfile.TemporaryDirectory(prefix="tq-profile-")))
        stack.callback(driver.quit)
        came = [picture(driver, options.out, name, dark=options.dark) for name in options.only]
    return 0 if all(came) else 1


if __name__ == "__main__":
    sys.exit(main())
