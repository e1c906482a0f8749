"""Typed requests with extreme values, and kills. `make fuzz` sends sixty thousand; a million are the full run
(docs/contribute/testing.md)."""

import random
import subprocess
import sys
import typing

import pytest

from tests.fuzz.typed import Typed, World
from tests.scale import only_long
from transferqueue.errors import ProtocolError
from transferqueue.wire import codec
from transferqueue.wire import messages as m


def test_every_request_is_made_and_most_pass_the_decoder():
    typed, passed = Typed(random.Random(5), World()), 0
    for kind in typing.get_args(m.Request):
        decoded = set()
        for _ in range(30):
            try:
                decoded.add(type(codec.decode_call(typed.call(1, 2, 0, typed.request(kind))).request))
                passed += 1
            except ProtocolError:
                pass
        assert decoded == {kind}
    assert passed > 15 * len(typing.get_args(m.Request))


@pytest.mark.slow
@pytest.mark.parametrize("level", ["disk", *only_long("process")])
def test_typed_requests_and_kills_leave_a_server_whole(tmp_path, level):
    command = [
        sys.executable,
        "-m",
        "tests.fuzz.lives",
        str(tmp_path),
        "--messages",
        "2000",
        "--seed",
        "20261122",
        "--level",
        level,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-3000:]
    assert "books balanced" in ended.stdout
