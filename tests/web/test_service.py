"""The HTTP service: every call, every refusal, and what becomes of rows whose client is gone."""

import base64
import json
import os
import re
import select
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

import transferqueue as tq
from tests.web.service_client import GENEROUS_S, TOKEN, Asking
from transferqueue.cli.app import app
from transferqueue.web.subprocesses import start_page
from transferqueue.workflows.service import stream_engines

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

ROOT = Path(__file__).resolve().parents[2]
ONE = {"experience_consumer_stage": "rollout", "experience_count": 1}
STAGES = [
    {"name": "rollout", "needs": ["prompt"], "gives": ["ids"]},
    {"name": "train", "needs": ["ids"], "groups": {"incomplete": "drop"}},
]


@pytest.fixture(scope="module")
def queue(tmp_path_factory):
    runtime = tmp_path_factory.mktemp("run")
    runtime.chmod(0o700)
    with tq.connect(runtime=runtime, arena_bytes="128MiB") as queue:
        yield queue


@pytest.fixture(scope="module")
def service(queue):
    process, link = start_page(queue.address, "127.0.0.1:0", TOKEN, "service")
    at = urlsplit(link)
    yield Asking(at.hostname, at.port)
    process.stdin.close()
    assert process.wait(GENEROUS_S) == 0
    process.stdout.close()


@pytest.fixture
def job(service, request):
    """The name of a table of this test's own."""
    name = re.sub(r"\W", "_", request.node.name)
    service.call("init_engines", table=name, stages=STAGES)
    yield name
    service.refused("seal", table=name)


def error_of(answer):
    return answer.status, answer.json["error"]


# ---------------------------------------------------------------- the calls


def test_a_row_goes_from_prompt_to_trained_and_every_one_is_accounted_for(service, job):
    rows = service.call("put_prompts_data", table=job, columns={"prompt": ["a", "b"]}, samples=2)["rows"]
    got = service.call("get_experience_data", table=job, experience_consumer_stage="rollout", experience_count=4)
    assert got["rows"] == rows
    assert got["columns"] == {"prompt": ["a", "a", "b", "b"]}
    assert got["group_size"] == [2] * 4
    assert got["group_id"][0] == got["group_id"][1] != got["group_id"][2]
    ids = [[1], [1, 2], [], [3]]
    settled = service.call("put_experience_data", lease=got["lease"], columns={"ids": ids}, facts={"policy_version": 3})
    assert settled == {"rows": 4, "left": 0}
    trained = service.call("get_experience_data", table=job, experience_consumer_stage="train", groups=2)
    assert trained["columns"] == {"ids": ids}
    assert trained["policy_version"] == [3] * 4
    service.call("put_experience_data", lease=trained["lease"])
    stats = service.call("status", table=job)["stats"]
    assert (stats["rows_put"], stats["rows_done"], stats["rows_live"]) == (4, 4, 0)


def test_a_lease_ends_in_parts_and_rows_may_go_back_or_end(service, job):
    rows = service.call("put_prompts_data", table=job, columns={"prompt": list("abcd")})["rows"]
    got = service.call("get_experience_data", table=job, experience_consumer_stage="rollout", experience_count=4)
    lease = got["lease"]
    columns = {"ids": [[7]]}
    assert service.call("put_experience_data", lease=lease, rows=rows[:1], columns=columns) == {"rows": 1, "left": 3}
    assert service.call("renew_experience", lease=lease, lease_s=120)["lease_s"] == 120
    released = service.call("release_experience", lease=lease, rows=rows[1:2], failed=True, reason="out of memory")
    assert released == {"rows": 1, "left": 2}
    assert service.call("release_experience", lease=lease, drop="too_long") == {"rows": 2, "left": 0}
    assert (
        service.call("get_experience_data", table=job, experience_consumer_stage="rollout", experience_count=1)["rows"]
        == rows[1:2]
    )
    assert service.call("status", table=job)["stats"]["dropped"] == {"too_long": 2}


def test_a_call_that_comes_again_is_told_what_became_of_the_first(service, job):
    service.call("put_prompts_data", table=job, columns={"prompt": ["a"]}, facts={"key": ["p"]}, samples=2)
    again = service.refused("put_prompts_data", table=job, columns={"prompt": ["a"]}, facts={"key": ["p"]}, samples=2)
    assert error_of(again) == (409, "AlreadyExists")
    got = service.call("get_experience_data", table=job, experience_consumer_stage="rollout", experience_count=2)
    assert got["keys"] == ["p/0", "p/1"]
    service.call("put_experience_data", lease=got["lease"], columns={"ids": [[1], [2]]})
    again = service.refused("put_experience_data", lease=got["lease"], columns={"ids": [[1], [2]]})
    assert error_of(again) == (409, "LeaseExpired")
    assert "was given back; nothing was changed" in again.json["text"]


