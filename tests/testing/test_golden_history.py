"""A history file of every kind of event, call and result is read, and written with the same bytes: histories are kept
and checked later."""

import json
from pathlib import Path
from typing import get_args

from transferqueue.testing.history import history as h

GOLDEN = Path(__file__).parent / "golden" / "history.jsonl"


def test_the_file_has_every_kind_of_line_call_and_result():
    lines = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
    found = [{line["type"] for line in lines}] + [
        {line[part]["type"] for line in lines if part in line} for part in ("call", "result")
    ]
    assert found == [{kind.__struct_config__.tag for kind in get_args(union)} for union in (h.Line, h.Call, h.Result)]


def test_a_recorded_history_is_read_and_written_again_as_it_was():
    assert b"".join(map(h.write_line, h.read(GOLDEN))) == GOLDEN.read_bytes()
