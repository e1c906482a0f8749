"""Checkpoints of a trainer: complete or absent, refused when damaged or of something else, and all that the next step
depends on."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.workflows.job.test_learner import columns, learner, model
from transferqueue.errors import Corruption, NotFound, UsageError
from transferqueue.workflows.flow.loop.serving import StageFailedInProcess
from transferqueue.workflows.job.training.checkpoint import Checkpoints, checkpoint_state, load_checkpoint
from transferqueue.workflows.job.training.gather import StreamPosition
from transferqueue.workflows.job.training.learner import PolicyLearner

POSITION = StreamPosition(3, (5, 9))


def trained(steps: int) -> PolicyLearner:
    one = learner("sft")
    for _ in range(steps):
        one.accumulate(columns("sft"))
        one.step()
    return one


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoints = Checkpoints(tmp_path_factory.mktemp("run"))
    checkpoints.save(trained(2), 4, POSITION)
    return checkpoints.path(2)


# ---------------------------------------------------------------- bad input


def test_a_directory_without_a_state_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"is no checkpoint: it has no state\.json; give a directory step-N"):
        checkpoint_state(tmp_path)


@pytest.mark.parametrize("name", ["state.json", "model.safetensors", "trainer/optimizer.safetensors"])
def test_a_damaged_file_is_named_and_changes_nothing(name: str, saved: Path, tmp_path: Path) -> None:
    damaged = tmp_path / saved.name
    shutil.copytree(saved, damaged)
    (damaged / name).write_bytes((damaged / name).read_bytes()[:20])
    one = learner("sft")
    before = [parameter.clone() for parameter in one.trained]
    with pytest.raises(Corruption, match=r"(cannot be read: .*|is damaged.*); put it back, or start a new run"):
        load_checkpoint(damaged, one)
    assert all(map(torch.equal, before, one.trained))
    assert one.steps_taken == 0


def test_another_format_is_refused(saved: Path, tmp_path: Path) -> None:
    text = (saved / "state.json").read_text().replace('"format": 2', '"format": 7')
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(UsageError, match="has format 7, and this version reads 2"):
        checkpoint_state(tmp_path)


def flip(file: Path) -> None:
    written = bytearray(file.read_bytes())
    written[-3] ^= 1
    file.write_bytes(written)


def halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip, r'model\.safetensors" is damaged: its checksum is [0-9a-f]{16}, and was'),
        (halve, r'model\.safetensors" is damaged'),
        (lambda file: file.write_bytes(b""), "cannot be read: cannot mmap an empty file"),
        (lambda file: file.unlink(), "cannot be read: .*No such file"),
    ],
    ids=["flipped bit", "half", "empty", "gone"],
)
def test_a_damaged_checkpoint_is_refused_before_it_is_loaded(
    saved: Path, tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    copy = tmp_path / saved.name
    shutil.copytree(saved, copy)
    damage(copy / "model.safetensors")
    one = learner("sft")
    before = [weight.clone() for weight in one.trained]
    with pytest.raises(Corruption, match=f"{words}.*start a new run with checkpoint.resume at an older checkpoint"):
        load_checkpoint(copy, one)
    assert all(map(torch.equal, one.trained, before))


def test_a_checkpoint_that_finds_no_room_leaves_nothing_and_the_one_before(tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk: the system refuses the write."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(trained(1), 1, POSITION)
    whole = trained(2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(
            StageFailedInProcess, match=r"the checkpoint of step 2, [0-9.]+ MiB, cannot be written to .* make room"
        ):
            checkpoints.save(whole, 2, POSITION)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]


def test_what_the_other_of_a_pair_needs_is_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1, keeps=lambda steps: [step for step in steps if step >= 1])
    for step in (0, 1, 2, 3):
        checkpoints.save(trained(step), step, POSITION)
    assert checkpoints.steps() == [1, 2, 3]


def test_a_trainer_that_keeps_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="keep=0: a trainer that dies could not go on"):
        Checkpoints(tmp_path, keep=0)


# ---------------------------------------------------------------- what they hold


def test_a_learner_goes_on_bit_for_bit(saved: Path) -> None:
    again, whole = learner("sft"), trained(3)
    state = load_checkpoint(saved, again)
    assert (state.step, state.version, state.position, again.steps_taken) == (2, 4, POSITION, 2)
    again.accumulate(columns("sft"))
    again.step()
    assert all(map(torch.equal, again.trained, whole.trained))


def test_random_generators_go_on_too(saved: Path, tmp_path: Path) -> None:
    torch.manual_seed(11)
    Checkpoints(tmp_path).save(trained(0), 0, StreamPosition())
    wanted = torch.rand(3)
    load_checkpoint(Checkpoints(tmp_path).path(0), learner("sft"))
    assert torch.equal(torch.rand(3), wanted)


def test_only_the_newest_are_kept_and_unfinished_ones_are_nobodys(tmp_path: Path) -> None:
    checkpoints, one = Checkpoints(tmp_path, keep=2), learner("sft")
    assert (checkpoints.newest(), checkpoints.steps()) == (None, [])
    (tmp_path / ".step-00000009.77").mkdir()  # of a process that died while it wrote
    for step in (1, 2, 3):
        one.accumulate(columns("sft"))
        one.step()
        written = checkpoints.save(one, step, StreamPosition())
        assert written["step"] == step
        assert written["bytes"] > 0
    assert checkpoints.steps() == [2, 3]
    assert checkpoints.newest() == checkpoints.path(3)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_checkpoint_of_a_model_with_other_weights_is_refused(saved: Path) -> None:
    other = learner("sft", model())
    other.model.lm_head.weight = torch.nn.Parameter(torch.zeros(48, 32))  # not tied any more
    with pytest.raises(UsageError, match=r"is of another model: .* differ; give its model"):
        load_checkpoint(saved, other)