def test_late_columns_of_rows_by_their_ids(service, job):
    rows = service.call("put_prompts_data", table=job, columns={"prompt": ["a", "b"]})["rows"]
    service.call("put_experience_data", table=job, rows=rows, columns={"ids": [[1], [2]], "note": ["x", "y"]})
    got = service.call(
        "get_experience_data",
        table=job,
        experience_consumer_stage="train",
        experience_count=2,
        experience_columns=["note"],
    )
    assert got["columns"] == {"note": ["x", "y"]}


def test_weights_are_told_and_waited_for_and_are_the_clock(service, queue, request):
    name = request.node.name
    pace = {"stage": "train", "batch_rows": 4, "max_staleness": 1}
    service.call("init_engines", table=name, stages=STAGES, pace=pace)
    tensor = np.arange(6, dtype=np.float32).reshape(2, 3)
    packed = {"dtype": "float32", "shape": [2, 3], "data": base64.b64encode(tensor.tobytes()).decode()}
    service.call("weight_sync_notify", table=name, version=4, notice={"path": "there"}, tensors={"w": packed})
    assert queue.table(name).stats().version == 4
    told = service.call("get_weights", table=name)
    assert told == {"version": 4, "notice": {"path": "there"}, "tensors": {"w": {"dtype": "float32", "shape": [2, 3]}}}
    whole = service.call("get_weights", table=name, above=3, tensors=True)["tensors"]["w"]
    assert np.array_equal(np.frombuffer(base64.b64decode(whole["data"]), np.float32).reshape(2, 3), tensor)
    assert service.refused("get_weights", table=name, above=4, timeout_s=0.05).status == 504
    assert error_of(service.refused("weight_sync_notify", table=name, version=4)) == (409, "AlreadyExists")
    assert service.refused("weight_sync_notify", table=name, version=5, notice="x" * 5000).status == 400
    assert queue.table(name).stats().version == 4


def test_samples_are_requested_by_prompts_and_come_by_the_number_of_their_request(service, queue, request):
    name = request.node.name
    service.call("init_engines", **msgspec.to_builtins(stream_engines(table=name)))
    tensor = {"dtype": "float32", "shape": [1], "data": base64.b64encode(np.ones(1, np.float32).tobytes()).decode()}
    assert [service.call("update", table=name, weights={"w": tensor})["version"] for _ in range(2)] == [0, 1]
    prompts = [{"ids": [3, 4], "samples": 2}, {"ids": [5]}]
    asked = service.call("generate", table=name, prompts=prompts, scores=[1.0, 2.0], number=7)
    assert asked == service.call("generate", table=name, prompts=prompts, number=7) == {"request": 7, "left": 3}
    other = service.call("generate", table=name, prompts=prompts[1:])["request"]
    generate = {"experience_consumer_stage": "generate", "experience_count": 4}
    got = service.call("get_experience_data", table=name, **generate)
    assert got["columns"]["prompt_ids"] == [[5], [3, 4], [3, 4], [5]]
    answers = {
        "response_ids": [[1], [2], [3], [4]],
        "rollout_logprobs": [[0.0]] * 4,
        "finish_reason": ["stop"] * 4,
        "token_versions": [[1]] * 4,
    }
    service.call("put_experience_data", lease=got["lease"], columns=answers)
    train = {"experience_consumer_stage": "train", "experience_count": 3, "experience_columns": ["request"]}
    samples = service.call("get_experience_data", table=name, request=7, **train)
    assert samples["columns"]["request"] == [7, 7, 7]
    left = service.call("get_experience_data", table=name, request=other, at_least=1, **train)
    assert left["columns"]["request"] == [other]
    too_many = [{"ids": [1], "samples": 1 << 16}] * 2
    assert "make several requests" in service.refused("generate", table=name, prompts=too_many).json["text"]


def test_an_end_is_told(service, job):
    service.call("seal", table=job)
    assert error_of(
        service.refused("get_experience_data", table=job, experience_consumer_stage="rollout", experience_count=1)
    ) == (410, "EndOfTable")
    assert error_of(service.refused("put_prompts_data", table=job, columns={"prompt": ["a"]})) == (409, "Sealed")


