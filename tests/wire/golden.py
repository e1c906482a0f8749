"""``python -m tests.wire.golden`` records the frames of new messages. It refuses while a recorded frame changed or is
gone, unless `PROTOCOL` grew: then it records all frames under the new number, and deletes the file of the old one.

Recorded are: a frame of each message (`examples`), and a session with a server, call by call (`session`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.wire import examples, session
from transferqueue.wire import codec
from transferqueue.wire import messages as m
from transferqueue.wire.versions import PROTOCOL

FOLDER: Final = Path(__file__).parent / "golden"
REMEDY: Final = (
    "clients and servers of this protocol number would not understand each other. Raise PROTOCOL in "
    "transferqueue/wire/versions.py and run python -m tests.wire.golden, or undo the change. If only the example of a "
    "message changed, restore it and append another; if the frame is in no commit yet, git restore tests/wire/golden "
    "first"
)

Frames = dict[str, dict[str, str]]
"""Frames as hexadecimal text, by name: the group "frames" and the group "session"."""


def file_of(protocol: int, folder: Path = FOLDER) -> Path:
    """The file with the frames of a protocol."""
    return folder / f"protocol-{protocol}.json"


def recorded() -> Frames:
    """The frames in the file of this protocol."""
    found: Frames = json.loads(file_of(PROTOCOL).read_text())
    return found


def sent() -> Frames:
    """The frames that this package sends."""
    return {
        "frames": {name: frame.hex() for name, frame in examples.frames().items()},
        "session": {f"{number:02} {kind}": frame.hex() for number, (kind, frame) in enumerate(session.play())},
    }


def changed(old: Frames, new: Frames) -> list[str]:
    """Names of the frames of `old` that `new` lacks or has otherwise. The text of an error may change."""
    return [name for group in old for name in _changed(old[group], new[group])]


def _changed(old: dict[str, str], new: dict[str, str]) -> Iterator[str]:
    for name, frame in old.items():
        if new.get(name) != frame and not (name.endswith("Failed answer") and name in new and _same(frame, new[name])):
            yield name


def _same(old: str, new: str) -> bool:
    return outline(codec.decode_answer(bytes.fromhex(old))) == outline(codec.decode_answer(bytes.fromhex(new)))


def outline(answer: m.AnswerFrame) -> tuple[int, int, object]:
    """An answer without the text of an error."""
    return answer.epoch, answer.id, answer.reply.error if isinstance(answer.reply, m.Failed) else answer.reply


def record(frames: Frames, protocol: int, folder: Path) -> None:
    """Write the file of `protocol`, and delete those of others. `SystemExit` if it has other frames."""
    file = file_of(protocol, folder)
    if file.exists() and (names := changed(json.loads(file.read_text()), frames)):
        raise SystemExit(f"frames of protocol {protocol} changed ({', '.join(names)}): {REMEDY}")
    for other in folder.glob("protocol-*.json"):
        other.unlink()
    file.write_text(json.dumps(frames, indent=0) + "\n")


if __name__ == "__main__":
    record(sent(), PROTOCOL, FOLDER)
