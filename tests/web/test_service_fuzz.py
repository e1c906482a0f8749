"""Whatever is asked of the HTTP service, it answers as documented, and no row is lost."""

import datetime as dt
import json
import random
from collections import Counter
from urllib.parse import urlsplit

import msgspec
import pytest

import transferqueue as tq
from tests.web.service_client import GENEROUS_S, TOKEN, Asking
from transferqueue.web.service.actions import ACTIONS
from transferqueue.web.service.schemas import Experience, FactsBody
from transferqueue.web.subprocesses import start_page

STAGES = [{"name": "rollout", "needs": ["prompt"], "gives": ["ids"]}, {"name": "train", "needs": ["ids"]}]
REQUESTS = 600
NAMES = ["prompt", "ids", "x", "key", "tags", "group_id", "priority", "\0", ""]
WEIRD = [
    *(None, True, -1, 0, 1, 2**63, 2**64 - 1, 1e308, 0.5, "", "a", "\0", "x" * 5000, [], [[]], {}, {"a": 1}, b"\xff"),
    *("experience", "rollout", [1, "a"], [1.5, 2], [[1], ["a"]], [True, 2], [float("nan")], [None], [1, [2, ["x"]]]),
    msgspec.msgpack.Ext(5, b"ab"),
    dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
    {"dtype": "int32", "data": b"1234"},
    {"dtype": "float32", "shape": [None, None], "sizes": [1, 1], "data": b"1234"},
    {"dtype": "value", "sizes": [1], "data": b"\xd4"},
    {"dtype": "bool", "shape": [None, None], "sizes": [0, 2**62], "data": b""},
]


WEIGHTS = {"put_prompts_data": 6, "get_experience_data": 4, "put_experience_data": 4, "weight_sync_notify": 2}


def value(rng, depth=0):
    kind = rng.random() if depth < 3 else 0.0
    if kind < 0.6:
        return rng.choice(WEIRD)
    if kind < 0.8:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(NAMES): value(rng, depth + 1) for _ in range(rng.randrange(4))}


def right(action, lease, number):
    """A body that may well be right."""
    return {
        "init_engines": {"stages": STAGES, "table": f"t{number % 20}"},
        "release_experience": {"lease": lease},
        "renew_experience": {"lease": lease},
        "put_prompts_data": {"columns": {"prompt": ["a", "b"]}},
        "get_experience_data": {"experience_consumer_stage": "rollout", "experience_count": 1},
        "put_experience_data": {"lease": lease, "columns": {"ids": [[1]]}},
        "weight_sync_notify": {"version": number},
        "update": {"weights": {}},
        "generate": {"prompts": [{"ids": [1, 2]}]},
        "seal": {"table": f"t{number % 20}"},
    }.get(action.name, {})


def asked(rng, action, lease, number):
    """The right body, with some members replaced, and no wait."""
    body = right(action, lease, number)
    for name in rng.sample(action.takes.__struct_fields__, k=rng.randrange(3) % len(action.takes.__struct_fields__)):
        columns = name in ("columns", "facts") and rng.random() < 0.7
        body[name] = {rng.choice(NAMES): value(rng) for _ in range(2)} if columns else value(rng)
    if "timeout_s" in action.takes.__struct_fields__:
        body["timeout_s"] = 0
    if action.name == "seal":
        body["table"] = f"t{number % 20}"
    return body


@pytest.mark.slow
def test_nothing_that_is_asked_is_a_defect(tmp_path):
    tmp_path.chmod(0o700)
    rng, lease, seen = random.Random(5), "", Counter()
    with tq.connect(runtime=tmp_path, arena_bytes="64MiB") as queue:
        process, link = start_page(queue.address, "127.0.0.1:0", TOKEN, "service")
        service = Asking(urlsplit(link).hostname, urlsplit(link).port)
        service.call("init_engines", stages=STAGES)
        for number in range(REQUESTS):
            action = rng.choices(ACTIONS, weights=[WEIGHTS.get(action.name, 1) for action in ACTIONS])[0]
            body = msgspec.msgpack.encode(asked(rng, action, lease, number))
            answer = service.request("POST", f"/action/{action.name}", body, **{"Content-Type": "application/msgpack"})
            assert answer.status in (200, 400, 404, 409, 410, 504), (number, action.name, body, answer.body)
            assert answer.status == 200 or set(answer.msgpack) == {"error", "text"}
            lease = answer.msgpack["lease"] if action.gives is Experience and answer.status == 200 else lease
            seen[answer.status] += 1
        assert min(seen[200], seen[400]) > REQUESTS // 5
        assert queue.audit().balanced
        process.stdin.close()
        assert process.wait(GENEROUS_S) == 0
        process.stdout.close()


NUMBERS = [
    "1" * 5000,
    "-" + "1" * 5000,
    "1e999",
    "-0",
    str(2**62),
    str(2**63),
    str(-(2**63) - 1),
    "[" * 900 + "]" * 900,
]
PATHS = [
    "/action/" + "1" * 5000,
    "/action/%00",
    "/action//seal",
    "/action/seal/",
    "//evil.example/",
    "/%2e%2e/%zz",
    "/metrics/x",
]


@pytest.mark.slow
def test_numbers_beyond_every_bound_and_paths_that_are_none_are_refused_without_a_word_in_the_log(tmp_path, capfd):
    """Each member of each body in turn, and members of facts: what JSON can say and no number holds."""
    tmp_path.chmod(0o700)
    with tq.connect(runtime=tmp_path, arena_bytes="64MiB") as queue:
        process, link = start_page(queue.address, "127.0.0.1:0", TOKEN, "service")
        service = Asking(urlsplit(link).hostname, urlsplit(link).port)
        service.call("init_engines", stages=STAGES)
        for action in ACTIONS:
            facts = [f"facts.{name}" for name in FactsBody.__struct_fields__] * (
                "facts" in action.takes.__struct_fields__
            )
            for member in (*action.takes.__struct_fields__, *facts):
                for number in NUMBERS:
                    at = ["facts", member.removeprefix("facts.")] if member.startswith("facts.") else [member]
                    body = right(action, "none", 1) | (
                        {"timeout_s": 0} if "timeout_s" in action.takes.__struct_fields__ else {}
                    )
                    body |= {"table": "experience"} if "table" in action.takes.__struct_fields__ else {}
                    body[at[0]] = {at[1]: "NUMBER"} if len(at) > 1 else "NUMBER"
                    text = json.dumps(body).replace('"NUMBER"', number)
                    answer = service.request(
                        "POST", f"/action/{action.name}", text, **{"Content-Type": "application/json"}
                    )
                    assert answer.status in (200, 400, 404, 409, 410, 504), (
                        action.name,
                        member,
                        number[:20],
                        answer.body,
                    )
        for path in PATHS:
            for method in ("GET", "POST", "DELETE"):
                answer = service.request(method, path)
                assert (answer.status, answer.json["error"]) == (404, "NotFound"), (method, path)
                assert "location" not in answer.headers
        assert service.request("POST", "/action/seal", **{"Content-Length": "1" * 5000}).status == 400
        process.stdin.close()
        assert process.wait(GENEROUS_S) == 0
        process.stdout.close()
    assert capfd.readouterr().err == ""
