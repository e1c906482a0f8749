"""The files of the tokens: made private, read only where they are, and refused where they hold none."""

import pytest

from transferqueue.errors import UsageError
from transferqueue.web.token import NAMES, kept_token, kept_tokens, new_token, new_tokens


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


def test_a_directory_gets_a_token_of_its_own_for_each_thing(tmp_path):
    tokens = kept_tokens(tmp_path / "tokens")
    assert len(set(tokens.values())) == len(NAMES) == len(set(new_tokens().values()))
    assert (tmp_path / "tokens").stat().st_mode & 0o777 == 0o700
    assert {path.name: path.read_text().strip() for path in (tmp_path / "tokens").iterdir()} == tokens
    assert kept_tokens(tmp_path / "tokens") == tokens


def test_one_token_for_two_things_is_refused(tmp_path):
    tokens = kept_tokens(tmp_path / "tokens")
    (tmp_path / "tokens" / "metrics").write_text(tokens["service"])
    with pytest.raises(UsageError, match="the files service and metrics hold the same token"):
        kept_tokens(tmp_path / "tokens")


def test_a_place_that_is_no_directory_or_that_others_may_write_is_refused(tmp_path):
    (tmp_path / "token").touch()
    with pytest.raises(UsageError, match="is a file; name a directory"):
        kept_tokens(tmp_path / "token")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UsageError, match="has mode 777, so others may put other tokens there; chmod 700 it"):
        kept_tokens(tmp_path / "open")
