"""The decoder under mutated frames. `make fuzz` runs a million and more."""

import random
import typing

import pytest

from tests.fuzz import decoder
from tests.fuzz.frames import bulk_seeds, seeds
from tests.scale import sizes
from transferqueue.limits import MIB
from transferqueue.transport.bulk import protocol as bulk
from transferqueue.wire import messages as m


def test_there_is_a_valid_seed_of_every_message():
    found = [tree[-1][0] for tree in seeds(random.Random(1), each=1)]
    found += [tree[0] for tree in bulk_seeds(random.Random(1), each=1)]
    heads = typing.get_args(bulk.ToShard) + typing.get_args(bulk.ToClient)
    assert found == [m.tag_of(kind) for kind in typing.get_args(m.Request) + typing.get_args(m.Reply) + heads]


@pytest.mark.slow
@pytest.mark.parametrize("frames", sizes(20_000, 500_000))
def test_no_frame_breaks_the_decoder(frames):
    report = decoder.run(frames, seed=20261121)
    assert report.refused > frames // 5
    assert len(report.messages) > 40, "most messages survive some mutations: the mutations are too crude"
    assert report.grown_bytes < 10 * MIB
