"""Packs the documentation into wheels, where `transferqueue docs` finds it. An editable installation reads the
checkout's own pages."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PATTERNS = ("*.md", "docs/*/*.md", "docs/pictures/*")
PATTERNS += ("bench/*.md", "deploy/**/*", "examples/*.md", "examples/*.py", "examples/*.ipynb")
PATTERNS += ("examples/jobs/*.*", "examples/stacks/*.patch")


class Documentation(BuildHookInterface[Any]):
    """Adds pages, pictures, examples and files of deploy/ below ``transferqueue/documentation/``."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name each file and its place. version: what hatchling calls the kind of wheel."""
        if version == "editable":
            return
        root = Path(self.root)
        paths = (path for pattern in PATTERNS for path in root.glob(pattern) if path.is_file())
        for where in (path.relative_to(root) for path in paths if "__pycache__" not in path.parts):
            build_data["force_include"][str(root / where)] = f"transferqueue/documentation/{where}"
