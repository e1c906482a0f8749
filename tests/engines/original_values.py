"""What the original, TransferQueue 0.1.11, gives back of each kind of value. A program: run with ``transfer_queue`` of
its wheel; prints a JSON object by kind: "same", or the type that came back."""

from __future__ import annotations

import json

import ray
import transfer_queue

from tests.storage.values_of_stacks import kinds, same


def outcome(kind: str) -> str:
    """What comes back of a value inside a dict, as stacks put it."""
    given = kinds()[kind]()
    try:
        transfer_queue.kv_put("a", kind, {"x": {"value": given}})
        found = transfer_queue.kv_batch_get(["a"], kind).get("x").tolist()[0]["value"]
    except Exception as error:
        return f"refused: {type(error).__name__}"
    return "same" if same(given, found) else type(found).__name__


def main() -> None:
    """Compare, and print."""
    ray.init(address="local", num_cpus=4, include_dashboard=False)
    transfer_queue.init()
    outcomes = {kind: outcome(kind) for kind in kinds()}
    transfer_queue.close()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
