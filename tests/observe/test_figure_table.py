"""Tables of figures: their bounds, and channels that hold none."""

import msgspec
import pytest

from transferqueue.errors import UsageError
from transferqueue.observe.figure_table import FigureTable, decode, figures_channel, has_figures


@pytest.mark.parametrize(
    ("columns", "lines", "said"),
    [
        ((), (), "0 columns"),
        (("a",) * 17, (), "17 columns"),
        (("a",), (("1",),) * 65, "65 lines"),
        (("a", "b"), (("1", "2"), ("1",)), r"lines of \[1, 2\] cells for 2 columns"),
        (("a",), (("x" * 201,),), "a text of 201 characters"),
    ],
)
def test_a_table_that_a_page_would_not_show_is_refused(columns, lines, said):
    with pytest.raises(UsageError, match=said):
        FigureTable(title="t", columns=columns, lines=lines)
    encoded = msgspec.json.encode({"title": "t", "columns": columns, "lines": lines})
    with pytest.raises(UsageError, match=said):
        decode(encoded)


def test_a_channel_of_figures_is_known_by_its_name_and_other_bytes_are_refused():
    assert has_figures(figures_channel("job", "ranker"))
    assert not has_figures("policy")
    for encoded in (b"", b"[]", b'{"title": 3}'):
        with pytest.raises(UsageError, match="has no table of figures"):
            decode(encoded)
