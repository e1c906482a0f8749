"""The actor of a shard: it lends its node's memory to a deployment.

The law: the actor lasts as long as it lends. One whose session ends, since it was cut off for long, takes its process with it, and Ray
starts it again: then it joins as another shard, with memory of its own. One that was drained stays, idle, until the deployment
ends: so that Ray does not take its end for an accident.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Final

from transferqueue.cluster.on_ray.messages import LEND, DeployRefused, Endpoints, ShardSpec, read, write
from transferqueue.cluster.shard import ShardProcess
from transferqueue.errors import TransferQueueError
from transferqueue.server.process.supervisor import EXIT_AGAIN
from transferqueue.transport import this_host
from transferqueue.transport.security.keys import ClientKeys, read_token

_log: Final = logging.getLogger("transferqueue.cluster")


class ShardActorBase:
    """A shard in a process that Ray starts. Methods give text, see `names`."""

    def __init__(self, lend: ShardSpec, ways: Endpoints, host: str) -> None:
        """ways: to the server, for role shard. host: this node as others see it."""
        self._refused: TransferQueueError | None = None
        address, keys = way_of(ways)
        try:
            self._shard = ShardProcess(
                address, arena_bytes=lend.arena_bytes or None, host=host, keys=keys, label=lend.label
            )
        except TransferQueueError as error:
            self._refused = error
            return
        self._closing = False
        self._thread = threading.Thread(target=self._lend, name="transferqueue shard", daemon=True)
        self._thread.start()

    def joined(self) -> str:
        """Where its bytes are reached, or `DeployRefused`."""
        if self._refused is not None:
            return write(DeployRefused(type(self._refused).__name__, str(self._refused)))
        return self._shard.endpoint

    def stop(self) -> None:
        """Lend no more; what lies here is lost."""
        if self._refused is None:
            self._closing = True
            self._shard.close()
            self._thread.join()

    def _lend(self) -> None:
        try:
            self._shard.run()
            self._shard.close()  # drained
        except TransferQueueError:
            if not self._closing:
                _log.exception("a shard was cut off; its actor ends, and Ray starts it again")
                logging.shutdown()
                os._exit(EXIT_AGAIN)


class ShardActor(ShardActorBase):
    """`ShardActorBase`, told what a process of Ray knows by itself."""

    def __init__(self, told: str) -> None:
        """told: a `ShardSpec`. The deployment is asked for the way in each life: keys are in no argument that Ray keeps."""
        import ray

        from transferqueue.cluster.on_ray.deploy import ways_of

        lend = read(told, LEND)
        super().__init__(lend, ways_of(lend.named, "shard"), ray.util.get_node_ip_address())


def way_of(ways: Endpoints) -> tuple[str, ClientKeys | None]:
    """The server's socket, if it can be opened from here, else its tcp address with the keys of the token."""
    if ways.host == this_host() and os.access(ways.ipc.removeprefix("ipc://"), os.R_OK | os.W_OK):
        return ways.ipc, None
    token = read_token(ways.token)
    return token.address, token.keys
