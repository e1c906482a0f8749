"""Numbers read as a person would say them."""

import pytest

from transferqueue.observe import units as quantities


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (200 << 20, "200 MiB"),
        (8 << 30, "8 GiB"),
        (25_250_000_000, "23.5 GiB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert quantities.size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1e-9, "0 ms"),
        (0.0851, "85 ms"),
        (0.9999, "1.0 s"),
        (8.21, "8.2 s"),
        (9.96, "10 s"),
        (74, "74 s"),
        (119.6, "2 min 0 s"),
        (192, "3 min 12 s"),
        (7500, "2 h 5 min"),
        (4 * 86_400 + 3 * 3600, "4 d 3 h"),
    ],
)
def test_spans(seconds: float, text: str) -> None:
    assert quantities.span(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (65_536, "65,536"), (99_999, "99,999"), (123_456, "123k"), (1_250_000, "1.2M")]
)
def test_counts(number: int, text: str) -> None:
    assert quantities.count(number) == text


@pytest.mark.parametrize(
    ("per_s", "text"),
    [(None, "–"), (0.0, "0"), (0.42, "0.4"), (9.96, "10"), (512.3, "512"), (9_999, "9,999"), (12_480.0, "12.5k")],
)
def test_rates(per_s: float | None, text: str) -> None:
    assert quantities.rate(per_s) == text


def test_plurals() -> None:
    assert [quantities.plural(1, "group"), quantities.plural(3, "group"), quantities.plural(2, "batch")] == [
        "1 group",
        "3 groups",
        "2 batches",
    ]
