"""A group that shares an image: stored once and sent once, whatever way the rows repeat it; the rows read are the
same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import transferqueue as tq
from tests.client.deployments import Served
from tests.client.test_remote import Between

IMAGE = torch.from_numpy(np.random.default_rng(1).integers(0, 255, (3, 128, 128), np.uint8))
ROWS = 16
FIELDS = [tq.Field("image", "uint8", (3, 128, 128)), tq.Field("ids", "int64", (None,))]
IDS = [np.arange(20) + row for row in range(ROWS)]
GIVEN = {
    "expanded": IMAGE[None].expand(ROWS, -1, -1, -1),
    "one object": [IMAGE] * ROWS,
    "repeat_interleave": IMAGE[None].repeat_interleave(ROWS, 0),
    "copies": [IMAGE.clone() for _ in range(ROWS)],
}


@pytest.mark.parametrize("given", GIVEN)
def test_an_image_of_a_group_is_stored_once_and_crosses_once(server: Served, name: str, given: str) -> None:
    with Between(server) as between, tq.connect(between.control.address, data="remote") as queue:
        table = queue.create_table(name, fields=FIELDS, tasks=[tq.Task("train", needs=["image", "ids"])])
        passed = {True: 0, False: 0}

        def count(_passed: int, data: bytes, up: bool) -> bytes:
            passed[up] += len(data)
            return data

        between.bulk.meddle = count
        table.put(image=GIVEN[given], ids=IDS)
        assert table.stats()["bytes"] < IMAGE.nbytes + 8 * 1024
        with table.lease("train", rows=ROWS) as batch:
            images = batch["image"].torch()
            assert batch["ids"].list() == [row.tolist() for row in IDS]
        assert all(torch.equal(image, IMAGE) for image in images)
        assert all(IMAGE.nbytes < crossed < IMAGE.nbytes + 16 * 1024 for crossed in passed.values())
        images[0] += 1  # rows of a batch are the reader's own, each for itself
        assert torch.equal(images[1], IMAGE)


def test_a_word_turns_the_search_off(name: str, server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFERQUEUE_FIND_REPEATS", "0")
    with tq.connect(server.ipc) as queue:
        table = queue.create_table(name, fields=FIELDS, retention=tq.Manual())
        for given in GIVEN.values():
            before = table.stats()["bytes"]
            table.put(image=given, ids=IDS)
            assert table.stats()["bytes"] - before > ROWS * IMAGE.nbytes
        before = table.stats()["bytes"]
        table.put(image=tq.Repeat([IMAGE], ROWS), ids=IDS)  # who says it is still heard
        assert table.stats()["bytes"] - before < IMAGE.nbytes + 8 * 1024


def test_a_word_that_is_none_is_refused_before_anything_is_opened(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSFERQUEUE_FIND_REPEATS", "off")
    for address in (server.ipc, "embedded"):
        with pytest.raises(tq.UsageError, match="TRANSFERQUEUE_FIND_REPEATS='off' is neither 0 nor 1"):
            tq.connect(address)