# ---------------------------------------------------------------- columns


def test_columns_of_every_kind_come_back_as_they_were(service, job, queue):
    table = queue.table(job)
    given = {
        "prompt": ["ä", ""],
        "f32": np.array([0.1, 3e38], np.float32),
        "f16": np.array([[1, 2], [3, 4]], np.float16),
        "b": np.array([True, False]),
        "u64": np.array([2**64 - 1, 0], np.uint64),
        "raw": [b"\0\xff", b""],
        "value": [{"a": [1, None, "x"]}, [1.5]],
        "ragged": [np.arange(3), np.arange(0)],
        "varied": [np.zeros((2, 3), np.int8), np.ones((1, 4), np.int8)],
    }
    table.put(**given)
    for packed in (False, True):
        got = service.call(
            "get_experience_data",
            table=job,
            experience_consumer_stage="rollout",
            experience_count=2,
            experience_columns=list(given),
            packed=packed,
            lease_s=30,
        )
        assert isinstance(got["columns"]["ragged"], dict) is packed
        assert isinstance(got["columns"]["raw"], dict)
        again = service.call("put_prompts_data", table=job, columns=got["columns"])["rows"]
        read = table.read(again)
        assert read["prompt"].list() == given["prompt"]
        for name in ("f32", "f16", "b", "u64"):
            assert np.array_equal(read[name].numpy(), given[name]), name
        assert read["raw"].list() == given["raw"]
        assert read["value"].list() == given["value"]
        assert all(np.array_equal(a, b) for a, b in zip(read["varied"], given["varied"], strict=True))
        assert [row.tolist() for row in read["ragged"]] == [[0, 1, 2], []]
        table.drop(again, "seen")
        service.call("release_experience", lease=got["lease"])


def test_what_json_cannot_carry_comes_packed(service, job, queue):
    queue.table(job).put(prompt=["a"], x=[float("nan")], ids=[[1]], v=[{"raw": b"\1"}])
    got = service.call(
        "get_experience_data",
        table=job,
        experience_consumer_stage="train",
        experience_count=1,
        experience_columns=["x", "ids", "v"],
    )["columns"]
    assert got["ids"] == [[1]]
    assert np.isnan(np.frombuffer(base64.b64decode(got["x"]["data"]), got["x"]["dtype"]))
    assert msgspec.msgpack.decode(base64.b64decode(got["v"]["data"])) == {"raw": b"\1"}


@pytest.mark.slow
def test_bfloat16_goes_both_ways(service, job, queue):
    torch = pytest.importorskip("torch")
    sent = torch.tensor([[1.5, -2.0], [0.25, 3.0]], dtype=torch.bfloat16)
    data = base64.b64encode(sent.view(torch.int16).numpy().tobytes()).decode()
    column = {"dtype": "bfloat16", "shape": [2], "data": data}
    rows = service.call("put_prompts_data", table=job, columns={"prompt": ["a", "b"], "h": column})["rows"]
    assert torch.equal(queue.table(job).read(rows)["h"].torch(), sent)
    got = service.call(
        "get_experience_data",
        table=job,
        experience_consumer_stage="rollout",
        experience_count=2,
        experience_columns=["h"],
    )
    assert got["columns"]["h"] == column


def test_messagepack_carries_bytes_as_they_are(service, job):
    column = {"dtype": "int32", "shape": [None], "sizes": [2, 1], "data": np.array([1, 2, 3], np.int32).tobytes()}
    headers = {"Content-Type": "application/msgpack"}
    body = msgspec.msgpack.encode({"table": job, "columns": {"prompt": ["a", "b"], "ids": column}})
    assert service.request("POST", "/action/put_prompts_data", body, **headers).status == 200
    body = msgspec.msgpack.encode(
        {"table": job, "experience_consumer_stage": "train", "experience_count": 2, "packed": True}
    )
    answer = service.request("POST", "/action/get_experience_data", body, **headers)
    assert answer.headers["content-type"] == "application/msgpack"
    assert answer.msgpack["columns"]["ids"] == column


# ---------------------------------------------------------------- refusals


def packed(dtype="int32", shape=(), sizes=(), data=b""):
    return {
        "dtype": dtype,
        "shape": list(shape),
        "sizes": list(sizes),
        "data": base64.b64encode(data).decode(),
    }


