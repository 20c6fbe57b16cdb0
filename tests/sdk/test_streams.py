"""A stream that is cut, wherever it is cut, gives every event once and in order."""

from __future__ import annotations

import pytest
import tenuto
from tenuto import _wire
from tenuto._wire import FrameReader

from tests.sdk.server import DROP, Answer, Seen, as_json, events, frame, problem

INFO = {"id": "ses_1", "state": "idle", "model": "m", "seed": 1, "epoch": 1, "last_event": 0}

FRAMES = (
    frame(1, text="tide – 潮 \u2028 and on"),
    b": keep-alive\n",
    b'id: 2\r\nevent: x\r\ndata: {"id": 2, "type": "x",\r\ndata:"created_at": "2026-01-01T00:00:00Z",\r\n'
    b'data: "data": {}}\r\nretry: 5\r\nmood: bright\r\n\r\n',
    b"event: ping\ndata: hello\n\n",
    b": keep-alive\n\n",
    frame(3, "session.completed"),
)
RECORDED = b"".join(FRAMES)
IDS = [1, 2, 3]


def rest_after(seen: Seen) -> bytes:
    """What a server sends that is asked for what came after a position."""
    by_id = {1: FRAMES[0], 2: b"".join(FRAMES[1:3]), 3: b"".join(FRAMES[3:])}
    return b"".join(by_id[id] for id in IDS if id > seen.after)


def followed(client, server) -> list[int]:
    server.replies.insert(0, as_json(INFO))
    return [event.id for event in client.sessions.get("ses_1").stream()]


@pytest.mark.parametrize("cut", ["close", None])
def test_a_stream_cut_at_any_byte_gives_every_event_once(client, server, cut) -> None:
    """`close`: in the middle of the body; None: the server ends it in good order."""
    for at in range(len(RECORDED)):
        server.seen.clear()
        server.replies = [events(RECORDED[:at], cut), lambda seen: events(rest_after(seen))]
        assert followed(client, server) == IDS, f"cut at byte {at}"
        assert len(server.seen) == 3


def test_a_stream_cut_again_and_again_goes_on(client, server) -> None:
    server.replies = [lambda seen: events(rest_after(seen)[: len(FRAMES[0]) + 180], "close")]
    assert followed(client, server) == IDS


@pytest.mark.parametrize("size", range(1, 9))
def test_events_do_not_depend_on_how_their_bytes_arrive(size) -> None:
    with_lf = RECORDED.replace(b"\r\n", b"\n")
    for recorded in (RECORDED, with_lf, with_lf.replace(b"\n", b"\r")):
        reader = FrameReader()
        pieces = [recorded[at : at + size] for at in range(0, len(recorded), size)]
        found = [event for piece in pieces for event in reader.feed(piece)]
        assert [event.id for event in found] == IDS
        assert found[0].data["text"] == "tide – 潮 \u2028 and on"


def test_events_that_come_again_are_not_given_again(client, server) -> None:
    server.replies = [events(FRAMES[0], "close"), events(RECORDED)]
    assert followed(client, server) == IDS


def test_nothing_is_given_after_the_end(client, server) -> None:
    server.replies = [events(RECORDED + frame(4))]
    assert followed(client, server) == IDS


def test_a_reader_that_starts_in_the_middle_says_so(client, server) -> None:
    server.replies = [as_json(INFO), lambda seen: events(rest_after(seen))]
    assert [event.id for event in client.sessions.get("ses_1").stream(after=2)] == [3]
    assert server.seen[1].after == 2


@pytest.mark.parametrize("trouble", [problem(503), DROP, Answer(502, b"<html>")])
def test_a_server_that_is_away_for_a_while_is_waited_for(client, server, trouble) -> None:
    server.replies = [events(FRAMES[0], "close"), *[trouble] * 20, lambda seen: events(rest_after(seen))]
    assert followed(client, server) == IDS


def test_a_refused_stream_is_not_tried_again(client, server) -> None:
    server.replies = [problem(404, "not_found", "there is no session ses_1")]
    with pytest.raises(tenuto.APIError, match="there is no session ses_1"):
        followed(client, server)
    assert len(server.seen) == 2


@pytest.mark.parametrize("trouble", [problem(503, message="no node is up"), DROP, events(b"")])
def test_a_server_that_stays_away_is_given_up(client, server, trouble) -> None:
    server.replies = [trouble]
    with pytest.raises(tenuto.ConnectionFailed, match="does not answer"):
        followed(client, server)
    assert len(server.seen) == 1 + _wire.STREAM_ATTEMPTS


def test_a_server_that_only_keeps_the_connection_is_not_given_up(client, server) -> None:
    quiet = events(b": keep-alive\n", "close")
    server.replies = [*[quiet] * (_wire.STREAM_ATTEMPTS + 5), events(RECORDED)]
    assert followed(client, server) == IDS


def test_an_event_that_cannot_be_read_is_a_sentence(client, server) -> None:
    server.replies = [events(b"id: 1\ndata: {}\n\n")]
    with pytest.raises(tenuto.TenutoError, match="an event that cannot be read"):
        followed(client, server)
