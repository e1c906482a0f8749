"""The page's own process, looked at with an HTTP client, beside an embedded server that works."""

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import time
from importlib.resources import files
from urllib.parse import quote, urlsplit

import numpy as np
import pytest

import transferqueue as tq
from transferqueue.errors import UsageError
from transferqueue.web.subprocesses import start_page

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

GENEROUS_S = 60
TOKEN = "token-of-the-test"  # noqa: S105
METRICS_TOKEN = "token-of-the-metrics"  # noqa: S105
FIGURES = b'{"title":"recall","columns":["refit","20 %"],"lines":[["1","0.25"]]}'
FILES = ["/icon.svg", "/draw.js", "/row.js", "/rollouts.js", "/page.js", "/page.css"]
AWKWARD = ["a/b", "a/b/0", "a/../b", "_/", "row//0", "a.b-c", "x" * 128]
"""Names that tables may have, and that paths find hard."""


@pytest.fixture(scope="module")
def queue(tmp_path_factory):
    runtime = tmp_path_factory.mktemp("run")
    runtime.chmod(0o700)
    with tq.connect(runtime=runtime, arena_bytes="64MiB") as queue:
        tasks = [tq.Task("train", needs=["x"]), tq.Task("reward", needs=["text"])]
        table = queue.create_table("rows", tasks=tasks, pacing=tq.Pacing("train", batch_rows=4, max_staleness=1))
        table.put(x=[1.0, 2.0, 3.0], policy_version=0)
        with table.lease("train", rows=1):
            pass
        for name in AWKWARD:
            queue.create_table(name, tasks=[tq.Task("score", needs=["x"])]).put(x=[1.0])
        yield queue


@pytest.fixture(scope="module")
def page(queue):
    process, link = start_page(queue.address, "127.0.0.1:0", TOKEN, metrics_token=METRICS_TOKEN)
    yield urlsplit(link)
    process.stdin.close()
    assert process.wait(GENEROUS_S) == 0
    process.stdout.close()


def get(page, path, *, method="GET", **headers):
    """Status, headers and body of one answer, with the token unless another is given."""
    client = http.client.HTTPConnection(page.hostname, page.port, timeout=GENEROUS_S)
    client.request(method, path, headers={"Authorization": f"Bearer {TOKEN}"} | headers)
    answer = client.getresponse()
    body = answer.read().decode()
    client.close()
    return answer.status, dict(answer.getheaders()), body


class Stream:
    """An open stream of events."""

    def __init__(self, page):
        self.client = http.client.HTTPConnection(page.hostname, page.port, timeout=GENEROUS_S)
        self.client.request("GET", "/events", headers={"Authorization": f"Bearer {TOKEN}"})
        self.answer = self.client.getresponse()

    def event(self):
        kind, data = "past", "[]"
        while kind == "past":  # comes first
            kind = self.answer.readline().decode().removeprefix("event: ").strip()
            data = self.answer.readline().decode().removeprefix("data: ")
            assert self.answer.readline() == b"\n"
        return kind, json.loads(data)

    def close(self):
        self.client.sock.close() if self.client.sock else None
        self.answer.close()
        self.client.close()


def test_the_link_is_exchanged_for_a_cookie_and_the_token_leaves_the_address(page):
    status, headers, _ = get(page, f"/?token={TOKEN}", Authorization="")
    assert status == 303
    assert headers["location"] == "/"
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    status, _, body = get(page, "/", Authorization="", Cookie=cookie.partition(";")[0])
    assert status == 200
    assert "<title>TransferQueue</title>" in body


@pytest.mark.parametrize("path", ["/", *FILES, "/events", "/row/rows/0", "/rollouts", "/no/such"])
def test_nothing_is_told_to_who_has_no_token_or_comes_by_another_name(page, path):
    status, headers, body = get(page, path, Authorization="Bearer wrong")
    assert (status, body) == (
        401,
        "open the link that was printed; it holds the token, which programs send as Authorization: Bearer TOKEN\n",
    )
    assert "default-src 'none'" in headers["content-security-policy"]
    assert get(page, path, Host="evil.example")[0] == 421
    assert get(page, path, Origin="http://evil.example")[0] == 403


def test_its_files_load_nothing_from_any_network(page):
    for path in ("/", *FILES):
        status, headers, body = get(page, path)
        assert status == 200
        assert "no-store" in headers["cache-control"]
        assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", body) == []
        assert "innerHTML" not in body
    assert get(page, "/elsewhere")[0] == 404


@pytest.mark.slow
def test_frames_show_the_newest_figures_of_each_channel_that_has_some(page, queue):
    channel = queue.weights("rows/figures/ranker")
    stream = Stream(page)
    for version, encoded in enumerate((b"no table", FIGURES, FIGURES.replace(b"0.25", b"0.75"))):
        channel.publish(version, {"value": np.frombuffer(encoded, np.uint8)})
        wanted = {} if version == 0 else {"rows/figures/ranker": json.loads(encoded)}
        while stream.event()[1]["figures"] != wanted:
            pass
    stream.close()


@pytest.mark.slow
def test_frames_show_tables_rates_ages_staleness_the_doctor_and_the_arena(page, queue):
    stream = Stream(page)
    kind, first = stream.event()
    assert kind == "frame"
    shown = first["frame"]["stats"]["tables"]["rows"]
    assert shown["staleness"] == {"0": 1}
    assert shown["tasks"]["train"]["done"] == 1
    assert shown["age_s"] > 0
    assert first["frame"]["stats"]["server"]["capacity_bytes"] == 64 << 20
    report = first["report"]
    assert any(one["task"] == "reward" for one in report["symptoms"]["tables"]["rows"])
    assert "no worker connected" in report["verdict"]["text"]
    assert [one["task"] for one in report["stages"]["rows"]] == ["", "train", "reward"]
    queue.table("rows").put(x=[4.0], policy_version=0)
    put = first["frame"]["stats"]["tables"]["rows"]["rows_put"] + 1
    while True:
        _, later = stream.event()
        if later["frame"]["stats"]["tables"]["rows"]["rows_put"] == put:
            break
    assert later["frame"]["rates"]["rows"]["put_s"] > 0
    stream.close()


def test_a_queue_without_a_folder_has_no_recorded_rows_to_show(page):
    status, _, body = get(page, "/rollouts")
    assert (status, json.loads(body)) == (200, {"live": True, "path": "", "tables": [], "damaged": []})
    assert get(page, "/rollouts/rows?table=rows")[0] == 404


def test_a_live_row_whose_columns_have_other_types_is_shown(page, queue):
    table = queue.create_table("odd", tasks=[tq.Task("score", needs=["x"])])
    calls = {"function": None}, "f", {"function": "f"}
    row = {"completion_ids": ["text"], "response_ids": [3], "reward_terms": [0.5], "loss_mask": [1.0], "x": [1.0]}
    data = {"prompt": [{"role": 1, "tool_calls": [*calls]}, {"tool_calls": {"function": {"name": 2}}}]}
    (number,) = table.put(**row, turn_rewards=[2.0], data=[data])
    status, _, body = get(page, f"/row/odd/{number}")
    shown = json.loads(body)
    assert (status, shown["life"]["state"], shown["content"]["why_not"]) == (200, "live", "")
    assert ["completion_ids", "text"] in shown["content"]["columns"]


def test_a_rows_life_and_a_row_that_is_none(page):
    status, _, body = get(page, "/row/rows/0")
    assert status == 200
    found = json.loads(body)
    me = f"pid {os.getpid()}"
    assert (found["put_by"], found["held_by"]) == (me, {"train": "", "reward": ""})
    assert found["content"]["columns"] == [["x", "1"]]
    assert (found["life"]["events"][0]["what"], found["done_by"][0]) == ("put", me)
    status, _, body = get(page, "/row/rows/999999")
    assert status in (400, 404)
    status, _, body = get(page, "/row/none/1")
    assert status == 404
    assert '"none"' in body


@pytest.mark.parametrize("name", AWKWARD)
def test_a_row_of_a_table_of_any_name_is_found(page, name):
    """As `page.js` asks, and as a person writes it."""
    for path in (quote(name, safe=""), quote(name)):
        status, _, body = get(page, f"/row/{path}/0")
        assert (status, json.loads(body)["life"]["table"]) == (200, name)


@pytest.mark.parametrize(
    "path", ["//evil.example/", "//evil.example", "/\\evil.example/", "/row//evil.example", "/events", "/none"]
)
def test_the_token_in_a_link_is_exchanged_at_the_root_alone_and_leads_nowhere_else(page, path):
    status, headers, _ = get(page, f"{path}?token={TOKEN}", Authorization="")
    assert status == 401
    assert "location" not in headers
    assert "set-cookie" not in headers
    for where in {path, f"{path}/"} - {"/events"}:
        _, headers, _ = get(page, where)
        assert "location" not in headers


def test_the_token_of_the_metrics_opens_nothing_but_them(page):
    bearer = {"Authorization": f"Bearer {METRICS_TOKEN}"}
    status, headers, body = get(page, "/metrics", **bearer)
    assert (status, "transferqueue_table_rows_put_total" in body) == (200, True)
    for path in ("/", "/events", "/row/rows/0", "/page.js", "/none"):
        assert get(page, path, **bearer)[0] == 403
    status, headers, _ = get(page, f"/?token={METRICS_TOKEN}", Authorization="")
    assert (status, headers.get("set-cookie")) == (403, None)


DIGITS = "1" * 5000
EXTREME = [
    *(
        DIGITS,
        f"-{DIGITS}",
        "-1",
        "+1",
        "1_0",
        "%201",
        "0x1",
        "1e3",
        "1.0",
        "",
        "%00",
        "%2F",
        "%2e%2e",
        "%",
        "%zz",
        "%ff%fe",
    ),
    *(quote(text) for text in ("٣", "²", "１", "\u202e1", "\x1b[31m1", "<b>1</b>", "1\r\nX: y", "{1}")),
    *(str(2**63), str(2**64), "9" * 19, "0" * 19),
]


@pytest.mark.slow
def test_whatever_a_path_asks_for_is_answered_or_refused_and_nothing_is_a_defect(queue, capfd):
    """Every route, with the values that break parsers in every place of its path, with and without a token."""
    paths = (
        [f"/row/rows/{one}" for one in EXTREME]
        + [f"/row/{one}/0" for one in EXTREME]
        + [f"/row/{one}" for one in EXTREME]
    )
    paths += [f"/{one}" for one in EXTREME] + ["/row/" + "a/" * 4000 + "0", "/%2F%2Fevil.example", "/row/rows/0/"]
    for route in ("/", "/row/rows/0", "/page.js", "/icon.svg", "/metrics"):
        paths += [
            f"{route}?{query}" for query in ("token", f"{'a=1&' * 3000}token=x", "%ff=%00", "=" * 9000, "token=%00")
        ]
    process, link = start_page(queue.address, "127.0.0.1:0", TOKEN)  # what it says in its log is captured too
    page = urlsplit(link)
    for path in paths:
        status, headers, body = get(page, path)
        assert status in (200, 400, 401, 404), (path[:80], status, body[:200])
        assert "default-src 'none'" in headers["content-security-policy"] or status == 400
        assert len(body) < 2000 or status == 200
        assert get(page, path, Authorization="Bearer wrong")[0] in (400, 401), path[:80]
    assert get(page, "/row/rows/" + "1" * 20_000)[0] == 400  # more than a head may have
    assert get(page, "/row/rows/0")[0] == 200
    process.stdin.close()
    assert process.wait(GENEROUS_S) == 0
    process.stdout.close()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW"])
def test_the_page_only_shows(page, method):
    for path in ("/", "/events", "/row/rows/0", "/metrics", "/page.js"):
        status, headers, _ = get(page, path, method=method)
        assert (status, headers["allow"]) == (405, "GET, HEAD")
    assert get(page, "/none", method=method)[0] == 404


