"""What a crash costs: the counts tell rows in vain, twice and missing apart, and the command kills a real run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bench.crash_cost import process_log
from bench.crash_cost.__main__ import (
    COUNTS,
    KEPT,
    KIND,
    NOTHING,
    QUICK,
    USUAL,
    RunCost,
    kept,
    markdown,
    measured,
    newest,
    prepare,
    results,
)
from bench.crash_cost.costs import Costs, Response, TrainedStep, costs_of, last_of_each, response_of
from bench.crash_cost.process_log import ProcessLog
from bench.crash_cost.stacks import STACKS
from bench.measurement_record import Measurement

ROOT = Path(__file__).resolve().parents[2]


def row(prompt: str, sample: int, tokens: int = 10) -> Response:
    return Response(prompt, f"{prompt}-{sample}", tokens)


FIRST, SECOND = [row("a", 0), row("a", 1)], [row("b", 0), row("b", 1)]


def test_a_run_that_loses_nothing_costs_nothing() -> None:
    taken = [TrainedStep(1, 0.0, FIRST), TrainedStep(2, 1.0, SECOND)]
    assert costs_of(40, [*FIRST, *SECOND], taken, prompts=2, group=2) == Costs(0, 0, 0, 0, 0)


def test_rows_that_are_generated_again_and_unfinished_tokens_are_in_vain() -> None:
    again = [row("b", 2), row("b", 3)]
    taken = [TrainedStep(1, 0.0, FIRST), TrainedStep(2, 1.0, SECOND), TrainedStep(2, 2.0, again)]
    assert costs_of(63, [*FIRST, *SECOND, *again], taken, prompts=2, group=2) == Costs(2, 23, 0, 0, 1)


def test_rows_that_come_again_as_they_were_cost_a_step_and_no_token() -> None:
    taken = [TrainedStep(1, 0.0, FIRST), TrainedStep(2, 1.0, SECOND), TrainedStep(2, 2.0, SECOND)]
    assert costs_of(40, [*FIRST, *SECOND], taken, prompts=2, group=2) == Costs(0, 0, 0, 0, 1)


def test_a_prompt_that_is_passed_over_is_missing_and_one_that_comes_again_is_twice() -> None:
    taken = [TrainedStep(1, 0.0, FIRST), TrainedStep(2, 1.0, FIRST)]
    costs = costs_of(40, [*FIRST, *SECOND], taken, prompts=2, group=2)
    assert (costs.rows_in_vain, costs.rows_twice, costs.rows_missing) == (2, 2, 2)


def test_a_step_replaces_that_of_its_number_and_all_after_it() -> None:
    steps = [TrainedStep(step, at, []) for at, step in enumerate([1, 2, 3, 2])]
    assert [each.at for each in last_of_each(steps)] == [0, 3]


def test_what_processes_note_is_read_back_though_a_line_was_cut_off(tmp_path: Path) -> None:
    logs = [ProcessLog(tmp_path) for _ in range(2)]
    for tokens, log in enumerate(logs, start=3):
        log.drew(tokens)
        log.responded([1, 2], [tokens])
    logs[1].trained(1, [response_of([1, 2], [3])])
    for log in logs:
        log.close()
    with max(tmp_path.glob("*.jsonl")).open("ab") as lines:
        lines.write(b'{"response": ["')
    assert process_log.drawn(tmp_path) == 7
    assert sorted(each.digest for each in process_log.responses(tmp_path)) == sorted(
        response_of([1, 2], [tokens]).digest for tokens in (3, 4)
    )
    (step,) = process_log.taken(tmp_path)
    assert (step.step, step.rows) == (1, [response_of([1, 2], [3])])


def test_the_table_has_a_line_for_each_kill_and_says_which_roles_are_one_process(tmp_path: Path) -> None:
    costs = RunCost(Costs(16, 256, 0, 0, 1), 60.0, 12.5, ("trainer",))
    found = {("trl", role): [costs] for role in STACKS["trl"].roles}
    by_hand = {f"{name}/{role}": ["trainer"] for name, role in found}
    settings = {"steps": 4, "prompts": 2, "group": 4, "tokens": 16, "checkpoint_every": 2, "kill_after": 3}
    details = {"settings": settings, "by_hand": by_hand}
    Measurement().record(KIND, [*results(found)], details=details).save(tmp_path / f"{KIND}-20260101-000000.json")
    lines = markdown(newest(tmp_path)).splitlines()
    assert lines[2] == "| TRL GRPOTrainer | trainer | 16 | 256 | 0 | 0 | 1 | trainer | 12.5 |"
    assert lines[4].startswith("| TRL GRPOTrainer | buffer | the process of trainer and generator |")
    with pytest.raises(SystemExit, match=re.escape("no record: python -m bench.crash_cost")):
        newest(tmp_path / "none")


def test_a_folder_keeps_its_runs_of_one_setting(tmp_path: Path) -> None:
    cost = RunCost(Costs(16, 256, 0, 0, 1), 60.0, 12.5, ("trainer",))
    (tmp_path / KEPT).write_bytes(msgspec.json.encode(("trl-trainer-0", cost)) + b"\n")
    assert kept(tmp_path) == {"trl-trainer-0": cost}
    assert measured(tmp_path, ["trl"], QUICK, 1, ["trainer"]) == {("trl", "trainer"): [cost]}
    (tmp_path / "settings.json").write_text(json.dumps(QUICK))
    with pytest.raises(SystemExit, match="give another folder"):
        prepare(tmp_path, USUAL)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_whose_buffer_is_killed_loses_nothing(tmp_path: Path) -> None:
    pytest.importorskip("torch", exc_type=ImportError)
    command = [sys.executable, "-m", "bench.crash_cost", "--quick", "--stacks", "job-patient", "--roles", "buffer"]
    done = subprocess.run(
        [*command, f"--into={tmp_path}"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=800
    )
    assert done.returncode == 0, done.stderr
    found = {result.name: result.median for result in newest(tmp_path).results}
    assert [found[f"job-patient/buffer: {count}"] for count in COUNTS.values()] == [0] * len(COUNTS)
    assert f"job-patient/{NOTHING}: whole run" not in found
