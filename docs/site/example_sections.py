"""An extension of griffe for the site: the section `Example:` of a docstring is shown as code, as griffe shows
`Examples:`; without it the lines of code would be prose."""

from __future__ import annotations

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Names the section as griffe knows it."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each object when it is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
