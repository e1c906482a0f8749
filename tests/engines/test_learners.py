"""Two ranks of a learner, fed by balanced leases, learn what one process learns from the same rows."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import transferqueue as tq
from tests.engines.conform import against, conform
from tests.scale import only_long
from transferqueue.adapters.protocols import Learner
from transferqueue.adapters.trainers.learners import LossSum, TorchLearner
from transferqueue.adapters.trainers.packing import pack
from transferqueue.errors import Impossible, UsageError
from transferqueue.testing.conformance.learners import LEARNER_CHECKS, LearnerSubject

PROGRAM = Path(__file__).with_name("rank_main.py")
ROWS, STEP = 72, 16


def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rank_main", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def queue() -> Iterator[tq.Queue]:
    with tq.connect() as found:
        yield found


def fill(queue: tq.Queue) -> tq.Table:
    """72 ragged rows for steps of 16: the last step has 8."""
    table = queue.create_table(
        "samples", tasks=[tq.Task("train", needs=["ids", "target"], selector=tq.TokenBalanced())]
    )
    draws = np.random.default_rng(5)
    lengths = draws.integers(1, 20, ROWS)
    ids = [draws.integers(0, 32, length).astype(np.int32) for length in lengths]
    table.put(ids=ids, target=draws.normal(size=ROWS).astype(np.float32), tokens=lengths)
    table.seal()
    return table


def ranks(queue: tq.Queue, kind: str, tmp_path: Path, world: int = 2) -> Any:
    """Run the ranks to their end; the figures and weights that rank 0 wrote."""
    arguments = [str(tmp_path / "store"), kind, str(tmp_path / "out.npz")]
    processes = [
        subprocess.Popen([sys.executable, str(PROGRAM), queue.address, str(rank), str(world), *arguments])
        for rank in range(world)
    ]
    try:
        for process in processes:
            assert process.wait(60) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return np.load(tmp_path / "out.npz", allow_pickle=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", only_long("ddp", "fsdp2"))
def test_two_ranks_learn_what_one_process_learns(kind: str, queue: tq.Queue, tmp_path: Path) -> None:
    fill(queue)
    found = ranks(queue, kind, tmp_path)
    assert queue.table("samples").audit().rows_done == ROWS
    with tq.connect() as alone:
        fill(alone)
        figures, weights = program().train(alone.address, "plain")
    assert len(found["losses"]) == len(figures) == -(-ROWS // STEP)
    np.testing.assert_allclose(found["losses"], [each["loss"] for each in figures], rtol=1e-5)
    assert set(weights) == set(found.files) - {"losses"}
    for name, value in weights.items():
        np.testing.assert_allclose(found[name], value, atol=2e-6, rtol=1e-4, err_msg=name)


class Subject:
    """A linear model that learns from pairs of tensors."""

    def open(self) -> Learner:
        torch.manual_seed(4)
        model = torch.nn.Linear(4, 1)
        return TorchLearner(
            model,
            torch.optim.Adam(model.parameters(), lr=0.1),
            lambda module, part: LossSum((module(part[0])[:, 0] - part[1]).square().sum(), len(part[1])),
            lambda batch: list(zip(batch[0].split(3), batch[1].split(3), strict=True)) if len(batch[1]) else [],
        )

    def batches(self) -> Sequence[Any]:
        draws = torch.Generator().manual_seed(6)
        return [(torch.randn(8, 4, generator=draws), torch.randn(8, generator=draws)) for _ in range(3)]

    def nothing(self) -> Any:
        return torch.empty(0, 4), torch.empty(0)


@pytest.mark.parametrize("check", LEARNER_CHECKS, ids=lambda check: check.__name__)
def test_torch_learner(check: Callable[[LearnerSubject], None]) -> None:
    conform("learner", "learners", against("torch"), check, Subject())


def test_a_step_does_not_depend_on_how_its_rows_are_cut() -> None:
    def learned(cut: int) -> torch.Tensor:
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 1)
        rows = torch.randn(12, 4)
        learner = TorchLearner(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            lambda module, part: LossSum(module(part).square().sum(), len(part)),
            lambda batch: batch.split(cut),
        )
        learner.step(rows)
        assert learner.version == 1
        return dict(learner.weights())["weight"]

    torch.testing.assert_close(learned(12), learned(5))


def test_a_step_of_nothing_is_refused() -> None:
    model = torch.nn.Linear(1, 1)
    learner = TorchLearner(
        model, torch.optim.SGD(model.parameters()), lambda *_: LossSum(torch.zeros(()), 0), lambda _: []
    )
    with pytest.raises(UsageError, match="no rows"):
        learner.step(None)


def test_packing_keeps_the_budget_and_loses_no_row() -> None:
    draws = np.random.default_rng(3)
    lengths = draws.integers(1, 64, 300)
    found = pack(lengths, 64)
    assert sorted(row for rows in found for row in rows) == list(range(300))
    assert all(lengths[rows].sum() <= 64 for rows in found)
    assert len(found) <= 11 / 9 * np.ceil(lengths.sum() / 64) + 1
    assert pack([], 4) == []
    with pytest.raises(Impossible, match="65 tokens"):
        pack([65], 64)
    with pytest.raises(UsageError, match="tokens_max"):
        pack([1], 0)