WRONG = {
    "no column": ({}, "prompts without a column"),
    "uneven": ({"prompt": ["a", "b"], "ids": [[1]]}, "columns of 1, 2 prompts"),
    "no rows": ({"prompt": []}, "columns of 0 prompts"),
    "an option": ({"timeout_s": [1]}, "column timeout_s is named as a fact"),
    "bytes left over": ({"x": packed(data=b"12345")}, "5 bytes are no rows of int32, 4 bytes each"),
    "sizes too large": ({"x": packed(shape=[None], sizes=[9], data=b"1234")}, "are of 9 elements of int32, 36 bytes"),
    "sizes for nothing": ({"x": packed(sizes=[1], data=b"1234")}, "no dimension of"),
    "sizes missing": ({"x": packed(shape=[None, None], sizes=[1], data=b"1234")}, "1 sizes for shape"),
    "unknown dtype": ({"x": packed("object", data=b"1234")}, "dtype 'object' is unknown"),
    "no bool": ({"x": packed("bool", data=b"\2")}, "a bool is a byte of 0 or 1"),
    "no text": ({"x": packed("str", sizes=[1], data=b"\xff")}, "are no str"),
    "no value": ({"x": packed("value", sizes=[1], data=b"\xc1")}, "are no value"),
    "a name": ({"no name": [1]}, "has characters that names may not have"),
    "huge sizes": ({"x": packed(shape=[None, None], sizes=[2**62, 2**62], data=b"")}, "elements of int32"),
}


@pytest.mark.parametrize("columns", WRONG.values(), ids=WRONG)
def test_columns_that_are_none_are_refused_and_nothing_is_put(service, job, columns):
    given, text = columns
    answer = service.refused("put_prompts_data", table=job, columns=given)
    assert answer.status == 400, answer.body
    assert text in answer.json["text"]
    assert service.call("status", table=job)["stats"]["rows_put"] == 0


