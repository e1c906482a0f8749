"""How much a test repeats: little in `make test`, much in `make test-long`.

A test that does the same again and again (seeds, kills, examples, rows) takes the number as a parameter of two sizes.
The larger one is marked `long`: pytest leaves it out unless it is asked for with `-m long`.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings


def sizes(short: int, long: int) -> list[Any]:
    """The two values of such a parameter."""
    return [pytest.param(short, id="short"), pytest.param(long, id="long", marks=pytest.mark.long)]


def only_long(*values: Any) -> list[Any]:
    """Values of a parameter that show nothing new, such as the same check through another transport; a tuple: of
    several parameters."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.long) for value in values
    ]


def examples(usual: int) -> int:
    """Examples of a property test: `usual`, in proportion to what the profile of hypothesis asks for."""
    return max(1, usual * (settings.default.max_examples if settings.default else 100) // 100)
