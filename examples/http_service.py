"""A rollout engine, a reward function and a trainer that share a queue over HTTP and import nothing but the standard
library.

    transferqueue serve --http 8788 --tokens tokens
    python examples/http_service.py http://127.0.0.1:8788 tokens/service

Shows: the write service (`put_prompts_data`, `get_experience_data`, `put_experience_data`, `weight_sync_notify`),
leases over HTTP, pacing, and errors that are told as JSON. The service listens on this machine alone.

Engine, reward function and trainer are threads here, and would be processes of their own. They speak JSON. For large
rows ask for packed columns: see `Packed` at http://127.0.0.1:8788/.
"""

import json
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

PROMPTS, SAMPLES, BATCH, STEPS = 8, 4, 16, 4


class Ended(Exception):
    """The table is sealed and drained."""


class Service:
    """The calls of the service as a function."""

    def __init__(self, url, token):
        self.url, self.token = url.rstrip("/"), token

    def __call__(self, action, **body):
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        url = f"{self.url}/action/{action}"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=90) as answer:  # noqa: S310  (the caller's own service)
                return json.load(answer)
        except urllib.error.HTTPError as refusal:
            if "json" not in refusal.headers["Content-Type"]:  # refused before the call: a wrong token or host
                raise RuntimeError(f"{action}: {refusal.code}: {refusal.read().decode().strip()}") from refusal
            said = json.load(refusal)
            if said["error"] == "EndOfTable":
                raise Ended from refusal
            raise RuntimeError(f"{action}: {said['error']}: {said['text']}") from refusal


def declare(call):
    stages = [
        {"name": "rollout", "needs": ["prompt"], "gives": ["response_ids"], "lease_s": 30},
        {"name": "reward", "needs": ["response_ids"], "gives": ["reward"]},
        {"name": "train", "needs": ["response_ids", "reward"], "groups": {"incomplete": "drop"}},
    ]
    columns = [
        {"name": "prompt", "dtype": "str"},
        {"name": "response_ids", "dtype": "int32", "shape": [None]},
        {"name": "reward", "dtype": "float32"},
    ]
    pace = {"stage": "train", "batch_rows": BATCH, "depth": 1, "max_staleness": 1}
    call("init_engines", stages=stages, columns=columns, pace=pace)


def prompts(call):
    """Puts as fast as the pace admits: the call waits for room."""
    for step in range(STEPS * BATCH // (PROMPTS // 2 * SAMPLES)):
        call(
            "put_prompts_data",
            columns={"prompt": [f"count to {step + n}" for n in range(PROMPTS // 2)]},
            samples=SAMPLES,
        )
    call("seal")


def rollout(call):
    """An engine: it looks for new weights, then generates. A row it does not give back in time goes to another."""
    version = call("get_weights", timeout_s=60)["version"]
    while True:
        try:
            got = call(
                "get_experience_data",
                experience_consumer_stage="rollout",
                experience_count=SAMPLES,
                at_least=1,
                timeout_s=60,
            )
        except Ended:
            return
        responses = [list(range(int(prompt.split()[-1]))) for prompt in got["columns"]["prompt"]]
        facts = {"policy_version": version}
        call("put_experience_data", lease=got["lease"], columns={"response_ids": responses}, facts=facts)
        version = call("get_weights", above=-1)["version"]


def reward(call):
    while True:
        try:
            got = call(
                "get_experience_data",
                experience_consumer_stage="reward",
                experience_count=BATCH,
                at_least=1,
                timeout_s=60,
            )
        except Ended:
            return
        rewards = [float(len(ids) % 2 == 0) for ids in got["columns"]["response_ids"]]
        call("put_experience_data", lease=got["lease"], columns={"reward": rewards})


def train(call):
    """Publishes before it gives rows back, so that what their room admits is generated with the new weights."""
    call("weight_sync_notify", version=0, notice={"path": "checkpoints/0"})
    for step in range(1, STEPS + 1):
        got = call("get_experience_data", experience_consumer_stage="train", groups=BATCH // SAMPLES, timeout_s=60)
        mean = sum(got["columns"]["reward"]) / len(got["rows"])
        call("weight_sync_notify", version=step, notice={"path": f"checkpoints/{step}"})
        call("put_experience_data", lease=got["lease"])
        print(f"step {step}: {len(got['rows'])} rows, mean reward {mean:.2f}", flush=True)


def main(url, token_file):
    call = Service(url, Path(token_file).read_text().strip())
    declare(call)
    failures = []

    def run(work):
        try:
            work(call)
        except Exception as error:  # noqa: BLE001  (told below)
            failures.append(f"{work.__name__}: {error}")

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in (prompts, rollout, reward, train)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = call("status")["stats"]
    print(f"rows put {stats['rows_put']}, done {stats['rows_done']}, dropped {stats['rows_dropped']}")
    return "\n".join(failures) or None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
