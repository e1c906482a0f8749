"""Publication beside the training: in order, acked after its version, errors raised in the trainer's thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import transferqueue as tq
from transferqueue.adapters.weights import TensorWeights
from transferqueue.errors import UsageError
from transferqueue.workflows.job.training.policy_critic_pair import latest_version
from transferqueue.workflows.job.training.publication import HostCopy, Publisher, next_version

WAIT_S = 30


@pytest.fixture
def channel() -> Iterator[tq.WeightChannel]:
    with tq.connect() as queue:
        yield queue.weights("policy")


def weights(value: float) -> TensorWeights:
    return TensorWeights({"w": torch.full((4,), value), "steps": torch.tensor(7)})


def test_a_version_that_cannot_be_published_ends_the_trainer(channel: tq.WeightChannel) -> None:
    publisher = Publisher(channel)
    publisher.publish(3, weights(1.0), lambda: None)
    publisher.publish(2, weights(2.0), lambda: pytest.fail("the step is not acked"))
    with pytest.raises(UsageError, match="never goes back to 2"):
        publisher.wait()
    publisher.close()


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(UsageError, match="step -1: the first weights are those of step 0"):
        next_version(4, -1)


def test_the_trainer_goes_on_while_a_version_is_published_and_the_ack_follows_it(channel: tq.WeightChannel) -> None:
    publisher, go_on, acked = Publisher(channel), threading.Event(), []

    def ack() -> None:
        assert go_on.wait(WAIT_S)
        acked.append(latest_version(channel))

    tensors = weights(1.0)
    publisher.publish(0, tensors, ack)
    publisher.wait_copied()  # returns while the ack waits: the weights may change
    next(iter(tensors))[1].fill_(9.0)
    assert acked == []
    go_on.set()
    publisher.wait()
    assert acked == [0]
    with channel.pull(timeout_s=0) as pulled:
        assert pulled.torch()["w"].tolist() == [1.0] * 4
    assert publisher.stood_still_s() < WAIT_S
    assert publisher.stood_still_s() == 0.0
    publisher.close()


def test_steps_without_a_version_are_acked_in_order(channel: tq.WeightChannel) -> None:
    publisher, acked = Publisher(channel, background=False), []
    publisher.publish(0, weights(0.0), lambda: acked.append(0))
    publisher.ack(lambda: acked.append(1))
    publisher.publish(2, weights(2.0), lambda: acked.append(2))
    publisher.wait()
    assert acked == [0, 1, 2]
    publisher.close()
    publisher.close()


def test_copies_have_the_published_dtype_and_their_buffers_are_used_again() -> None:
    copy = HostCopy(torch.bfloat16)
    first, second = copy.take(weights(1.0)), copy.take(weights(2.0))
    assert (second["w"].dtype, second["steps"].dtype) == (torch.bfloat16, torch.int64)
    assert first["w"].data_ptr() == second["w"].data_ptr()
    assert second["w"].tolist() == [2.0] * 4


def test_versions_are_the_steps_until_a_step_is_taken_back() -> None:
    assert [next_version(latest, step) for latest, step in ((-1, 0), (0, 1), (9, 7))] == [0, 1, 10]
