# ruff: noqa: E402  (imports after a check that they are there)
"""Questions to the drop-in's controller over a socket: the same answers and errors as over Ray, and Ray where there is
no socket."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")
pytest.importorskip("omegaconf", reason="make test-shim has it")

import msgspec
import numpy as np

from transferqueue.adapters.transfer_queue import deployment as service
from transferqueue.adapters.transfer_queue import local_controller_socket
from transferqueue.adapters.transfer_queue.local_controller_socket import (
    CONNECTIONS_MAX,
    LocalControllerSocket,
    QuestionServer,
    decode_meta,
    encode_meta,
)
from transferqueue.adapters.transfer_queue.metadata import BatchMeta
from transferqueue.adapters.transfer_queue.samples.sample_shapes import SampleShapes
from transferqueue.errors import Corruption, Disconnected

TensorDict = tensordict.TensorDict
META = BatchMeta([3, 5], ["p", "p"], {"x": {"dtype": torch.int64, "shape": (2,), "is_nested": False}})


@pytest.fixture
def server() -> Iterator[service.DropInServer]:
    found = service.DropInServer({"controller": {"polling_mode": True}}, direct=True)
    yield found
    found.shutdown()


class Actor:
    """What Ray's actor does, and which questions came this way."""

    def __init__(self, server: Any) -> None:
        self.server, self.asked = server, list[str]()

    def ask(self, name: str, *arguments: Any) -> Any:
        self.asked.append(name)
        return getattr(self.server, name)(*arguments)


def same(one: BatchMeta, other: BatchMeta) -> bool:
    return (
        one.global_indexes == other.global_indexes
        and one.partition_ids == other.partition_ids
        and one.field_schema == other.field_schema
        and one.production_status.tolist() == other.production_status.tolist()
        and one.custom_meta == other.custom_meta
        and one.extra_info == other.extra_info
    )


def test_questions_about_samples_go_over_the_socket_and_others_over_the_actor(server: service.DropInServer) -> None:
    actor = Actor(server)
    connection = service.DropInConnection(actor.ask, None)
    client = connection.client
    ragged = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    client.put(TensorDict({"x": torch.zeros(2), "r": ragged}, batch_size=2), partition_id="p")
    found = client.get_meta(["x", "r"], 2, "p", task_name="t")
    assert actor.asked == ["hello"]
    assert same(found, server.controller.describe(found.global_indexes, "p"))
    assert client.get_data(found)["x"].tolist() == torch.zeros(2).tolist()
    assert found.production_status.flags.writeable
    assert client.get_meta(["x"], 2, "p", task_name="t").size == 0
    assert client.check_consumption_status("t", "p")
    assert actor.asked == ["hello", "consumption"]
    connection.close()


def test_an_exception_is_the_one_that_was_raised(server: service.DropInServer) -> None:
    actor = Actor(server)
    connection = service.DropInConnection(actor.ask, None)
    with pytest.raises(ValueError, match="mode 'no' is unknown") as raised:
        connection.client.get_meta(["x"], 1, "p", mode="no")
    assert type(raised.value) is ValueError
    assert actor.asked == ["hello", "kept"]
    with pytest.raises(Disconnected, match="was fetched already"):
        server.kept(1)
    connection.close()


def test_arguments_that_would_change_on_the_way_go_over_the_actor(server: service.DropInServer) -> None:
    actor = Actor(server)
    connection = service.DropInConnection(actor.ask, None)
    for config in ({"a": (1, 2)}, {"a": {1, 2}}, {"a": object()}, {"n": 1 << 80}):
        connection.client.get_meta(["x"], 0, "p", task_name="t", sampling_config=config)
    assert actor.asked == ["hello"] + 4 * ["get_meta"]
    connection.close()


@pytest.mark.parametrize("name", ["", "transferqueue-nobody-listens"])
def test_without_a_socket_everything_goes_over_the_actor(name: str) -> None:
    asked = []
    questions = LocalControllerSocket(name, lambda *arguments: asked.append(arguments) or META)
    assert questions.ask("describe", [3], "p") is META
    assert asked == [("describe", [3], "p")]
    questions.close()


