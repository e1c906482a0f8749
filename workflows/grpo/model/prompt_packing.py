"""Packs many (prompt, response) pairs into few rows: neighbours with the same prompt share one copy of it.

A group of 8 short responses to one prompt consists mostly of the prompt. It becomes one row, ``prompt,
response 1, … response 8``, in which each token attends to the prompt and its own response only, at the position it
would have alone. The log-probs are those of separate rows; the work is two to three times less.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from transferqueue.workflows.grpo.model.transformer import Transformer

Column = Sequence[npt.NDArray[np.integer]]


@dataclass(frozen=True)
class PackedPrompts:
    """Model input ``[packs, tokens]`` for pairs ``[rows]``, and where their responses are in it.

    ``sources_BT`` are indices into the flattened ``[packs * tokens]`` of the tokens whose output predicts each response
    token, ``targets_BT`` those response tokens, ``mask_BT`` (bool) which of them exist.
    """

    tokens_PS: Tensor
    positions_PS: Tensor
    segments_PS: Tensor
    sources_BT: Tensor
    targets_BT: Tensor
    mask_BT: Tensor

    def sight(self) -> Tensor:
        """Return the attention mask: each token sees earlier tokens of segment 0 (the prompt) and of its own segment."""
        segments = self.segments_PS
        size = segments.shape[1]
        causal_SS = torch.ones(size, size, dtype=torch.bool).tril()
        return causal_SS & ((segments[:, None, :] == 0) | (segments[:, None, :] == segments[:, :, None]))


def pack(prompt_ids: Column, response_ids: Column) -> PackedPrompts:
    """Pack pairs of int ``[tokens]`` each. Raises ``ValueError`` for columns of different row counts or an empty value."""
    if len(prompt_ids) != len(response_ids) or not len(prompt_ids):
        raise ValueError(f"{len(prompt_ids)} prompts and {len(response_ids)} responses: as many of each, and not 0")
    if not all(map(len, prompt_ids)) or not all(map(len, response_ids)):
        raise ValueError("a prompt or response is empty; each needs at least one token")
    packs = _runs(prompt_ids)
    # The last token of a response predicts nothing: it is a target only.
    lengths_P = [len(prompt_ids[p[0]]) + sum(len(response_ids[row]) - 1 for row in p) for p in packs]
    size = max(lengths_P)
    tokens_PS, positions_PS = (np.zeros((len(packs), size), dtype=np.int64) for _ in range(2))
    segments_PS = np.full((len(packs), size), -1, dtype=np.int64)
    shape_BT = (len(response_ids), max(map(len, response_ids)))
    sources_BT, targets_BT = np.zeros(shape_BT, dtype=np.int64), np.zeros(shape_BT, dtype=np.int64)
    mask_BT = np.zeros(shape_BT, dtype=np.bool_)
    for p, rows in enumerate(packs):
        prompt = prompt_ids[rows[0]]
        end = len(prompt)
        tokens_PS[p, :end], positions_PS[p, :end], segments_PS[p, :end] = prompt, np.arange(end), 0
        for segment, row in enumerate(rows, start=1):
            response = response_ids[row]
            inner = len(response) - 1
            place = slice(end, end + inner)
            tokens_PS[p, place] = response[:-1]
            positions_PS[p, place] = np.arange(len(prompt), len(prompt) + inner)
            segments_PS[p, place] = segment
            sources_BT[row, 0] = p * size + len(prompt) - 1
            sources_BT[row, 1 : inner + 1] = p * size + np.arange(end, end + inner)
            targets_BT[row, : inner + 1] = response
            mask_BT[row, : inner + 1] = True
            end += inner
    return PackedPrompts(
        *map(torch.from_numpy, (tokens_PS, positions_PS, segments_PS, sources_BT, targets_BT, mask_BT))
    )


def token_logprobs(model: Transformer, packed: PackedPrompts, *, temperature: float) -> Tensor:
    """Return the log-probability of each response token at ``temperature``, float32 ``[rows, tokens]``; 0 where masked."""
    features_PSW = model.features(packed.tokens_PS, positions_BT=packed.positions_PS, mask_BTT=packed.sight())
    features_NW = features_PSW.flatten(0, 1)[packed.sources_BT[packed.mask_BT]]
    logprobs_NV = torch.log_softmax(model.head(features_NW) / temperature, -1)
    logprobs_N = logprobs_NV.gather(1, packed.targets_BT[packed.mask_BT][:, None]).squeeze(1)
    return torch.zeros(packed.mask_BT.shape).masked_scatter(packed.mask_BT, logprobs_N)


@torch.no_grad()
def response_logprobs(
    model: Transformer, prompt_ids: Column, response_ids: Column, *, temperature: float
) -> list[npt.NDArray[np.float32]]:
    """Return the log-probs of given responses as a ragged column: float32 ``[tokens]`` a row. For reference stages."""
    packed = pack(prompt_ids, response_ids)
    logprobs_BT = token_logprobs(model, packed, temperature=temperature).numpy()
    return [row[: len(response)].copy() for row, response in zip(logprobs_BT, response_ids, strict=True)]


def _runs(prompt_ids: Column) -> list[list[int]]:
    runs: list[list[int]] = []
    for row, prompt in enumerate(prompt_ids):
        if runs and np.array_equal(prompt_ids[runs[-1][-1]], prompt):
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs
