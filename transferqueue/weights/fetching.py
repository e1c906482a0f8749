"""The source's side of a relay: the next parts or version of a channel, and their tensors. Two parts are on the link at
a time: with one, the link would be idle for a round trip after each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final

from transferqueue.client.client import ClientSession
from transferqueue.client.operations import arguments as checks
from transferqueue.client.operations.weight_parts import SharedTensor, fetch_tensors, release_all
from transferqueue.client.session.operation_runner import Operation, request_reply, run_sync
from transferqueue.client.sync.weight_channel import WeightChannel
from transferqueue.errors import VersionGivenUp
from transferqueue.wire import messages as m

AT_ONCE: Final = 2
Fetched = dict[str, SharedTensor]
Fetch = Callable[[list[m.BlockLocation]], Operation[Fetched]]


class Source:
    """A channel of the queue that a relay takes versions from. `next` continues after the parts that it gave before."""

    def __init__(self, channel: WeightChannel) -> None:
        self._channel, self._client = channel, channel._client
        self._number = self._have = 0

    def next(self, above: int, wait_s: float, refused: int = 0) -> m.WeightsReply:
        """Wait for the newest version above `above`, or for parts of it. `VersionGivenUp` if the source gave up the
        version of the last parts. `refused`: differences that gave another result than they promised."""
        try:
            reply = run_sync(self._client.connection, self._next(above, wait_s, refused))
        except VersionGivenUp:
            self.begin_again()
            raise
        self._number, self._have = reply.pending, reply.have
        return reply

    def _next(self, above: int, wait_s: float, refused: int) -> Operation[m.WeightsReply]:
        deadline = yield from checks.within(wait_s)
        request = m.Pull(
            channel=self._channel.name,
            above=above,
            wait_s=deadline.wait_s,
            parts=True,
            pending=self._number,
            have=self._have,
            refused=refused,
        )
        return (yield from request_reply(request, m.WeightsReply))

    def begin_again(self) -> None:
        """Have `next` give all parts again."""
        self._number = self._have = 0

    def fetch(self, reply: m.WeightsReply, parts: Sequence[list[m.BlockLocation]]) -> Generator[Fetched]:
        """The tensors of each part, which is a list of blocks of the reply, in order. All other pins of the reply
        return at once, and these when their blocks are received. Close the iterator."""
        wanted = {block.block for part in parts for block in part}
        self._client.connection.unpin([block.block for block in reply.blocks if block.block not in wanted])
        fields = {field.name: field for field in reply.fields}
        subject = f'version {reply.version} of channel "{self._channel.name}"'
        return _fetched(self._client, parts, lambda blocks: fetch_tensors(self._client, blocks, fields, subject))

    def applied(self, version: int) -> None:
        """See `WeightChannel.applied`."""
        self._channel.applied(version)


def _fetched(client: ClientSession, parts: Sequence[list[m.BlockLocation]], fetch: Fetch) -> Generator[Fetched]:
    left, running = deque(parts), deque[Future[Fetched]]()
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="weight relay") as pool:

        def start() -> None:
            while left and len(running) < AT_ONCE:
                running.append(pool.submit(partial(run_sync, client.connection, fetch(left.popleft()))))

        try:
            start()
            while running:
                tensors = running.popleft().result()
                start()
                yield tensors
        finally:
            client.connection.unpin([block.block for part in left for block in part])
            for fetched in running:
                fetched.add_done_callback(_drop)


def _drop(fetched: Future[Fetched]) -> None:
    """Release fetched tensors that no caller takes."""
    if fetched.exception() is None:
        release_all(fetched.result(), "the relay that fetched it has stopped")
