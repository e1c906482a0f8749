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
from urllib.parse import urlsplit

import pytest

import transferqueue as tq
from transferqueue.errors import UsageError
from transferqueue.web.beside import start_page

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

GENEROUS_S = 60
TOKEN = "token-of-the-test"  # noqa: S105


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
        yield queue


@pytest.fixture(scope="module")
def page(queue):
    process, link = start_page(queue.address, "127.0.0.1:0", TOKEN)
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


@pytest.mark.parametrize(
    "path", ["/", "/icon.svg", "/draw.js", "/page.js", "/page.css", "/events", "/row/rows/0", "/no/such"]
)
def test_nothing_is_told_to_who_has_no_token_or_comes_by_another_name(page, path):
    status, headers, body = get(page, path, Authorization="Bearer wrong")
    assert (status, body) == (
        401,
        "open the link that serve printed; it holds the token, which programs send as Authorization: Bearer TOKEN\n",
    )
    assert "default-src 'none'" in headers["content-security-policy"]
    assert get(page, path, Host="evil.example")[0] == 421
    assert get(page, path, Origin="http://evil.example")[0] == 403
    assert get(page, path, method="POST")[0] == 405


def test_its_files_load_nothing_from_any_network(page):
    for path in ("/", "/icon.svg", "/draw.js", "/page.js", "/page.css"):
        status, headers, body = get(page, path)
        assert status == 200
        assert "no-store" in headers["cache-control"]
        assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", body) == []
        assert "innerHTML" not in body
    assert get(page, "/elsewhere")[0] == 404


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
    assert any(one["task"] == "reward" for one in first["doctor"]["tables"]["rows"])
    queue.table("rows").put(x=[4.0], policy_version=0)
    put = first["frame"]["stats"]["tables"]["rows"]["rows_put"] + 1
    while True:
        _, later = stream.event()
        if later["frame"]["stats"]["tables"]["rows"]["rows_put"] == put:
            break
    assert later["frame"]["rates"]["rows"]["put_s"] > 0
    stream.close()


def test_a_rows_life_and_a_row_that_is_none(page):
    status, _, body = get(page, "/row/rows/0")
    assert status == 200
    found = json.loads(body)
    me = f"pid {os.getpid()}"
    assert (found["put_by"], found["held_by"]) == (me, {"train": "", "reward": ""})
    assert (found["life"]["events"][0]["what"], found["done_by"][0]) == ("put", me)
    status, _, body = get(page, "/row/rows/999999")
    assert status in (400, 404)
    status, _, body = get(page, "/row/none/1")
    assert status == 404
    assert '"none"' in body


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
    with pytest.raises(UsageError, match="could not be started; it said why above"):
        start_page(queue.address, f"127.0.0.1:{page.port}", TOKEN)
    assert f"web address 127.0.0.1:{page.port} cannot be listened at" in capfd.readouterr().err


@pytest.mark.slow
def test_a_page_tells_when_its_server_is_gone_and_ends_with_it(tmp_path):
    (tmp_path / "run").mkdir(mode=0o700)
    queue = tq.connect(runtime=tmp_path / "run", arena_bytes="64MiB")
    process, link = start_page(queue.address, "127.0.0.1:0", TOKEN)
    stream = Stream(urlsplit(link))
    assert stream.event()[0] == "frame"
    queue.close()
    kinds = [stream.event()[0]]
    while kinds[-1] == "frame":
        kinds.append(stream.event()[0])
    assert kinds[-1] == "gone"
    stream.close()
    process.stdin.close()
    assert process.wait(GENEROUS_S) == 0
    process.stdout.close()


@pytest.mark.slow
def test_serve_prints_the_link_and_takes_the_page_along(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-m", "transferqueue.cli", "serve", "--runtime", tmp_path / "run", "--web", "0"],
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout.readline().startswith("ready ipc://")
        link = urlsplit(server.stdout.readline().removeprefix("web ").strip())
        token = link.query.removeprefix("token=")
        assert len(token) >= 32
        assert get(link, "/", Authorization=f"Bearer {token}")[0] == 200
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


@pytest.mark.parametrize("name", ["draw.js", "page.js"])
@pytest.mark.skipif(shutil.which("node") is None, reason="node checks the grammar")
def test_the_script_is_one(tmp_path, name):
    script = tmp_path / name
    script.write_bytes(files("transferqueue.web").joinpath(name).read_bytes())
    subprocess.run(["node", "--check", script], check=True, timeout=GENEROUS_S)
