"""`run` gives the turn of its own message, whatever else the session has to do."""

from __future__ import annotations

import pytest
import tenuto

from tests.sdk.server import Answer, Seen, as_json, events, frame

INFO = {"id": "ses_1", "state": "idle", "model": "m", "seed": 1, "epoch": 1, "last_event": 10}


class Log:
    """Frames of a session, numbered from 11."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self._step = 0

    def add(self, type: str, **data) -> Log:
        self.frames.append(frame(11 + len(self.frames), type, self._step, **data))
        return self

    def input(self, message_id: str, *, refused: bool = False) -> Log:
        """An input step; refused: it fails, and the session with it."""
        self._step += 1
        self.add("step.started", kind="input", message_id=message_id)
        if refused:
            return self.add("step.failed", message="too long").add("session.failed", message="too long")
        return self.add("step.completed", outcome="input", message_id=message_id)

    def think(self, text: str | None) -> Log:
        self._step += 1
        self.add("step.started", kind="think")
        if text is None:
            return self.add("step.failed", message="no room").add("session.failed", message="no room")
        self.add("message.completed", text=text, outcome="final")
        return self.add("step.completed", outcome="final").add("session.idle")


def run(client, server, log: Log) -> tenuto.Turn:
    def answer(seen: Seen) -> Answer:
        if seen.method == "POST":
            return as_json({"id": "msg_ours"}, 202)
        return events(b"".join(log.frames)) if seen.path.endswith("/stream") else as_json(INFO)

    server.replies = [answer]
    return client.sessions.get("ses_1").run("Say tide.")


def test_the_turn_holds_the_answer_and_its_own_events(client, server) -> None:
    turn = run(client, server, Log().input("msg_ours").think("tide"))
    assert (turn.text, turn.outcome) == ("tide", "final")
    assert [event.id for event in turn.events] == list(range(11, 17))
    stream = next(seen for seen in server.seen if seen.path.endswith("/stream"))
    assert stream.after == 10


def test_messages_queued_before_and_after_have_turns_of_their_own(client, server) -> None:
    log = Log().input("msg_a").think("early").input("msg_ours").think("tide").input("msg_b").think("late")
    turn = run(client, server, log)
    assert turn.text == "tide"
    assert {event.data["message_id"] for event in turn.events if "message_id" in event.data} == {"msg_ours"}


def test_a_rest_of_the_turn_before_does_not_end_ours(client, server) -> None:
    log = Log().add("message.completed", text="early", outcome="final").add("session.idle")
    assert run(client, server, log.input("msg_ours").think("tide")).text == "tide"


def test_a_turn_before_ours_that_fails_does_not_fail_ours(client, server) -> None:
    assert run(client, server, Log().input("msg_a").think(None).input("msg_ours").think("tide")).text == "tide"


@pytest.mark.parametrize(
    "log", [Log().input("msg_ours").think(None), Log().input("msg_a").think("early").input("msg_ours", refused=True)]
)
def test_our_own_failure_carries_the_servers_sentence(client, server, log) -> None:
    sentence = log.frames[-1].decode()
    with pytest.raises(tenuto.SessionFailed, match=r"^the session ended as failed\. (no room|too long)$") as caught:
        run(client, server, log)
    assert str(caught.value).rpartition(". ")[2] in sentence


def test_a_message_before_ours_that_is_refused_does_not_fail_ours(client, server) -> None:
    assert run(client, server, Log().input("msg_a", refused=True).input("msg_ours").think("tide")).text == "tide"


def test_a_failure_that_no_step_is_to_blame_for_is_ours(client, server) -> None:
    with pytest.raises(tenuto.SessionFailed, match="no sandbox"):
        run(client, server, Log().add("session.failed", message="no sandbox"))


@pytest.mark.parametrize("how", ["cancelled", "completed"])
def test_the_end_of_the_session_ends_the_turn(client, server, how) -> None:
    with pytest.raises(tenuto.SessionFailed, match=f"ended as {how}"):
        run(client, server, Log().input("msg_a").add(f"session.{how}"))


def test_an_answer_that_was_cut_off_is_incomplete(client, server) -> None:
    turn = run(client, server, Log().input("msg_ours").add("session.idle"))
    assert (turn.text, turn.outcome) == ("", "incomplete")


def test_a_turn_that_has_not_ended_has_no_result() -> None:
    with pytest.raises(tenuto.TenutoError, match="has not ended"):
        tenuto.TurnReader("msg_ours").result()