@pytest.mark.parametrize("tags", [[{"n": 1}, {"n": 2}], [{"n": 1 << 70}, {}]], ids=["too large", "no plain value"])
def test_an_answer_that_no_frame_carries_is_not_lost(
    tags: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question has counted its samples as consumed."""
    meta = BatchMeta([3, 5], ["p", "p"], META.field_schema, custom_meta=tags)
    server = QuestionServer(lambda name: meta)
    actor = Actor(server)
    client = LocalControllerSocket(server.name, actor.ask)
    if tags[0]["n"] == 1:
        monkeypatch.setattr(local_controller_socket, "MESSAGE_BYTES_MAX", 40)
    assert client.ask("describe") is meta
    assert actor.asked == ["kept"]
    with pytest.raises(Disconnected, match="was fetched already"):
        server.kept(1)
    client.close()
    server.close()


def test_many_answers_that_no_frame_carries_wait_until_they_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has counted its samples as consumed. What a client that is gone has not fetched is given up."""
    monkeypatch.setattr(local_controller_socket, "MESSAGE_BYTES_MAX", 40)
    answers = iter(range(1000))
    server = QuestionServer(lambda name: BatchMeta([next(answers)], ["p"], META.field_schema))
    at_once = threading.Barrier(24)

    def fetch(name: str, number: int) -> Any:
        at_once.wait(20)
        return server.kept(number)

    client = LocalControllerSocket(server.name, fetch)
    with ThreadPoolExecutor(24) as pool:
        asked = [pool.submit(client.ask, "describe") for _ in range(24)]
        assert sorted(each.result(20).global_indexes[0] for each in asked) == list(range(24))
    connected = client._taken()
    local_controller_socket._send(connected, msgspec.msgpack.encode(["describe", []]))
    local_controller_socket._receive(connected)
    assert len(server._large) == 1
    connected.close()
    client.close()
    while server._connected:
        pass
    assert not server._large
    server.close()


def test_a_forked_process_leaves_the_connections_of_its_parent_alone() -> None:
    server = QuestionServer(lambda name: META)
    client = LocalControllerSocket(server.name, Actor(server).ask)
    client.ask("describe")
    (connected,) = client._idle
    client._pid = -1  # as in a child
    client.ask("describe")
    assert connected not in client._idle
    assert len(client._idle) == 1
    client.close()
    connected.close()
    server.close()


def test_a_client_that_cannot_be_served_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    server = QuestionServer(lambda name: META)
    actor = Actor(QuestionServer(lambda name: META))
    with monkeypatch.context() as patch:
        patch.setattr(server, "_serve", None)
        patch.setattr(local_controller_socket.threading, "Thread", _no_thread)
        with pytest.raises(local_controller_socket.AskOtherwise):
            LocalControllerSocket(server.name, actor.ask)._dialled()
    client = LocalControllerSocket(server.name, actor.ask)
    assert same(client.ask("describe"), META)
    assert actor.asked == []
    client.close()
    server.close()
    actor.server.close()


def _no_thread(*_: Any, **__: Any) -> None:
    raise RuntimeError("can't start new thread")


def test_threads_ask_together_and_reuse_connections() -> None:
    together = threading.Barrier(8)

    def answer(_: str, *__: Any) -> BatchMeta:
        together.wait(20)
        return META

    server = QuestionServer(answer)
    questions = LocalControllerSocket(server.name, refuse)
    try:
        for _ in range(3):
            threads = [threading.Thread(target=questions.ask, args=("describe", [3], "p")) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
            assert len(questions._idle) == len(server._connected) == 8
    finally:
        questions.close()
        server.close()


def refuse(name: str, *_: Any) -> Any:
    raise AssertionError(f"{name} was asked over the actor")


def test_too_many_connections_are_refused_before_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CONNECTIONS_MAX > 1
    monkeypatch.setattr(local_controller_socket, "CONNECTIONS_MAX", 0)
    server = QuestionServer(refuse)
    questions = LocalControllerSocket(server.name, lambda *_: META)
    assert questions.ask("describe", [3], "p") is META
    server.close()


def test_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    server = QuestionServer(refuse)
    questions = LocalControllerSocket(server.name, lambda *_: META)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert questions.ask("describe", [3], "p") is META
    server.close()


def test_a_connection_that_breaks_in_the_middle_does_not_ask_twice() -> None:
    asked = []
    server: QuestionServer | None = None

    def answer(*_: Any) -> BatchMeta:
        assert server is not None
        for each in server._connected:
            each.shutdown(socket.SHUT_RDWR)
        return META

    server = QuestionServer(answer)
    questions = LocalControllerSocket(server.name, lambda *arguments: asked.append(arguments))
    with pytest.raises(Disconnected, match="samples may count as consumed"):
        questions.ask("describe", [3], "p")
    assert asked == [("hello",)]
    server.close()


def test_after_a_restart_of_the_server_an_idle_connection_is_not_used() -> None:
    server = QuestionServer(lambda *_: META)
    questions = LocalControllerSocket(server.name, lambda *_: "over the actor")
    assert same(questions.ask("describe", [3], "p"), META)
    server.close()
    assert questions.ask("describe", [3], "p") == "over the actor"
    questions.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda: b"\xff\xff\xff\xff",
        lambda: struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        lambda: framed(["shutdown", []]),
        lambda: framed(["__class__", []]),
        lambda: framed(["get_meta", {"a": 1}]),
        lambda: framed([["get_meta"], []]),
        lambda: 2 * framed(["get_meta", []]),
    ],
)
def test_what_is_no_question_calls_nothing(make: Callable[[], bytes]) -> None:
    server = QuestionServer(refuse)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(20)
        stranger.connect(f"\0{server.name}")
        assert stranger.recv(1) == b"\x01"
        stranger.sendall(make())
        answer = stranger.recv(1 << 16)
        if answer:
            number, plain = msgspec.msgpack.decode(answer[4:])
            assert number
            assert plain is None
            with pytest.raises(Exception) as raised:  # noqa: PT011  (whatever the decoder says)
                server.kept(number)
            assert not isinstance(raised.value, AssertionError)
    server.close()


