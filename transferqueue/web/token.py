"""The tokens of the page, of the HTTP service and of the metrics: new, or kept in a file each in a directory.

Each token opens one thing (`access`), so no two may be equal.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from pathlib import Path
from typing import Final

from transferqueue.errors import UsageError

TOKEN_CHARS_MAX: Final = 256
NAMES: Final = ("page", "service", "metrics")
"""Names of the tokens and of their files."""
_TOKEN_CHARS_MIN: Final = 20
"""Characters of an alphabet of 64: 120 bits."""
_TOKEN: Final = re.compile(rf"[A-Za-z0-9_\-]{{{_TOKEN_CHARS_MIN},{TOKEN_CHARS_MAX}}}")


def new_token() -> str:
    """A random token of 192 bits that is valid in a URL."""
    return secrets.token_urlsafe(24)


def new_tokens() -> dict[str, str]:
    """A new token for each name."""
    return {name: new_token() for name in NAMES}


def kept_tokens(directory: Path) -> dict[str, str]:
    """The tokens in the files ``page``, ``service`` and ``metrics`` of `directory`.

    Makes missing files (0600) and the directory (0700).

    Raises:
        UsageError: Other users may read a file, a file holds no token, or two hold the same.
    """
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError as error:
        raise UsageError(f"tokens {directory} is a file; name a directory, which gets a file for each token") from error
    except OSError as error:
        raise UsageError(f"tokens {directory} cannot be made: {error.strerror}; name another directory") from error
    mode = stat.S_IMODE(directory.stat().st_mode)
    if mode & 0o022:
        raise UsageError(f"tokens {directory} has mode {mode:o}, so others may put other tokens there; chmod 700 it")
    tokens = {name: kept_token(directory / name) for name in NAMES}
    same = [name for name, token in tokens.items() if list(tokens.values()).count(token) > 1]
    if same:
        raise UsageError(
            f"tokens {directory}: the files {' and '.join(same)} hold the same token, and each opens something else; "
            "remove all but one of them, and other tokens are made"
        )
    return tokens


def kept_token(path: Path) -> str:
    """The token in the file at `path`. Makes the file (0600) if it is missing.

    Raises:
        UsageError: Other users may read it, or it holds no token (20 to 256 letters, digits, ``_ -``).
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return _read(path)
    except OSError as error:
        raise UsageError(f"token file {path} cannot be made: {error.strerror}; name another") from error
    token = new_token()
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{token}\n")
    return token


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode, content = stat.S_IMODE(os.fstat(file.fileno()).st_mode), file.read(TOKEN_CHARS_MAX + 2)
    except OSError as error:
        raise UsageError(f"token file {path} cannot be read: {error.strerror}; name another") from error
    if mode & 0o077:
        raise UsageError(f"token file {path} has mode {mode:o}, and the token is a password; chmod 600 it")
    token = content.decode("ascii", errors="replace").removesuffix("\n")
    if not _TOKEN.fullmatch(token):
        raise UsageError(
            f"token file {path} holds no token, which has {_TOKEN_CHARS_MIN} to {TOKEN_CHARS_MAX} letters, digits, _ "
            "or -; remove the file, and a token is made"
        )
    return token
