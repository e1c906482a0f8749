"""The token's file: made private, read only where it is, and refused where it holds none."""

import pytest

from transferqueue.errors import UsageError
from transferqueue.web.token import kept_token, new_token


def test_a_file_is_made_private_and_read_again(tmp_path):
    path = tmp_path / "token"
    token = kept_token(path)
    assert len(token) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert kept_token(path) == token
    assert new_token() != new_token()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_token_that_others_can_read_is_none(tmp_path, mode):
    path = tmp_path / "token"
    kept_token(path)
    path.chmod(mode)
    with pytest.raises(UsageError, match=rf"has mode {mode:o}, and the token is a password; chmod 600"):
        kept_token(path)


@pytest.mark.parametrize("content", ["", "short", "x" * 300, "a b" * 10, "ä" * 30, "a" * 30 + "\nb"])
def test_a_file_without_a_token_is_refused_and_left_as_it_is(tmp_path, content):
    path = tmp_path / "token"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(UsageError, match="holds no token"):
        kept_token(path)
    assert path.read_text() == content


def test_a_place_where_none_can_be_made_is_told(tmp_path):
    with pytest.raises(UsageError, match="cannot be made: No such file or directory"):
        kept_token(tmp_path / "none" / "token")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        kept_token(tmp_path)
