"""A server that answers as a test tells it to: the real transport, with a script where the node would be."""

from __future__ import annotations

import queue
import select
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from transferqueue.transport import FileLock, Wakeup, parse_address
from transferqueue.transport.control.unix_socket import UnixServer
from transferqueue.wire import messages as m
from transferqueue.wire.codec import decode_call, encode_answer

Script = Callable[[m.CallFrame], m.Reply | None]
WELCOME = m.Welcome(session=5, epoch=1, server="scripted", runtime="", arenas={}, arena_bytes=0)


class ScriptedServer(AbstractContextManager["ScriptedServer"]):
    """Answers Hello, Goodbye and what `script` has a reply for; keeps every call in `calls`; `answer` says more.

    `script` runs in the server's thread.
    """

    def __init__(self, directory: Path, script: Script = lambda _: None, *, always: bytes | None = None) -> None:
        """always: the frame that answers whatever comes; None: see above."""
        self.address = f"ipc://{directory}/scripted.sock"
        self.calls: queue.Queue[m.CallFrame] = queue.Queue()
        self._script = script
        self._always = always
        self._lock = FileLock(directory / "scripted.sock.lock", inherited=False)
        assert self._lock.take()
        self._port = UnixServer(parse_address(self.address))  # type: ignore[arg-type]
        self._bell = Wakeup()
        self._unsaid: queue.Queue[bytes] = queue.Queue()
        self._peer: object = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def answer(self, call: int, reply: m.Reply) -> None:
        """Send an answer now, asked for or not."""
        self.say(encode_answer(m.AnswerFrame(1, call, reply)))

    def say(self, frame: bytes) -> None:
        """Send a frame as it is."""
        self._unsaid.put(frame)
        self._bell.set()

    def next(self, kind: type[m.Message]) -> m.CallFrame:
        """The next call of this kind; others before it are skipped."""
        while True:
            call = self.calls.get(timeout=20)
            if isinstance(call.request, kind):
                return call

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._bell.set()
        self._thread.join()
        self._port.close()
        self._bell.close()
        self._lock.release()

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._port, select.POLLIN)
        poller.register(self._bell, select.POLLIN)
        while not self._stopped:
            poller.poll()
            while (arrived := self._port.recv_nowait()) is not None:
                self._peer, frame = arrived
                if self._always is None:
                    self._take(decode_call(frame))
                else:
                    self.say(self._always)
            self._bell.clear()
            while not self._unsaid.empty():
                self._port.send(self._peer, self._unsaid.get())

    def _take(self, call: m.CallFrame) -> None:
        self.calls.put(call)
        reply = {m.Hello: WELCOME, m.Goodbye: m.DoneReply()}.get(type(call.request)) or self._script(call)
        if reply is not None:
            self._port.send(self._peer, encode_answer(m.AnswerFrame(1, call.id, reply)))
