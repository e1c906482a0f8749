"""Unfinished responses, and how the rows of a batch are grouped for generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from transferqueue.workflows.grpo.model.sampling import Response


class PartialResponses(NamedTuple):
    """A row's response so far: ids int32, log-probs float32 and versions int32, each ``[tokens]``."""

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]

    def and_then(self, response: Response, version: int) -> PartialResponses:
        """Return these tokens followed by those of `response`, which were drawn by weights of `version`."""
        return PartialResponses(
            np.concatenate([self.ids, response.ids]),
            np.concatenate([self.logprobs, response.logprobs]),
            np.concatenate([self.versions, np.full(len(response.ids), version, np.int32)]),
        )


NOTHING: Final = PartialResponses(np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))


def places(responses: Sequence[Response], rows_PS: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Return the positions in the batch of `responses` to `rows_PS`."""
    return np.array([rows_PS[response.prompt, response.sample] for response in responses], dtype=np.intp)


def same_length(begun: Sequence[PartialResponses]) -> list[npt.NDArray[np.intp]]:
    """Group rows with begun responses by their number of tokens: one array ``[rows, 1]`` of positions for each length."""
    lengths = np.array([len(partial.ids) for partial in begun])
    return [np.flatnonzero(lengths == length)[:, None] for length in np.unique(lengths[lengths > 0])]


def same_prompt(group_id: npt.NDArray[np.int64], rows: npt.NDArray[np.intp]) -> list[npt.NDArray[np.intp]]:
    """Group the positions `rows` by prompt: one array ``[groups, rows]`` for each number of rows that groups have here.

    A group's prompt is read once. After a redelivery a group may have fewer rows here than its size.
    """
    _, member_B, sizes_G = np.unique(group_id[rows], return_inverse=True, return_counts=True)
    by_group = rows[np.argsort(member_B, kind="stable")]
    starts_G = np.cumsum(sizes_G) - sizes_G
    return [
        by_group[starts_G[sizes_G == size][:, None] + np.arange(size)].astype(np.intp) for size in np.unique(sizes_G)
    ]
