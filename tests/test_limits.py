"""Sizes as people write them, and what a table may hold."""

from __future__ import annotations

from typing import Any

import pytest

from transferqueue.errors import UsageError
from transferqueue.limits import Limits, parse_bytes, parse_switch


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (8, 8),
        ("8", 8),
        ("1.5 KiB", 1536),
        ("512MB", 512_000_000),
        ("8gib", 8 << 30),
        ("2TiB", 2 << 40),
        ("1TB", 10**12),
    ],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "8PiB", "0", "0.5B", 0, -1, True, None, 1.5])
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(UsageError, match=r"size .* is not"):
        parse_bytes(text)


@pytest.mark.parametrize("rows", [0, -1, True, 1.5, "9"])
def test_what_is_no_number_of_rows(rows: Any) -> None:
    with pytest.raises(UsageError, match=r"limit rows=.* is not a positive number of rows"):
        Limits(rows=rows)


def test_a_switch_of_the_environment_is_on_or_off_and_nothing_else() -> None:
    found = [parse_switch("SWITCH", value, default=True) for value in (None, "", "0", "1")]
    assert found == [True, True, False, True]
    for value in ("false", "no", "2", " 0"):
        with pytest.raises(
            UsageError, match=rf"^SWITCH='{value}' is neither 0 nor 1; set it to one of them, or unset it$"
        ):
            parse_switch("SWITCH", value, default=True)
