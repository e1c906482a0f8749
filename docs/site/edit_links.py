"""A hook of mkdocs: a page that shows a source file, or lists a folder, is no file that one could edit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def on_pre_page(page: Any, **kwargs: Any) -> Any:
    """Take the link to edit from a page that the repository does not have."""
    if not (ROOT / page.file.src_uri).exists():
        page.edit_url = None
    return page
