"""The names that the parts of a job share: its table, its weight channels, its tasks. No torch here."""

from __future__ import annotations

from typing import Final

TABLE: Final = "rollouts"
"""The table of the job: one row for each response."""
POLICY: Final = f"{TABLE}/policy"
"""Weight channel of the trained policy, and clock of the table; its name starts with the table's, so both have the same home coordinator."""

ROLLOUT: Final = "rollout"
REWARD: Final = "reward"
REFERENCE: Final = "reference"
PROXIMAL: Final = "proximal"
VALUE: Final = "value"
TEACHER: Final = "teacher"
ADVANTAGE: Final = "advantage"
TRAIN: Final = "train"
TRAIN_CRITIC: Final = "train_critic"