@pytest.mark.parametrize("size", [0, 5, local_controller_socket._AT_ONCE, 3 * local_controller_socket._AT_ONCE])
def test_a_frame_arrives_whole_in_whatever_pieces(size: int) -> None:
    near, far = socket.socketpair()
    frame = struct.pack("<I", size) + bytes(size)
    with near, far, ThreadPoolExecutor(1) as pool:
        received = pool.submit(local_controller_socket._receive, far)
        for at in range(6):
            near.sendall(frame[at : at + 1])
        near.sendall(frame[6:])
        assert received.result(20) == bytes(size)


def framed(value: Any) -> bytes:
    frame = msgspec.msgpack.encode(value)
    return struct.pack("<I", len(frame)) + frame


def test_metadata_arrives_as_it_was() -> None:
    schema = {
        "a": {"dtype": torch.bfloat16, "shape": (), "is_nested": False, "is_non_tensor": False},
        "b": {"dtype": None, "shape": (), "is_nested": False, "is_non_tensor": True},
        "c": {"dtype": torch.int8, "shape": None, "is_nested": True, "per_sample_shapes": [(1, 2), None]},
        "d": {"dtype": torch.int8, "shape": None, "per_sample_shapes": SampleShapes(np.array([[1, 2], [3, 4]]))},
    }
    meta = BatchMeta([1, 1 << 60], ["p", "q"], schema, custom_meta=[{"k": [1, {"v": b"x"}]}, {}])
    arrived = decode_meta(msgspec.msgpack.decode(msgspec.msgpack.encode(encode_meta(meta))))
    assert same(arrived, meta)
    assert same(decode_meta(encode_meta(BatchMeta([], []))), BatchMeta([], []))


@pytest.mark.parametrize("plain", [[], [1, 2, 3, 4, 5, 6], [b"", "p", {"x": {"dtype": "nn"}}, b"", {}, None]])
def test_an_answer_that_is_no_metadata_is_corruption(plain: list[Any]) -> None:
    with pytest.raises(Corruption, match="is no metadata"):
        decode_meta(plain)
