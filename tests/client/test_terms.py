"""What a client knows of a table's fields: what it heard, what it learned, and what a reply defines."""

from __future__ import annotations

import pytest

from transferqueue.client.table_info import TableInfo
from transferqueue.errors import ProtocolError
from transferqueue.limits import Limits
from transferqueue.policies import Acked
from transferqueue.schema import Field
from transferqueue.wire import messages as m
from transferqueue.wire.codec import encode_fields

A, B = Field("a", "int64"), Field("b", "float32", (4,))


def heard(*fields: Field) -> m.TableTerms:
    return m.TableTerms("t", list(fields), [], Limits(), None, Acked(), sealed=False, version=0)


def test_what_a_reply_defines_is_known_with_the_rest_and_kept() -> None:
    terms = TableInfo(heard(A))
    told = terms.reply_fields(encode_fields([B]))
    assert told.own == {"b": B}
    assert told.known == {"a": A, "b": B}
    assert terms.reply_fields(encode_fields([B])) is told
    assert terms.fields == {"a": A}


def test_what_is_heard_or_learned_later_is_told_too() -> None:
    terms, definitions = TableInfo(heard(A)), encode_fields([A])
    assert terms.reply_fields(definitions).known == {"a": A}
    assert terms.update_from(heard(A, B))
    assert terms.reply_fields(definitions).known == {"a": A, "b": B}
    assert not terms.update_from(heard(A, B))
    terms.learn([Field("c", "str")])
    assert set(terms.reply_fields(definitions).known) == {"a", "b", "c"}


def test_a_reply_of_a_new_table_of_the_same_name_is_taken_at_its_word() -> None:
    other = Field("a", "float32")
    assert TableInfo(heard(A)).reply_fields(encode_fields([other])).known == {"a": other}


@pytest.mark.parametrize("definitions", [b"", b"\x91\x01", b"\x91\x93\xa1x\xa3odd\x90", b"\x90\x90"])
def test_what_defines_no_fields_is_refused_each_time(definitions: bytes) -> None:
    terms = TableInfo(heard(A))
    for _ in range(2):
        with pytest.raises(ProtocolError, match=f"{len(definitions)} bytes are not a message"):
            terms.reply_fields(definitions)
    assert terms.reply_fields(encode_fields([])).known == {"a": A}
