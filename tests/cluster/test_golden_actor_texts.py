"""What an actor of a deployment on Ray is told and answers has the bytes that were recorded: a client of another build
reads them."""

import pytest

from transferqueue.cluster.on_ray.messages import (
    DEPLOY_SPEC,
    REPLY,
    SHARD_SPEC,
    DeploymentName,
    DeployRefused,
    DeploySpec,
    Endpoints,
    ShardSpec,
    read,
    write,
)
from transferqueue.wire.home_coordinator import CoordinatorIndex

EXAMPLES = [
    (
        DeploySpec(DeploymentName("jobs", "grpo"), "id", "disk", "/s", 4096, 7071, "/t", CoordinatorIndex(2, 3, "d")),
        DEPLOY_SPEC,
        '{"named":{"namespace":"jobs","name":"grpo"},"id":"id","durability":"disk","state":"/s","arena_bytes":4096,"port":7071,"snapshots":"/t","seat":[2,3,"d"]}',
    ),
    (
        DeploySpec(DeploymentName(), "id", "memory", "", 0, 0, "", spill_dir="/disk", spill_bytes=4096),
        DEPLOY_SPEC,
        '{"named":{"namespace":"transferqueue","name":"default"},"id":"id","durability":"memory","state":"","arena_bytes":0,"port":0,"snapshots":"","spill_dir":"/disk","spill_bytes":4096}',
    ),
    (
        Endpoints("host", "ipc:///run/q.sock", "token", 3),
        REPLY,
        '{"type":"Ways","host":"host","ipc":"ipc:///run/q.sock","token":"token","seats":3}',
    ),
    (DeployRefused("Unreachable", "no server"), REPLY, '{"type":"Refused","error":"Unreachable","text":"no server"}'),
    (
        ShardSpec(DeploymentName("jobs", "grpo"), 4096, "shard"),
        SHARD_SPEC,
        '{"named":{"namespace":"jobs","name":"grpo"},"arena_bytes":4096,"label":"shard"}',
    ),
]


@pytest.mark.parametrize(("value", "decoder", "text"), EXAMPLES)
def test_texts_are_as_they_were_recorded(value, decoder, text):
    assert write(value) == text
    assert read(text, decoder) == value
