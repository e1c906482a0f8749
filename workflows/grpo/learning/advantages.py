"""Advantages of Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300, section 4.1.2). No torch here."""

from typing import Final

import numpy as np
import numpy.typing as npt

_STD_MIN: Final = 1e-6
"""Below this deviation, rewards of a group differ by rounding only."""


def group_advantages(rewards: npt.ArrayLike, group_id: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Return each row's reward above its group's mean, in standard deviations of the group: float32 ``[rows]``.

    `rewards` (float) and `group_id` (integer) are ``[rows]`` each, in any order of rows. The
    deviation is that of the population (divided by n). Rows of a group with equal rewards get exactly 0.

    Raises `ValueError` for lengths that differ or a reward that is not finite.

    >>> group_advantages([1.0, 0.0, 0.5, 0.5], [7, 7, 8, 8]).tolist()
    [1.0, -1.0, 0.0, 0.0]
    """
    rewards_B = np.asarray(rewards, dtype=np.float64)
    ids_B = np.asarray(group_id)
    if rewards_B.ndim != 1 or rewards_B.shape != ids_B.shape:
        raise ValueError(f"rewards {rewards_B.shape} and group_id {ids_B.shape} must both be [rows]")
    if not np.isfinite(rewards_B).all():
        raise ValueError(f"reward {rewards_B[~np.isfinite(rewards_B)][0]} is not finite")
    _, member_B, sizes_G = np.unique(ids_B, return_inverse=True, return_counts=True)
    means_G = np.bincount(member_B, weights=rewards_B) / sizes_G
    centred_B = rewards_B - means_G[member_B]
    stds_B = np.sqrt(np.bincount(member_B, weights=centred_B**2) / sizes_G)[member_B]
    flat_B = stds_B < _STD_MIN
    return np.where(flat_B, 0.0, centred_B / np.where(flat_B, 1.0, stds_B)).astype(np.float32)
