"""What fits is shown whole; what does not fit is left out by rank, or flows on."""

from rich.text import Text

from transferqueue.cli.screens.layout import GridColumn, bar, fit, flow, grid_line, heading, spread, wrap


def column(name: str, rank: int = 0, cell: str = "1", left: bool = False) -> GridColumn:
    return GridColumn(heading=name, cells=[Text(cell)], rank=rank, left=left)


def test_columns_of_highest_rank_go_first() -> None:
    columns = [
        column("task", cell="reference", left=True),
        column("held", rank=2),
        column("done"),
        column("age", rank=1),
    ]
    wide = sum(c.width for c in columns) + 6
    assert [c.heading for c in fit(columns, wide)] == ["task", "held", "done", "age"]
    assert [c.heading for c in fit(columns, wide - 1)] == ["task", "done", "age"]
    assert [c.heading for c in fit(columns, 5)] == ["task", "done"]


def test_cells_line_up_under_their_headings() -> None:
    columns = [column("task", cell="reward", left=True), column("ready", cell="12,345")]
    assert heading(columns).plain == "task     ready"
    assert grid_line(columns, 0).plain == "reward  12,345"


def test_a_grid_without_rows_has_headings() -> None:
    assert heading([GridColumn(heading="task", cells=[])]).plain == "task"


def test_pieces_flow_without_being_broken() -> None:
    lines = flow([Text("aaaa"), Text("bbbb"), Text("cc")], 9, between=" ", indent=2)
    assert [line.plain for line in lines] == ["aaaa bbbb", "  cc"]


def test_text_wraps_at_spaces_with_every_line_indented() -> None:
    lines = wrap(Text("needs 3 complete groups of eight"), 24, indent=4)
    assert [line.plain for line in lines] == ["    needs 3 complete", "    groups of eight"]


def test_two_ends_of_a_line_or_two_lines() -> None:
    assert [line.plain for line in spread(Text("left"), Text("right"), 14)] == ["left     right"]
    assert [line.plain for line in spread(Text("left"), Text("right"), 10)] == ["left", "right"]


def test_a_bar_shows_the_smallest_share_and_never_overflows() -> None:
    assert [bar(share, 4).plain for share in (0.0, 0.01, 0.5, 1.0, 7.0)] == ["────", "━───", "━━──", "━━━━", "━━━━"]
