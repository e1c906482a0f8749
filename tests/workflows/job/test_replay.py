"""A step of a run is computed again from its record; what was changed since is named by its stage and row."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import transferqueue as tq
from tests.markdown import ROOT
from tests.workflows.job import short_run
from tests.workflows.job.short_run import STEPS, finished, train
from transferqueue.errors import NotFound
from transferqueue.storage.row_files import files
from transferqueue.workflows.job.run_files import STEP_ROWS, checkpoint_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
pytest.importorskip("torch", exc_type=ImportError)

STEP = 4
"""The checkpoints are of steps 2 and 4: two steps are computed again."""
COLUMNS = ("rewards", "reward_terms", "advantages", "prompt_ids", "response_ids", "rollout_logprobs", "token_versions")
OTHER_REWARDS = """
import any_rewards


def spread(completion_ids):
    scores = any_rewards.spread(completion_ids)
    return [score + (sum(ids) == {total}) for score, ids in zip(scores, completion_ids)]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run whose rows come in the order in which they are ready, with two generators."""
    place = short_run.make_place(tmp_path_factory.mktemp("replayed"), "async", builtin=True)
    words = [word for change in ("reproducible=false", 'evaluation.path=""') for word in ("--set", change)]
    finished(train(place, "job.toml", "--json", "--out", "whole", *words))
    return place


@pytest.fixture
def run(place):
    """A copy of the run, to be changed."""
    copy = place / "changed"
    shutil.copytree(place / "whole", copy)
    yield copy
    shutil.rmtree(copy)


def again(run, step=STEP):
    from transferqueue.workflows.job.run.replay import replay

    return replay(run, step)


def test_each_step_comes_out_equal_and_leaves_the_process_as_it_was(place):
    import torch

    before = Path.cwd(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    for step in range(1, STEPS + 1):
        outcome = again(place / "whole", step)
        assert outcome.differs is None, outcome.text
        stages = ["rows", "reward", "advantage", "loss", "gradient"] + ["weights"] * (step in (2, 4))
        assert (outcome.compared, outcome.begun) == (stages, 2 if step > 2 else 0)
    assert before == (Path.cwd(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())


def test_a_prompt_before_a_step_has_the_trainer_and_the_rows_of_then(place):
    typed = "print([job.name, learner.steps_taken, len(rows['response_ids']), *set(recorded['_step'].to_pylist())])\n"
    done = until(place, typed + "print(figures['step'])\n")
    assert done.returncode == 0, done.stderr
    assert f"['short', {STEP - 1}, {short_run.ROWS // STEPS}, {STEP}]" in done.stdout
    assert f"step {STEP} is equal: rows, reward" in done.stdout
    done = until(place, "for p in learner.model.parameters(): p.data.mul_(2)\n\n")
    assert done.returncode == 1
    assert f"step {STEP} differs at stage loss" in done.stdout


def until(place, typed):
    command = [sys.executable, "-m", "transferqueue.cli", "replay", "whole", "--until", str(STEP)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{place}"}
    return subprocess.run(
        command, cwd=place, env=environment, input=typed, capture_output=True, text=True, check=False, timeout=300
    )


def test_a_bit_that_changed_in_a_column_is_named_by_its_row(run):
    table = tq.open_run(run).table()
    rows = table.arrow(["_row", "_step"], filter=pc.field("_step") > 2).to_pylist()
    for at, column in enumerate(COLUMNS):
        row = rows[at % len(rows)]
        undo = change(run, row["_step"], row["_row"], column)
        differs = again(run).differs
        assert (differs.step, differs.stage, differs.row) == (row["_step"], "rows", row["_row"]), (column, differs)
        assert column in differs.text
        undo()
    assert again(run).differs is None


def test_a_changed_reward_is_named_by_its_first_row(run, place):
    step = json.loads((run / STEP_ROWS).read_text().splitlines()[2])
    rows = [row for part in step["parts"] for row in part]
    read = tq.open_run(run).table().arrow(["_row", "response_ids"], filter=pc.field("_row").isin(rows))
    totals = {one["_row"]: sum(one["response_ids"]) for one in read.to_pylist()}
    row = [row for row in rows if list(totals.values()).count(totals[row]) == 1][-1]
    (place / "other_rewards.py").write_text(OTHER_REWARDS.format(total=totals[row]))
    job = run / "job.toml"
    job.write_text(job.read_text().replace("any_rewards:spread", "other_rewards:spread"))
    differs = again(run).differs
    assert (differs.step, differs.stage, differs.row) == (3, "reward", row)
    assert differs.text.startswith("the reward was ")


def test_a_bit_that_changed_in_a_weight_is_named(run):
    flip(checkpoint_path(run / "checkpoints" / "train", 4), "model.safetensors")
    differs = again(run).differs
    assert (differs.step, differs.stage) == (4, "weights")
    assert "model.safetensors" in differs.text


def test_other_weights_to_begin_with_are_seen_by_the_first_loss(run):
    """They pass for whole: the checkpoint has their checksum."""
    first = checkpoint_path(run / "checkpoints" / "train", 2)
    flip(first, "model.safetensors", sealed=True)
    differs = again(run).differs
    assert (differs.step, differs.stage in ("loss", "gradient")) == (3, True)


def test_what_is_missing_is_said_before_anything_is_computed(run):
    with pytest.raises(NotFound, match=r"has no step 9; it has 1 to 4"):
        again(run, 9)
    for path in tq.open_run(run).table().files:
        if any(step == 3 for step, _ in rows_of(path)):
            path.unlink()
    with pytest.raises(NotFound, match=r"rows of step 3 are not in the record, .* with the next checkpoint"):
        again(run)
    (run / STEP_ROWS).write_text((run / STEP_ROWS).read_text().splitlines()[3] + "\n")
    with pytest.raises(NotFound, match=r"newest checkpoint before it is of step 2, and .* lacks step 3 between"):
        again(run)


# ---------------------------------------------------------------- changes


def change(run, step, row, column):
    """Change the lowest bit of a value of a recorded row, in a file that passes for whole. Returns what undoes it."""
    table = tq.open_run(run).table()
    (path,) = [one for one in table.files if (step, row) in rows_of(one)]
    kept = path.with_suffix(".kept")
    path.rename(kept)
    found = pq.read_table(kept)
    values = found[column].to_pylist()
    at = found["_row"].to_pylist().index(row)
    values[at] = flipped(values[at], found.schema.field(column).type)
    changed = found.set_column(
        found.schema.get_field_index(column),
        found.schema.field(column),
        pa.array(values, found.schema.field(column).type),
    )
    directory, (life, number) = path.parent, path.name.split("-")[:2]
    aside = files.aside(directory, life, int(number))
    pq.write_table(changed, aside, write_page_checksum=True)
    other = files.publish(aside, directory)

    def undo():
        for each in directory.glob(f"{life}-{number}-*.parquet"):
            each.unlink()
        kept.rename(path)

    assert other is None or other
    return undo


def rows_of(path):
    """The step and the id of each row of a file."""
    return [(row["_step"], row["_row"]) for row in pq.read_table(path, columns=["_step", "_row"]).to_pylist()]


def flipped(value, kind):
    if pa.types.is_floating(kind):
        bits = np.array(value, np.float32).reshape(1).view(np.uint32) ^ np.uint32(1)
        return float(bits.view(np.float32)[0])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [flipped(value[0], kind.value_type), *value[1:]]
    return value ^ 1


def flip(checkpoint, name, *, sealed=False):
    """Change a bit of a checkpoint's file. sealed: its description has the new checksum."""
    from transferqueue.storage.memory.checksum import checksum

    data = bytearray((checkpoint / name).read_bytes())
    data[-1] ^= 1  # of the exponent of a weight
    (checkpoint / name).write_bytes(data)
    if sealed:
        state = json.loads((checkpoint / "state.json").read_text())
        state["checksums"][name] = f"{checksum(np.frombuffer(bytes(data), np.uint8)):016x}"
        (checkpoint / "state.json").write_bytes(msgspec.json.encode(state))
