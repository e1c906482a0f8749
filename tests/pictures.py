"""Draw the picture of the README, `docs/pictures/stages.svg`: ``python -m tests.pictures``. A test compares."""

from __future__ import annotations

from typing import Final

from tests.markdown import ROOT

PICTURE: Final = ROOT / "docs" / "pictures" / "stages.svg"
WIDTH, HEIGHT = 760, 346
STYLE: Final = (
    "text{font:14px system-ui,sans-serif;fill:#0f172a}.small{font-size:12px;fill:#475569}.mid{text-anchor:middle}"
    ".stage{fill:#e0e7ff;stroke:#4338ca}.queue{fill:#dcfce7;stroke:#15803d}.cell{fill:#fff;stroke:#15803d}"
    ".line{fill:none;stroke:#334155;stroke-width:1.5;marker-end:url(#arrow)}"
    ".both{marker-start:url(#arrow)}.weights{stroke:#a16207;stroke-dasharray:6 4}"
)
ARROW: Final = (
    '<marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
    'orient="auto-start-reverse"><path d="M0 0 10 5 0 10z" fill="#334155"/></marker>'
)
COLUMNS: Final = ("prompt", "response", "reward", "log-probs")


def box(x: int, y: int, name: str, below: str) -> list[str]:
    """A stage: a process of a job."""
    return [
        f'<rect class="stage" x="{x}" y="{y}" width="140" height="54" rx="6"/>',
        f'<text class="mid" x="{x + 70}" y="{y + 23}">{name}</text>',
        f'<text class="mid small" x="{x + 70}" y="{y + 41}">{below}</text>',
    ]


def line(path: str, kind: str = "") -> str:
    return f'<path class="line {kind}" d="{path}"/>'.replace(' "', '"')


def label(x: int, y: int, text: str, kind: str = "small mid") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{text}</text>'


def table() -> list[str]:
    """The queue in the middle: rows whose columns fill from left to right."""
    parts = ['<rect class="queue" x="230" y="108" width="300" height="120" rx="8"/>']
    parts.append(label(380, 128, "one table of the queue", "mid"))
    for at, name in enumerate(COLUMNS):
        parts.append(label(272 + 72 * at, 148, name))
        for row, filled in enumerate((4, 3, 1)):
            fill = "#4338ca" if at < filled else "#fff"
            parts.append(
                f'<rect class="cell" x="{242 + 72 * at}" y="{156 + 22 * row}" width="60" height="16" '
                f'rx="3" style="fill:{fill}"/>'
            )
    return parts


def picture() -> str:
    """The whole file."""
    title = "Stages of a training job around one table of the queue"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">',
        f"<title>{title}</title>",
        f"<defs>{ARROW}</defs>",
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        *table(),
        *box(20, 30, "prompts", "put rows"),
        *box(20, 240, "rollout", "many engines"),
        *box(310, 20, "reward", "functions, models"),
        *box(310, 262, "reference", "log-probs"),
        *box(600, 140, "train", "whole groups"),
        line("M160 57 C205 57 200 140 228 140"),
        line("M160 267 C205 267 200 200 228 200", "both"),
        line("M380 76 L380 106", "both"),
        line("M380 260 L380 230", "both"),
        line("M532 168 L598 168", "both"),
        line("M670 196 L670 334 L90 334 L90 296", "weights"),
        label(565, 160, "lease, ack"),
        label(240, 254, "lease, ack"),
        label(180, 100, "put"),
        label(560, 328, "weights, by version"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