@pytest.mark.slow
def test_no_more_streams_than_the_most(page):
    streams = [Stream(page) for _ in range(17)]
    assert sorted(one.answer.status for one in streams) == [200] * 16 + [503]
    for one in streams:
        one.close()
    deadline = time.monotonic() + GENEROUS_S
    while (again := Stream(page)).answer.status == 503:  # those that left are seen at their next event
        again.close()
        assert time.monotonic() < deadline
    assert again.event()[0] == "frame"
    again.close()


def test_a_place_that_is_taken_is_told(page, queue, capfd):
    with pytest.raises(UsageError, match="could not be started; its error is above"):
        start_page(queue.address, f"127.0.0.1:{page.port}", TOKEN)
    assert f"web address 127.0.0.1:{page.port} cannot be listened at" in capfd.readouterr().err


@pytest.mark.slow
def test_a_page_tells_when_its_server_is_gone_and_ends_with_it(tmp_path):
    (tmp_path / "run").mkdir(mode=0o700)
    queue = tq.connect(runtime=tmp_path / "run", arena_bytes="64MiB")
    process, link = start_page(queue.address, "127.0.0.1:0", TOKEN)
    stream = Stream(urlsplit(link))
    assert stream.event()[0] == "frame"
    queue.create_table("rows", tasks=[tq.Task("train", needs=["x"])]).put(x=[1.0, 2.0])
    queue.table("rows").lease("train", rows=2).ack()
    queue.table("rows").seal()
    while stream.event()[1]["report"]["verdict"]["state"] != "finished":
        pass
    queue.close()
    kind, told = stream.event()
    while kind == "frame":
        kind, told = stream.event()
    assert kind == "gone"
    assert told["verdict"]["text"] == "finished: 2 done, 0 dropped", "it keeps its summary"
    stream.close()
    late = Stream(urlsplit(link))
    assert [late.event()[0], late.event()[1]["verdict"]["state"]] == ["frame", "finished"], "also for a late viewer"
    late.close()
    process.stdin.close()
    assert process.wait(GENEROUS_S) == 0
    process.stdout.close()


@pytest.mark.slow
def test_serve_prints_the_link_and_takes_the_page_along(tmp_path):
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "transferqueue.cli",
            "serve",
            "--runtime",
            tmp_path / "run",
            "--web",
            "0",
            "--http",
            "0",
        ],
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout.readline().startswith("ready ipc://")
            link = urlsplit(server.stdout.readline().removeprefix("web ").strip())
            token = link.query.removeprefix("token=")
            assert len(token) >= 32
            service = urlsplit(server.stdout.readline().removeprefix("http ").strip())
            assert get(link, "/", Authorization=f"Bearer {token}")[0] == 200
            other = service.query.removeprefix("token=")
            assert get(service, "/", Authorization=f"Bearer {other}")[0] == 200
            for path in ("/", "/metrics"):  # each token opens its own door
                assert get(service, path, Authorization=f"Bearer {token}")[0] == 401
                assert get(link, path, Authorization=f"Bearer {other}")[0] == 401
        finally:
            server.kill()
    deadline = time.monotonic() + GENEROUS_S
    while time.monotonic() < deadline:
        try:
            get(link, "/")
        except (ConnectionError, http.client.HTTPException):
            return
    pytest.fail("the page outlived its server")


@pytest.mark.slow
def test_serve_refuses_a_page_that_others_could_reach(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-m", "transferqueue.cli", "serve", "--runtime", tmp_path / "run", "--web", "0.0.0.0:80"],
        capture_output=True,
        text=True,
        timeout=GENEROUS_S,
        check=False,
    )
    assert ran.returncode == 2
    assert "the page is not encrypted" in ran.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["draw.js", "row.js", "rollouts.js", "page.js"])
@pytest.mark.skipif(shutil.which("node") is None, reason="node checks the grammar")
def test_the_script_is_one(tmp_path, name):
    script = tmp_path / name
    script.write_bytes(files("transferqueue.web.page").joinpath(name).read_bytes())
    subprocess.run(["node", "--check", script], check=True, timeout=GENEROUS_S)
