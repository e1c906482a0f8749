"""Generation at another site: weights cross the link once, however many generate there (StreamRL, arXiv 2504.15930, section 6).

The law:

1. The trainer publishes into its own channel and knows of no site: one sender.
2. A site has a server of its own, and one *receiver*: it pulls each version over the link, of which only tensors that changed
   cross, and publishes it in the site's channel under the same number. All generators of the site pull from there.
3. A receiver that falls behind takes the newest version next; versions between are not carried. One that was started again
   goes on from what the site has.
4. `publish` never waits for a site. The receiver's `applied`, at the sender, says what a site has, and how late.

``python -m transferqueue.workflows.two_sites --sender tcp://HOST:PORT --site ipc://… --channel policy`` is a receiver.
Prompts and samples are small; generators of the site lease and put them at the trainer's server (`serve(weights=site)`).
"""

from __future__ import annotations

import argparse
import sys
import threading
from types import TracebackType
from typing import Final, Self

import transferqueue as tq
from transferqueue.errors import TransferQueueError
from transferqueue.workflows.stage import STALL_S

TRANSFER_S: Final = 60.0
"""A version has crossed by then: StreamRL reports under 10 s for 72B parameters over 80 Gb/s."""


class SiteReceiver:
    """Carries the versions of one channel from `sender` to `site`, one thread at a time; both queues are the caller's to close."""

    def __init__(self, sender: tq.Queue, site: tq.Queue, channel: str, *, keep: int = 2) -> None:
        self._source = sender.weights(channel)
        self._local = site.weights(channel, keep)
        known = site.stats()["channels"].get(channel)
        self.version: int = -1 if known is None else known["newest"]
        self._held: tq.Weights | None = None

    def receive(self, *, wait_s: float = STALL_S, timeout_s: float = TRANSFER_S) -> int:
        """Carry the newest version above `version`, and return it.

        Waits up to `wait_s` for one to be published, and up to `timeout_s` for it to be published at the site: `DeadlineExceeded`
        then. What fails is carried by the next call; the site has a version whole, or not.
        """
        weights = self._source.pull(self.version, since=self._held, timeout_s=wait_s)
        try:
            self._local.mirror(weights, timeout_s=timeout_s)
        except BaseException:
            weights.release()
            raise
        self.close()
        self._held, self.version = weights, weights.version
        self._source.applied(self.version)
        return self.version

    def run(
        self, *, stop: threading.Event | None = None, wait_s: float = STALL_S, timeout_s: float = TRANSFER_S
    ) -> int:
        """`receive` until `stop` is set between two versions; return how many were carried."""
        carried = 0
        while not (stop and stop.is_set()):
            self.receive(wait_s=wait_s, timeout_s=timeout_s)
            carried += 1
        return carried

    def close(self) -> None:
        """Let go of the version that is held to be compared with. Again: nothing."""
        if self._held is not None:
            self._held.release()
            self._held = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def main(arguments: list[str] | None = None) -> int:
    """Be a receiver until a queue is gone, or no version comes for so long; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m transferqueue.workflows.two_sites", description=__doc__)
    parser.add_argument("--sender", required=True, help="address or join token of the trainer's server")
    parser.add_argument("--site", required=True, help="address of this site's server")
    parser.add_argument("--channel", required=True)
    parser.add_argument("--wait-s", type=float, default=STALL_S, help="longest wait for a new version")
    given = parser.parse_args(arguments)
    # Where both servers are on one machine, bytes still take the way that they will take between sites.
    over_the_network = given.sender.startswith("tcp://")
    try:
        with (
            tq.connect(given.sender, label="site receiver", data="remote" if over_the_network else "auto") as sender,
            tq.connect(given.site, label="site receiver") as site,
            SiteReceiver(sender, site, given.channel) as receiver,
        ):
            receiver.run(wait_s=given.wait_s)
    except TransferQueueError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
