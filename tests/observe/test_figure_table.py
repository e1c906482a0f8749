"""Tables of figures: their bounds, and channels that hold none."""

import msgspec
import pytest

from transferqueue.errors import UsageError
from transferqueue.observe.figure_table import Curve, FigureTable, decode, figures_channel, has_figures


@pytest.mark.parametrize(
    ("columns", "lines", "said"),
    [
        ((), (), "0 columns"),
        (("a",) * 17, (), "17 columns"),
        (("a",), (("1",),) * 65, "65 lines"),
        (("a", "b"), (("1", "2"), ("1",)), r"lines of \[1, 2\] cells for 2 columns"),
        (("a",), (("x" * 401,),), "a text of 401 characters"),
    ],
)
def test_a_table_that_a_page_would_not_show_is_refused(columns, lines, said):
    with pytest.raises(UsageError, match=said):
        FigureTable(title="t", columns=columns, lines=lines)
    encoded = msgspec.json.encode({"title": "t", "columns": columns, "lines": lines})
    with pytest.raises(UsageError, match=said):
        decode(encoded)


def test_curves_and_warnings_have_bounds_too():
    with pytest.raises(UsageError, match="a curve of 1 values at 2 points"):
        Curve(name="loss", at=(1, 2), values=(0.5,))
    point = Curve(name="loss", at=(1,), values=(None,))
    with pytest.raises(UsageError, match="65 curves and 0 warnings"):
        FigureTable(title="t", columns=("a",), lines=(), curves=(point,) * 65)
    with pytest.raises(UsageError, match="a text of 401 characters"):
        FigureTable(title="t", columns=("a",), lines=(), warnings=("x" * 401,))


def test_a_channel_of_figures_is_known_by_its_name_and_other_bytes_are_refused():
    assert has_figures(figures_channel("job", "ranker"))
    assert not has_figures("policy")
    for encoded in (b"", b"[]", b'{"title": 3}'):
        with pytest.raises(UsageError, match="has no table of figures"):
            decode(encoded)
