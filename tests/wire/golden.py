"""``python -m tests.wire.golden`` records the frames of this protocol anew. Raise `PROTOCOL` first, unless no release
has spoken it yet.

Recorded are: a frame of each message (`examples`), and a session with a node, call by call (`session`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tests.wire import examples, session
from transferqueue.wire.versions import PROTOCOL

FILE: Final = Path(__file__).parent / "golden" / f"protocol-{PROTOCOL}.json"
REMEDY: Final = (
    "the bytes of a message changed: raise PROTOCOL in transferqueue/wire/versions.py, unless no release has spoken it "
    "yet; then run python -m tests.wire.golden, and write the change into docs/operate/compatibility.md"
)


def recorded() -> dict[str, dict[str, str]]:
    """What the file has, as hexadecimal text."""
    found: dict[str, dict[str, str]] = json.loads(FILE.read_text())
    return found


def main() -> None:
    """Write the file."""
    frames = {name: frame.hex() for name, frame in examples.frames().items()}
    calls = {f"{number:02} {kind}": frame.hex() for number, (kind, frame) in enumerate(session.play())}
    FILE.write_text(json.dumps({"frames": frames, "session": calls}, indent=0) + "\n")


if __name__ == "__main__":
    main()
