"""A hook of mkdocs: links to edit lead to pages that the repository has, if the host names a repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def on_config(config: Any) -> Any:
    """Make no links to edit where the host names no repository."""
    if not config.repo_url:
        config.edit_uri = None
    return config


def on_pre_page(page: Any, **kwargs: Any) -> Any:
    """Take the link to edit from a page that the repository does not have."""
    if not (ROOT / page.file.src_uri).exists():
        page.edit_url = None
    return page
