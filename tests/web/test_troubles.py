"""The troubles of the last hour, from verdicts."""

from __future__ import annotations

from transferqueue.observe.verdict import QueueVerdict
from transferqueue.web.page.troubles import TROUBLES_MAX, Troubles


def verdict(state="missing", text="rows/train: 2 rows ready, no worker connected; start one", task="train"):
    trouble = state not in ("healthy", "waiting")
    return QueueVerdict(state=state, trouble=trouble, mark="", text=text, short=text, table="rows", task=task)


def test_a_trouble_is_kept_with_its_words_after_it_ended():
    troubles = Troubles()
    troubles.see(10.0, verdict())
    troubles.see(12.0, verdict(text="rows/train: 2 rows ready, no worker connected; its last worker left"))
    (lasting,) = troubles.all
    assert (lasting.from_s, lasting.until_s) == (10.0, None)
    assert lasting.text.endswith("its last worker left"), "as it was last"
    troubles.see(14.0, verdict("healthy"))
    (ended,) = troubles.all
    assert (ended.text, ended.from_s, ended.until_s) == (lasting.text, 10.0, 14.0)
    troubles.forget(14.5)
    assert troubles.all == []


def test_another_trouble_ends_the_one_before():
    troubles = Troubles()
    troubles.see(10.0, verdict())
    troubles.see(20.0, verdict("failing", "reward fails", "reward"))
    assert [(one.text, one.until_s) for one in troubles.all] == [(verdict().text, 20.0), ("reward fails", None)]


def test_what_is_no_trouble_is_not_kept():
    troubles = Troubles()
    troubles.see(10.0, verdict("healthy"))
    troubles.see(20.0, verdict("waiting"))
    assert troubles.all == []


def test_the_troubles_that_are_kept_are_bounded_and_go_with_the_server():
    troubles = Troubles()
    for at in range(2 * TROUBLES_MAX + 2):
        troubles.see(100.0 + at, verdict("healthy") if at % 2 else verdict())
    assert len(troubles.all) == TROUBLES_MAX
    troubles.see(1.0, verdict("healthy"))  # a new server, whose clock is behind
    assert troubles.all == []