BODIES = {
    "no json": (b"{", 400, "the body is not what this call takes"),
    "not an object": (b"[]", 400, "Expected `object`"),
    "an unknown member": (
        b'{"experience_consumer_stage": "rollout", "experience_count": 1, "row": 2}',
        400,
        "unknown field `row`",
    ),
    "of another type": (b'{"experience_consumer_stage": 1}', 400, "Expected `str`"),
    "too long a wait": (
        b'{"experience_consumer_stage": "rollout", "experience_count": 1, "timeout_s": 301}',
        400,
        "<= 300",
    ),
    "no number at all": (
        b'{"experience_consumer_stage": "rollout", "experience_count": 1, "timeout_s": NaN}',
        400,
        "malformed",
    ),
    "two amounts": (
        b'{"experience_consumer_stage": "rollout", "experience_count": 1, "groups": 1}',
        400,
        "give exactly one of rows=",
    ),
    "no table": (b'{"experience_consumer_stage": "rollout", "experience_count": 1, "table": "none"}', 404, '"none"'),
    "deep": (b'{"experience_consumer_stage": ' + b"[" * 100_000, 400, "the body is not what this call takes"),
    "no text": (b'{"experience_consumer_stage": "\xff"}', 400, "the body is not what this call takes"),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_bodies_that_are_none_are_refused(service, body):
    content, status, text = body
    service.call("init_engines", stages=STAGES)
    answer = service.request("POST", "/action/get_experience_data", content, **{"Content-Type": "application/json"})
    assert answer.status == status, answer.body
    assert text in answer.json["text"]


JOBS = {
    "no stage": ({"stages": []}, "length >= 1"),
    "two of a name": ({"stages": [STAGES[0], STAGES[0]]}, "rollout"),
    "requeue to nobody": (
        {"stages": STAGES, "pace": {"stage": "train", "batch_rows": 4, "on_stale": "requeue"}},
        "on_stale=requeue names the stage",
    ),
    "pace of nobody": ({"stages": STAGES, "pace": {"stage": "none", "batch_rows": 4}}, '"none"'),
    "no batch": ({"stages": STAGES, "pace": {"stage": "train", "batch_rows": 0}}, "batch_rows=0"),
    "no dtype": ({"stages": STAGES, "columns": [{"name": "x", "dtype": "int7"}]}, "dtype 'int7' is unknown"),
}


@pytest.mark.parametrize("told", JOBS.values(), ids=JOBS)
def test_jobs_that_could_not_work_are_refused_and_not_declared(service, queue, told):
    body, text = told
    answer = service.refused("init_engines", table="refused", **body)
    assert answer.status in (400, 404, 409), answer.body
    assert text in answer.json["text"]
    assert "refused" not in queue.tables()


def test_a_job_in_other_words_is_refused(service, job):
    assert service.call("init_engines", table=job, stages=STAGES)["stages"] == ["rollout", "train"]
    assert error_of(service.refused("init_engines", table=job, stages=[{"name": "rollout", "needs": ["text"]}])) == (
        409,
        "AlreadyExists",
    )


def test_what_can_never_have_room_is_refused_and_what_has_none_now_waits(service, request):
    name = request.node.name
    service.call("init_engines", table=name, stages=STAGES, pace={"stage": "train", "batch_rows": 2, "depth": 0})
    never = service.refused("put_prompts_data", table=name, columns={"prompt": list("abc")})
    assert error_of(never) == (400, "Impossible")
    service.call("put_prompts_data", table=name, columns={"prompt": list("ab")})
    late = service.refused("put_prompts_data", table=name, columns={"prompt": ["c"]}, timeout_s=0.05)
    assert error_of(late) == (504, "DeadlineExceeded")
    assert service.call("status", table=name)["stats"]["rows_put"] == 2


def test_bodies_without_a_length_or_too_long_or_in_another_tongue_are_refused_unread(service):
    head = f"POST /action/status HTTP/1.1\r\nHost: {service.host}:{service.port}\r\nAuthorization: Bearer {TOKEN}\r\n"
    for line, status in (("Transfer-Encoding: chunked", 411), (f"Content-Length: {(64 << 20) + 1}", 413)):
        with socket.create_connection((service.host, service.port), timeout=GENEROUS_S) as raw:
            raw.sendall(f"{head}{line}\r\n\r\n".encode())
            assert raw.recv(64).split()[1] == str(status).encode()
    answer = service.request("POST", "/action/status", "a=1", **{"Content-Type": "text/csv"})
    assert answer.status == 415


def test_more_than_may_be_in_one_process_at_once_is_refused(service):
    """Five bodies of 60 MiB are told, and none is sent: four have room and are waited for, one is refused."""
    head = f"POST /action/status HTTP/1.1\r\nHost: {service.host}:{service.port}\r\nAuthorization: Bearer {TOKEN}\r\n"
    told = f"{head}Content-Length: {60 << 20}\r\n\r\n".encode()
    with ExitStack() as stack:
        at = (service.host, service.port)
        five = [stack.enter_context(socket.create_connection(at, timeout=GENEROUS_S)) for _ in range(5)]
        for raw in five:
            raw.sendall(told)
        (refused,), _, _ = select.select(five, [], [], GENEROUS_S)
        assert refused.recv(64).split()[1] == b"503"


def test_only_post_with_the_token_from_nowhere_else_does_anything(service):
    for path in ("/action/status", "/openapi.json", "/metrics", "/", "/none"):
        method = "POST" if path.startswith("/action") else "GET"
        assert service.request(method, path, Authorization="Bearer wrong").status == 401
        assert service.request(method, path, Host="evil.example").status == 421
        assert service.request(method, path, Origin="http://evil.example").status == 403
    assert service.request("GET", "/action/status").status == 405
    assert service.request("POST", "/openapi.json", "{}").status == 405
    missing = service.request("POST", "/action/none", "{}")
    assert error_of(missing) == (404, "NotFound")
    assert "get_experience_data" in missing.json["text"]


# ---------------------------------------------------------------- clients that are gone


def test_a_client_that_vanishes_loses_its_rows_at_the_deadline(service, job):
    service.call("put_prompts_data", table=job, columns={"prompt": ["a"]})
    lost = service.call(
        "get_experience_data", table=job, experience_consumer_stage="rollout", experience_count=1, lease_s=0.3
    )
    got = service.call(
        "get_experience_data", table=job, experience_consumer_stage="rollout", experience_count=1, timeout_s=GENEROUS_S
    )
    assert got["rows"] == lost["rows"]
    late = service.refused("put_experience_data", lease=lost["lease"], columns={"ids": [[1]]})
    assert error_of(late) == (409, "LeaseExpired")
    service.call("put_experience_data", lease=got["lease"], columns={"ids": [[2]]})
    assert service.call("get_experience_data", table=job, experience_consumer_stage="train", experience_count=1)[
        "columns"
    ] == {"ids": [[2]]}


def test_a_client_that_hangs_up_while_it_waits_takes_nothing(service, job, queue):
    body = json.dumps({"table": job} | ONE | {"timeout_s": 60, "lease_s": 600}).encode()
    head = (
        f"POST /action/get_experience_data HTTP/1.1\r\nHost: {service.host}:{service.port}\r\nAuthorization: Bearer "
        f"{TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n"
    )

    def waiting():
        return [one for one in queue.stats().waiting if one.table == job]

    with socket.create_connection((service.host, service.port), timeout=GENEROUS_S) as raw:
        raw.sendall(head.encode() + body)
        while not waiting():
            pass
    for _ in range(3):  # the loop that answers these has seen the end of that connection before
        service.call("status", table=job)
    service.call("put_prompts_data", table=job, columns={"prompt": ["a"]})
    assert (
        len(
            service.call("get_experience_data", table=job, experience_consumer_stage="rollout", experience_count=1)[
                "rows"
            ]
        )
        == 1
    )


@pytest.mark.slow
def test_a_service_tells_that_its_server_is_gone(tmp_path):
    tmp_path.chmod(0o700)
    queue = tq.connect(runtime=tmp_path, arena_bytes="64MiB")
    process, link = start_page(queue.address, "127.0.0.1:0", TOKEN, "service")
    service = Asking(urlsplit(link).hostname, urlsplit(link).port)
    service.call("init_engines", stages=STAGES)
    queue.close()
    assert error_of(service.refused("status")) == (503, "Disconnected")
    assert service.request("GET", "/metrics").status == 503
    process.stdin.close()
    assert process.wait(GENEROUS_S) == 0
    process.stdout.close()


# ---------------------------------------------------------------- pages


def test_the_document_names_every_call_and_what_it_refers_to_is_there(service):
    document = service.request("GET", "/openapi.json").json
    assert document["openapi"] == "3.1.0"
    names = {"init_engines", "put_prompts_data", "put_experience_data", "get_experience_data", "weight_sync_notify"}
    assert names <= {path.removeprefix("/action/") for path in document["paths"]}
    text = json.dumps(document)
    found = {part.partition('"')[0] for part in text.split('"$ref": "#/components/schemas/')[1:]}
    assert found <= set(document["components"]["schemas"])
    assert document["components"]["schemas"]["GetExperienceData"]["additionalProperties"] is False
    column = document["components"]["schemas"]["ColumnSpec"]
    assert column["description"].startswith("A declared column.")
    assert column["properties"]["name"]["description"] == "of the column."
    assert "Args:" not in text
    validator = pytest.importorskip("openapi_spec_validator")
    validator.validate(document)


def test_the_page_says_every_call_and_loads_nothing_from_any_network(service):
    page = service.request("GET", "/")
    text = page.body.decode()
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "POST /action/get_experience_data" in text
    assert "<script" not in text
    assert 'href="/service.css"' in text
    assert service.request("GET", "/service.css").status == 200
    for target in text.split('href="#')[1:]:
        assert f'id="{target.partition(chr(34))[0]}"' in text


def test_metrics_are_served(service, job):
    service.call("put_prompts_data", table=job, columns={"prompt": ["a"]})
    answer = service.request("GET", "/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert f'transferqueue_table_rows_put_total{{table="{job}"}} 1.0' in answer.body.decode()


# ---------------------------------------------------------------- serve, and the example


@pytest.mark.slow
def test_serve_starts_it_with_a_token_of_a_file_and_the_example_runs_on_it(tmp_path):
    tokens = tmp_path / "tokens"
    token = tokens / "service"
    command = [sys.executable, "-m", "transferqueue.cli", "serve", "--runtime", tmp_path / "run", "--http", "0"]
    with subprocess.Popen([*command, "--tokens", tokens], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline().startswith("ready ipc://")
        link = urlsplit(server.stdout.readline().removeprefix("http ").strip())
        assert token.stat().st_mode & 0o777 == 0o600
        assert link.query == f"token={token.read_text().strip()}"
        ran = subprocess.run(
            [sys.executable, "-I", ROOT / "examples" / "http_service.py", f"http://{link.netloc}", token],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            env=os.environ | {"NO_PROXY": "*"},
        )
        server.terminate()
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "rows put 64, done 64, dropped 0"
    assert ran.stdout.count("16 rows, mean reward") == 4


def test_serve_refuses_tokens_for_nobody(tmp_path):
    ran = CliRunner().invoke(app, ["serve", "--runtime", str(tmp_path / "run"), "--tokens", str(tmp_path / "place")])
    assert ran.exit_code == 2
    assert "has the tokens of --web and --http; give one of them too" in " ".join(ran.stderr.split())
    assert list(tmp_path.iterdir()) == []
