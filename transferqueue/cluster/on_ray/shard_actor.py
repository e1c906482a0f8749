"""The actor of a shard: it offers memory of its node to a deployment.

The actor runs as long as its shard. When the shard's session ends because it was cut off too long, the actor ends its
process. Ray restarts the actor, and it joins as a new shard with new memory. An actor whose shard was drained stays
idle until the deployment ends; if it exited, Ray would restart it.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Final

from transferqueue.cluster.on_ray.lookup import DEPLOY_S, address_from_here, ask_endpoints, find_actor, join_ray
from transferqueue.cluster.on_ray.messages import SHARD_SPEC, DeployRefused, Endpoints, ShardSpec, read, write
from transferqueue.cluster.shard import ShardProcess
from transferqueue.errors import TransferQueueError
from transferqueue.server.process.supervisor import EXIT_AGAIN
from transferqueue.transport.system.threads import STOP_S, still_runs

_log: Final = logging.getLogger("transferqueue.cluster")


class ShardActorBase:
    """A shard in a process that Ray starts. Methods return text, see `messages`."""

    def __init__(self, spec: ShardSpec, endpoints: Endpoints, host: str) -> None:
        """Start the shard. `endpoints` are the coordinator's, with keys of role shard. `host` is this node's address as
        other machines see it."""
        self._refused: TransferQueueError | None = None
        address, keys = address_from_here(endpoints)
        try:
            self._shard = ShardProcess(
                address, arena_bytes=spec.arena_bytes or None, host=host, keys=keys, label=spec.label
            )
        except TransferQueueError as error:
            self._refused = error
            return
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="transferqueue shard", daemon=True)
        self._thread.start()

    def joined(self) -> str:
        """The address of its bulk endpoint, or a `DeployRefused`."""
        if self._refused is not None:
            return write(DeployRefused(type(self._refused).__name__, str(self._refused)))
        return self._shard.endpoint

    def stop(self) -> None:
        """End the shard; the bytes in it are lost. Returns when its thread has ended, or has stood still too long."""
        if self._refused is None:
            self._closing = True
            self._shard.close()
            if where := still_runs(self._thread):
                _log.error("the shard did not end within %g s; its thread is at %s", STOP_S, where)

    def _run(self) -> None:
        try:
            self._shard.run()
            self._shard.close()  # drained
        except TransferQueueError:
            if not self._closing:
                _log.exception("a shard was cut off; its actor ends, and Ray starts it again")
                logging.shutdown()
                os._exit(EXIT_AGAIN)


class ShardActor(ShardActorBase):
    """`ShardActorBase` with what a Ray process knows about itself."""

    def __init__(self, spec_text: str) -> None:
        """Start the shard of `spec_text`, a `ShardSpec`. Each start asks the deployment for its endpoints, so that Ray
        stores no keys as an argument."""
        import ray

        spec = read(spec_text, SHARD_SPEC)
        endpoints = ask_endpoints(spec.named, find_actor(join_ray(start=False), spec.named), DEPLOY_S, "shard")
        super().__init__(spec, endpoints, ray.util.get_node_ip_address())
