"""Checks that every learner must pass, and the subject that they test.

Use them as the checks of generators (`conformance.generators`), with a `LearnerSubject`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import transferqueue as tq
from transferqueue.adapters.protocols import Learner
from transferqueue.adapters.weights import TensorWeights, spec
from transferqueue.errors import UsageError
from transferqueue.testing.conformance.report import require

if TYPE_CHECKING:
    import torch

_TOLERANCE: Final = 1e-6


class LearnerSubject(Protocol):
    """A learner under test."""

    def open(self) -> Learner:
        """Return a learner of version 0, a new one each time, always with the same weights."""

    def batches(self) -> Sequence[Any]:
        """Return two batches or more, as its `step` takes them, always the same."""

    def nothing(self) -> Any:
        """Return a batch without rows."""


def _weights(learner: Learner) -> dict[str, torch.Tensor]:
    """A copy: the tensors of a source are valid until the next one."""
    return {name: tensor.clone() for name, tensor in learner.weights()}


def _differ(before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]) -> list[str]:
    require(list(before) == list(after), "the same tensors come every time", (list(before), list(after)))
    return [name for name, tensor in before.items() if not tensor.allclose(after[name], rtol=0, atol=_TOLERANCE)]


# ---------------------------------------------------------------- the checks


def a_step_raises_the_version_by_one(subject: LearnerSubject) -> None:
    """The learner counts its steps."""
    learner = subject.open()
    versions = [learner.version]
    for batch in subject.batches():
        learner.step(batch)
        versions.append(learner.version)
    require(versions == list(range(len(versions))), "the version counts steps, from 0", versions)


def figures_are_finite_numbers(subject: LearnerSubject) -> None:
    """The results of a step can be logged and compared."""
    figures = subject.open().step(subject.batches()[0])
    require(bool(figures), "a step gives figures")
    require(all(isinstance(name, str) and math.isfinite(value) for name, value in figures.items()), "finite", figures)


def a_step_changes_the_weights(subject: LearnerSubject) -> None:
    """Weights differ after a step."""
    learner = subject.open()
    before = _weights(learner)
    learner.step(subject.batches()[0])
    require(bool(_differ(before, _weights(learner))), "a step changes some tensor")


def the_same_batches_teach_the_same(subject: LearnerSubject) -> None:
    """Two learners that take the same steps have equal weights."""
    learners = [subject.open() for _ in range(2)]
    for learner in learners:
        for batch in subject.batches():
            learner.step(batch)
    differ = _differ(*(_weights(learner) for learner in learners))
    require(not differ, f"the same steps give the same weights, within {_TOLERANCE}", differ)


def weights_are_as_their_metadata_says(subject: LearnerSubject) -> None:
    """Names, shapes and dtypes are known before a tensor moves."""
    source = subject.open().weights()
    metadata = dict(source.metadata())
    came = {name: spec(tensor) for name, tensor in source}
    require(bool(metadata) and metadata == came, "tensors come as metadata() says", (metadata, came))


def weights_can_be_read_again(subject: LearnerSubject) -> None:
    """A source is read once for each of several engines, and reading changes nothing."""
    learner = subject.open()
    source = learner.weights()
    first, second = ({name: tensor.clone() for name, tensor in source} for _ in range(2))
    require(not _differ(first, second), "a second reading gives the same")
    require(not _differ(first, _weights(learner)), "so does a second source")


def weights_travel_by_a_channel(subject: LearnerSubject) -> None:
    """Pulled weights equal the published weights."""
    learner = subject.open()
    learner.step(subject.batches()[0])
    with tq.connect("embedded") as queue:
        channel = queue.weights("policy")
        channel.publish(learner.version, dict(learner.weights()))
        with channel.pull(version=learner.version) as pulled:
            differ = _differ(_weights(learner), dict(TensorWeights(pulled.torch())))
            require(not differ, "a channel carries every tensor", differ)
            del differ


def a_step_of_nothing_is_refused(subject: LearnerSubject) -> None:
    """A batch without rows: `UsageError`, and nothing has changed."""
    learner = subject.open()
    before = _weights(learner)
    try:
        learner.step(subject.nothing())
    except UsageError:
        pass
    else:
        require(False, "a batch without rows is refused with UsageError")
    require(learner.version == 0, "the version stays", learner.version)
    require(not _differ(before, _weights(learner)), "the weights stay")
    learner.step(subject.batches()[0])
    require(learner.version == 1, "and it learns afterwards", learner.version)


LEARNER_CHECKS: Final[tuple[Callable[[LearnerSubject], None], ...]] = (
    a_step_raises_the_version_by_one,
    figures_are_finite_numbers,
    a_step_changes_the_weights,
    the_same_batches_teach_the_same,
    weights_are_as_their_metadata_says,
    weights_can_be_read_again,
    weights_travel_by_a_channel,
    a_step_of_nothing_is_refused,
)
