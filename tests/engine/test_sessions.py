"""Epochs, and who holds which page."""

from __future__ import annotations

import pytest

from engine.errors import RequestError
from engine.sessions import Sessions

A, B, C, TAIL = (bytes([n]) * 32 for n in range(4))


def test_epochs_only_rise() -> None:
    sessions = Sessions()
    assert not sessions.fence("s", 3)
    assert not sessions.fence("s", 3)
    assert sessions.fence("s", 4)
    with pytest.raises(RequestError, match="at epoch 4; a call of epoch 3 came too late") as caught:
        sessions.fence("s", 3)
    assert caught.value.code == "stale_epoch"


def test_a_dropped_session_keeps_its_epoch() -> None:
    sessions = Sessions()
    sessions.fence("s", 4)
    sessions.drop("s")
    with pytest.raises(RequestError):
        sessions.fence("s", 3)


def test_a_partial_page_that_was_grown_over_is_nobodys() -> None:
    sessions = Sessions()
    record = sessions.open("s", b"", b"root")
    assert sessions.update(record, (1, 2, 3), [A, TAIL]) == []
    assert sessions.update(record, (1, 2, 3, 4), [A, B]) == [TAIL]


def test_an_abandoned_branch_stays_the_sessions_until_it_is_dropped() -> None:
    sessions = Sessions()
    record = sessions.open("s", b"", b"root")
    sessions.update(record, (1, 2, 3), [A, B])
    assert sessions.update(record, (1, 9), [A, C]) == []
    assert set(sessions.drop("s")) == {A, B, C}


def test_pages_of_two_sessions_are_let_go_by_the_last() -> None:
    sessions = Sessions()
    for name in ("s", "t"):
        sessions.update(sessions.open(name, b"", b"root"), (1, 2), [A, B])
    record = sessions.get("s")
    assert record is not None
    assert not sessions.is_private(record, A)
    assert sessions.drop("s") == []
    assert set(sessions.drop("t")) == {A, B}
    assert sessions.drop("t") == []


def test_another_salt_under_the_same_name_is_refused() -> None:
    sessions = Sessions()
    sessions.open("s", b"", b"root")
    with pytest.raises(RequestError, match="another salt"):
        sessions.open("s", b"", b"other")
