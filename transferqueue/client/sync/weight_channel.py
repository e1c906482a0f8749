# Written by `python -m tests.sync_api` from client/aio/weight_channel.py: change it there.
"""A weight channel, used from threads: versioned publication of model weights to the processes that generate."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from transferqueue.client.handles.weight_channel import WeightChannelBase
from transferqueue.client.operations.publish import begin_version, publish_weights
from transferqueue.client.operations.pull import (
    BEGUN_S,
    TURN_S,
    Weights,
    acquire_update_slot,
    pull_weights,
    release_update_slot,
    report_applied,
)
from transferqueue.client.operations.tensor_parts import Only
from transferqueue.client.session.operation_runner import Operation, T, run_sync


class WeightChannel(WeightChannelBase):
    """A channel on which versions of weights are published and pulled. Made by `Queue.weights`.

    Any process may publish or pull. Every method may be called from any thread.

    Example:
        >>> import numpy as np
        >>> import transferqueue as tq
        >>> with tq.connect("embedded") as queue:
        ...     channel = queue.weights("policy")
        ...     written = channel.publish(1, {"embed": np.zeros((4, 8), np.float32)})
        ...     weights = channel.pull(timeout_s=10)
        ...     channel.applied(weights.version)
        >>> channel.name, weights.version
        ('policy', 1)
    """

    def publish(
        self,
        version: int,
        tensors: Mapping[str, Any],
        *,
        adapter: str | None = None,
        pending: int = 0,
        part: int = 0,
        timeout_s: float | None = None,
    ) -> int:
        """Publish tensors as one version, in one commit. Tables whose pacing names this channel advance their clock.

        A tensor that is as in the newest version is not written: its bytes are part of both, unless less than half of
        the memory that it shares with others would be kept. Of a tensor that this session published before, and of
        which few elements changed, only the difference is written (`Queue.weights`: ``deltas``). All others are
        written once, into shared memory, from wherever they are. The oldest versions beyond `keep` end; a reader that
        still views one keeps it. Waits, up to `timeout_s`, for memory, and while a table with `HoldClock` holds its
        clock.

        With `pending` and `part` it publishes one part of a version that `begin` began. Parts 1 and above return when
        they are written. Part 0, of the session that began the version, waits up to `timeout_s` for the others, and all
        become visible in one commit. If it raises, the version is given up.

        Args:
            version: a number above all versions of the channel, such as the trainer's step.
            tensors: torch tensors or numpy arrays of numbers, by name. A tensor may be a `WeightSlice`, if all its rows
                are in the version.
            adapter: name of the adapter (such as a LoRA) that the tensors are of; the version is the newest one with
                that adapter replaced or added. Default None: they are the whole base.
            pending: the number that `begin` returned; default 0: the version is not in parts.
            part: index of this part; default 0.
            timeout_s: seconds to wait; default None: no limit.

        Returns:
            The number of bytes written.

        Raises:
            AlreadyExists: the version, or this part of it, is published.
            DeadlineExceeded: memory, the other parts or the clocks of tables did not come in time.
            NotFound: an adapter without a base, or an unknown `pending`.
            SchemaError: a tensor that cannot be published, or slices that do not make up their tensor.
            ShardLost: the base of the adapter is lost: publish it again.
            UsageError: a version below the newest, or arguments that do not fit each other.
            VersionGivenUp: the version of `pending` was given up.

        Example:
            >>> import numpy as np
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     channel = queue.weights("policy")
            ...     written = channel.publish(1, {"embed": np.zeros((4, 8), np.float32)})
            >>> written
            128
        """
        operation = publish_weights(
            self._client, self._name, self._kept, version, tensors, adapter, timeout_s, pending, part
        )
        return self._run(operation)

    def pull(
        self,
        above: int = -1,
        *,
        version: int | None = None,
        since: Weights | None = None,
        only: Only | None = None,
        timeout_s: float | None = None,
    ) -> Weights:
        """Get the newest version of the weights, or an exact one, waiting up to `timeout_s` for it.

        Checksums of the tensors that are new here are compared. Where bytes cross a network, only the wanted ones do,
        and the server compares the checksums of tensors that cross in part. A version that is published in parts, such
        as by a relay, is fetched part by part while the call waits for the rest. It returns the whole version, or
        raises; if the version is given up, it waits for the next.

        Args:
            above: get a version above this one; default -1: any.
            version: get exactly this version; default None: the newest.
            since: weights that are held and not released, whose unchanged tensors are shared, not fetched;
                `Weights.changed` says which are new. Of a tensor that is pulled in part, the same part must be held.
                Default None.
            only: names of tensors, or a mapping from names to the part of each: a `Slice` of ranges or shares along any
                of its dimensions, a range of rows along dimension 0, or None for all of it. Default None: all tensors.
            timeout_s: seconds to wait; default None: no limit; 0: not at all.

        Returns:
            The weights: views of shared memory, pinned until they are released or collected.

        Raises:
            DeadlineExceeded: no such version was published in time.
            NotFound: the exact version is no longer kept, or it lacks a tensor or rows of `only`.
            SchemaError: a `Slice` does not fit its tensor.
            Corruption: bytes did not match their checksums, twice.
            ShardLost: the version's bytes are lost; wait for the next.
            UsageError: arguments of the wrong type.

        Example:
            >>> import numpy as np
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     channel = queue.weights("policy")
            ...     _ = channel.publish(1, {"embed": np.arange(4.0), "head": np.zeros(2)})
            ...     with channel.pull(only=["embed"]) as weights:
            ...         values = weights.numpy()["embed"].tolist()
            >>> values
            [0.0, 1.0, 2.0, 3.0]
        """
        return self._run(pull_weights(self._client, self._name, above, version, since, timeout_s, only))

    def applied(self, version: int) -> None:
        """Report that this process generates with a version from now on. Statistics show it, beside the publication.

        Args:
            version: of the weights.

        Raises:
            NotFound: the version was never published.

        Example:
            >>> import numpy as np
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     channel = queue.weights("policy")
            ...     written = channel.publish(1, {"embed": np.zeros(4)})
            ...     channel.applied(1)
            ...     figures = queue.stats()
            >>> list(figures.channels["policy"].applied.values())
            [1]
        """
        self._run(report_applied(self._name, version))

    @contextmanager
    def turn(self, *, at_once: int = 1, length_s: float = TURN_S, timeout_s: float | None = None) -> Generator[None]:
        """Change weights while at most `at_once` sessions do, so that generation as a whole never stops.

        Waits, up to `timeout_s`, for a turn. The turn ends with the block, with this session, or after `length_s`: a
        dead or slow session does not block the others.

        Args:
            at_once: the most sessions that change weights together; default 1.
            length_s: the longest turn in seconds; default 30.
            timeout_s: seconds to wait; default None: no limit; 0: not at all.

        Raises:
            DeadlineExceeded: no turn was free in time; the text names the sessions that have one.
            NotFound: nothing was published on the channel.

        Example:
            >>> import numpy as np
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     channel = queue.weights("policy")
            ...     written = channel.publish(1, {"embed": np.zeros(4)})
            ...     with channel.turn(at_once=1):
            ...         weights = channel.pull(timeout_s=10)  # of several generators, one at a time
            >>> weights.version
            1
        """
        self._run(acquire_update_slot(self._name, at_once, length_s, timeout_s))
        try:
            yield
        finally:
            self._run(release_update_slot(self._name))

    def begin(self, version: int, *, parts: int, length_s: float = BEGUN_S) -> int:
        """Begin a version that several sessions publish together, such as the ranks of a sharded trainer.

        No reader has the version before all parts have come. It is given up, its parts are freed, and later ones are
        refused with `VersionGivenUp`: after `length_s` seconds, when this session ends, or when another version of the
        channel is begun.

        Args:
            version: a number above all versions of the channel.
            parts: the number of parts, 1 to 1024.
            length_s: seconds for all parts to come; default 60.

        Returns:
            The number that each session passes to `publish` as ``pending``.

        Raises:
            AlreadyExists: the version is published.
            UsageError: a version below the newest, or an argument out of range.

        Example:
            >>> import numpy as np
            >>> import transferqueue as tq
            >>> with tq.connect("embedded") as queue:
            ...     channel = queue.weights("policy")
            ...     rows = np.arange(8.0).reshape(4, 2)
            ...     halves = [tq.WeightSlice(rows[at : at + 2], first=at, rows=4) for at in (0, 2)]
            ...     pending = channel.begin(1, parts=2)  # rank 0 sends the number to rank 1
            ...     written = channel.publish(1, {"embed": halves[1]}, pending=pending, part=1)
            ...     written = channel.publish(1, {"embed": halves[0]}, pending=pending)
            ...     weights = channel.pull()
            >>> weights.numpy()["embed"].shape
            (4, 2)
        """
        return self._run(begin_version(self._name, version, parts, length_s))

    def _run(self, operation: Operation[T]) -> T:
        return run_sync(self._client.connection, operation)
