"""`transferqueue samples` shows what a person compares a response with."""

import errno
import os
import socket
import tempfile
from contextlib import nullcontext

import pytest

import transferqueue as tq
from transferqueue.cli.commands.looking.samples import sample_lines
from transferqueue.workflows.job.run import samples, server
from transferqueue.workflows.job.run.samples import SampleRow


def test_below_a_response_are_the_columns_of_the_data_such_as_the_right_answer():
    data = {"right": "5", "question": "2+3", "note": None, "source": "a " * 200}
    row = {"row": 3, "step": 1, "fate": "done", "version": 0, "ordinal": 3, "tokens": 1, "finish_reason": "stop"}
    sample = SampleRow(prompt="2+3", response="6", reward=0.0, terms={"exact": 0.0}, data=data, **row)
    head, prompt, response, columns, empty = (line.plain for line in sample_lines(sample))
    assert (head, prompt, response, empty) == ("reward 0  step 1, row 3, version 0, 1 tokens, stop", "2+3", "6", "")
    assert columns == "right: 5; source: " + ("a " * 200)[:200] + "…"


@pytest.mark.parametrize("listens", [True, False])
def test_a_server_that_does_not_answer_is_no_ended_one(listens, tmp_path, monkeypatch):
    """A socket that an ended server left is."""
    monkeypatch.setattr(samples, "_CONNECT_S", 0.2)
    assert samples._live(tmp_path) == []
    with tempfile.TemporaryDirectory(prefix="tq-") as runtime, socket.socket(socket.AF_UNIX) as server:
        (tmp_path / "runtime").write_text(runtime)
        server.bind(f"{runtime}/control.sock")
        if listens:
            server.listen()
        with pytest.raises(tq.Unreachable) if listens else nullcontext():
            assert samples._live(tmp_path) == []


@pytest.mark.parametrize("cause", [errno.EMFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT])
def test_a_server_of_which_the_kernel_does_not_say_whether_it_listens_may_run(cause, tmp_path, monkeypatch):
    def check_listening(_place):
        raise OSError(cause, os.strerror(cause))

    (tmp_path / "runtime").write_text("/nowhere")
    assert server.running_address(tmp_path) == ""
    monkeypatch.setattr(server, "check_listening", check_listening)
    assert server.running_address(tmp_path) == "ipc:///nowhere/control.sock"
    (tmp_path / "runtime").unlink()
    (tmp_path / "runtime").mkdir()
    with pytest.raises(tq.Unreachable, match=r"cannot be seen: .* Is a directory"):
        server.running_address(tmp_path)
