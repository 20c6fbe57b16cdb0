"""What servers stream, told as tokens: the same whatever the pieces, and refused by name where it is none."""

from __future__ import annotations

import datetime
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine import RequestError, ServerUnavailable
from engine.external.answer import Answer
from engine.external.events import MAX_EVENT_CHARS, EventData
from engine.external.refusals import MOST_RETRY_AFTER_S, of_error, of_status, retry_after_s
from engine.external.transcript import read
from engine.tokens import byte_chat
from tests.engine.external.scripted import says, used

TOKENIZER, CHAT = byte_chat()
TEXT = st.text(max_size=20)


def told(*chunks, begun=""):
    """Text, calls and reason of a stream, as a node reads them from its tokens."""
    answer = Answer(begun)
    tokens = [token for chunk in chunks for token in answer.take(chunk)]
    rest, reason = answer.finish()
    parsed = CHAT.parse_assistant(tokens + rest)
    return parsed, reason, answer


def chunk(finish=None, index=0, **delta):
    return {"choices": [{"index": index, "delta": delta, "finish_reason": finish}]}


def call(index=0, name=None, arguments=None, **more):
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {"index": index, "function": function, **more}


def pieces(data, cuts):
    """Bytes cut at these places."""
    ends = sorted({cut % (len(data) + 1) for cut in cuts})
    return [data[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True)]


STREAM = b"".join(
    [
        b": a comment\r\n\r\nevent: x\r\nid: 7\r\nretry: 3\r\n",
        says(role="assistant").replace(b"\n", b"\r\n"),
        says("h\u00e9\u6f22"),
        b"\n\n\n",
        says(" \U0001f600").replace(b"\n", b"\r"),
        b'data: {"choices": [{"index": 0,\ndata: "delta": {"content": "!"}, "finish_reason": "stop"}]}\n\n',
        used(),
        b"data:[DONE]\n\n",
    ]
)


@given(st.lists(st.integers(0, 10_000), max_size=8))
def test_an_event_is_the_same_however_its_bytes_come(cuts):
    events, whole = EventData(), EventData()
    cut = [data for piece in pieces(STREAM, cuts) for data in events.push(piece)]
    assert cut == whole.push(STREAM)
    assert cut[-1] == "[DONE]"
    parsed, reason, answer = told(*map(json.loads, cut[:-1]))
    assert (parsed.text, reason, parsed.complete) == ("h\u00e9\u6f22 \U0001f600!", "stop", True)
    assert answer.usage == {"prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 3}


def test_an_event_that_lacks_its_empty_line_counts_at_the_end():
    events = EventData()
    assert (events.push(b"data: x"), events.finish(), events.finish()) == ([], ["x"], [])


def test_an_event_that_never_ends_is_refused():
    events = EventData()
    for _ in range(16):
        events.push(b"data: " + b"x" * (MAX_EVENT_CHARS // 16 - 6))
    with pytest.raises(RequestError, match="more than"):
        events.push(b"data: more")


@given(st.lists(TEXT, max_size=5))
def test_text_comes_through_as_it_is_but_for_what_no_record_can_hold(texts):
    parsed, _, _ = told(*[chunk(content=text) for text in texts], chunk("stop"))
    wanted = "".join(texts).encode("utf-8", "surrogatepass").decode("utf-8", "replace").replace("\0", "\ufffd")
    assert parsed.text == wanted


ARGUMENTS = st.dictionaries(TEXT, TEXT | st.integers() | st.lists(TEXT, max_size=2), max_size=3)


@given(TEXT.map(str.strip), st.lists(ARGUMENTS, min_size=1, max_size=3), st.lists(st.integers(0, 99), max_size=4))
@example("", [{"<tool_call>": '}\n</tool_call>"'}, {}], [3])
def test_calls_come_through_in_any_fragments(text, calls, cuts):
    chunks = [chunk(content=text)] if text else []
    for at, arguments in enumerate(calls):
        chunks.append(chunk(tool_calls=[call(at, "look", "", id=f"x{at}", type="function")]))
        written = json.dumps(arguments)
        ends = sorted({cut % (len(written) + 1) for cut in cuts})
        for start, end in zip([0, *ends], [*ends, len(written)], strict=True):
            chunks.append(chunk(tool_calls=[call(at, arguments=written[start:end])]))
    parsed, reason, _ = told(*chunks, chunk("tool_calls"))
    assert [one.arguments for one in parsed.calls] == calls
    assert (reason, parsed.complete) == ("stop", True)


@given(st.permutations(range(3)), st.integers(1, 5))
def test_calls_whose_fragments_are_mixed_are_told_one_after_the_other(order, size):
    written = {at: json.dumps({"n": at, "x": "y" * 12}) for at in range(3)}
    chunks = [chunk(tool_calls=[call(at, f"t{at}", "") for at in order])]
    for start in range(0, 40, size):
        parts = [call(at, arguments=written[at][start : start + size]) for at in order if written[at][start:]]
        chunks += [chunk(tool_calls=parts)] if parts else []
    parsed, _, _ = told(*chunks, chunk("tool_calls"))
    assert [(one.name, one.arguments["n"]) for one in parsed.calls] == [("t0", 0), ("t1", 1), ("t2", 2)]


def test_a_call_without_arguments_has_none():
    parsed, _, _ = told(chunk("tool_calls", tool_calls=[call(0, "look")]))
    assert [(one.name, one.arguments) for one in parsed.calls] == [("look", {})]


def test_a_call_without_index_is_the_next_where_it_has_an_id():
    parts = [{"id": "a", "function": {"name": "x", "arguments": {"n": 1}}}]
    more = [{"id": "b", "function": {"name": "y", "arguments": {"n": 2}}}]
    parsed, _, _ = told(chunk(tool_calls=parts), chunk("stop", tool_calls=more))
    assert [(one.name, one.arguments) for one in parsed.calls] == [("x", {"n": 1}), ("y", {"n": 2})]


@pytest.mark.parametrize("arguments", ["{", "[]", '"x"', "{}}", '{"a": 1, "a": 2}', "nonsense", '{"a": 1}</tool_call>'])
def test_arguments_that_are_no_object_make_a_message_that_the_model_is_told_of(arguments):
    parsed, _, _ = told(chunk("tool_calls", tool_calls=[call(0, "look", arguments)]))
    assert (parsed.calls, parsed.complete) == ((), False)


def test_a_call_that_was_cut_off_is_never_whole():
    parsed, reason, _ = told(chunk("length", tool_calls=[call(0, "look", '{"a": 1')]))
    assert (parsed.calls, parsed.complete, reason) == ((), False, "length")


def test_thoughts_stand_before_what_is_said():
    thought = [chunk(reasoning_content="h"), chunk(reasoning_content="m")]
    parsed, _, _ = told(*thought, chunk(content="Yes."), chunk("stop"))
    assert parsed.text == "<think>\nhm\n</think>\n\nYes."
    assert told(chunk(reasoning="hm"), chunk("stop"))[0].text == "<think>\nhm\n</think>\n\n"


def test_what_a_server_says_again_before_it_goes_on_is_said_once():
    assert told(chunk(content="Once up"), chunk(content="on a"), chunk("stop"), begun="Once upon")[0].text == " a"
    assert told(chunk(content=" a time"), chunk("stop"), begun="Once upon")[0].text == " a time"


def test_a_message_that_ends_for_a_reason_of_the_servers_is_not_complete():
    parsed, reason, _ = told(chunk("content_filter", content="I"))
    assert (parsed.complete, reason) == (False, "content_filter")


def test_usage_may_come_with_the_message_or_alone_or_not_at_all():
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    assert told({**chunk("stop", content="x"), "usage": usage})[2].usage["prompt_tokens"] == 5
    assert told(chunk("stop"), {"choices": [], "usage": usage}, {"usage": None})[2].usage["completion_tokens"] == 2
    assert (
        told(chunk("stop"), {"choices": [], "usage": {"prompt_tokens": -1, "completion_tokens": "x"}})[2].usage is None
    )


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        "text",
        {"choices": "x"},
        {"choices": [1]},
        chunk(index=1, content="x"),
        {"choices": [chunk()["choices"][0]] * 2},
        {"choices": [{"index": 0, "delta": "x"}]},
        chunk(content=7),
        chunk(tool_calls={"index": 0}),
        chunk(tool_calls=["x"]),
        chunk(tool_calls=[call(-1, "x")]),
        chunk(tool_calls=[call(1 << 40, "x")]),
        chunk(tool_calls=[call("0", "x")]),
        chunk(tool_calls=[{"index": 0, "function": "x"}]),
        chunk(tool_calls=[call(0, 7)]),
        chunk("tool_calls", tool_calls=[call(0, arguments="{}")]),
    ],
)
def test_what_is_no_chunk_is_refused_by_name(wrong):
    with pytest.raises(RequestError) as refused:
        told(wrong, chunk("stop"))
    assert refused.value.code == "bad_answer"
    assert str(refused.value).startswith("the server sent ")


def test_more_of_a_call_that_was_whole_is_refused():
    first = [chunk(tool_calls=[call(0, "a", "{}")]), chunk(tool_calls=[call(1, "b", "{}")])]
    with pytest.raises(RequestError, match="whole already"):
        told(*first, chunk(tool_calls=[call(0, arguments="{}")]), chunk("stop"))


def test_a_stream_without_an_end_was_cut_off():
    with pytest.raises(ServerUnavailable, match="ended before"):
        told(chunk(content="x"))


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda x: (
            st.lists(x)
            | st.dictionaries(
                st.sampled_from(
                    ["choices", "delta", "content", "tool_calls", "function", "index", "usage", "error", "name"]
                ),
                x,
            )
        ),
    )
)
def test_no_json_makes_anything_else_than_tokens_or_a_refusal(anything):
    try:
        tokens = Answer().take(anything)
    except (RequestError, ServerUnavailable):
        return
    assert all(0 <= token < 264 for token in tokens)


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (400, {"error": {"message": "request exceeds the available context size"}}, "context_length_exceeded"),
        (400, {"error": {"message": "no", "code": "context_length_exceeded"}}, "context_length_exceeded"),
        (400, {"message": "This model's maximum context length is 8"}, "context_length_exceeded"),
        (400, {"error": {"message": "bad tool"}}, "server_refused"),
        (401, "nope", "server_refused"),
        (403, {}, "server_refused"),
        (404, {"detail": "no model"}, "server_refused"),
        (307, "", "server_refused"),
    ],
)
def test_a_refusal_says_the_servers_words(status, body, code):
    error = of_status(status, body)
    assert isinstance(error, RequestError)
    assert (error.code, str(status) in str(error)) == (code, True)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 529])
def test_what_passes_is_not_the_requests_fault(status):
    error = of_status(status, {"error": "busy"}, "7")
    assert isinstance(error, ServerUnavailable)
    assert error.retry_after_s == 7


def test_an_error_within_a_stream_counts_by_its_status():
    assert isinstance(of_error({"message": "x", "code": 400}), RequestError)
    assert isinstance(of_error({"message": "x", "code": "503"}), ServerUnavailable)
    assert isinstance(of_error("broken"), ServerUnavailable)
    with pytest.raises(ServerUnavailable):
        Answer().take({"error": {"message": "out of memory"}})


@given(st.text(max_size=30) | st.floats().map(str) | st.datetimes().map(datetime.datetime.isoformat))
@example("Wed, 21 Oct 2015 07:28:00 GMT")
@example("Wed, 21 Oct 2999 07:28:00 -0000")
@example("inf")
def test_the_time_that_a_server_asks_for_is_bounded(text):
    given_s = retry_after_s(text)
    assert given_s is None or 0 <= given_s <= MOST_RETRY_AFTER_S


def test_what_was_told_can_be_read_back():
    answer = Answer()
    tokens = answer.take(chunk("tool_calls", content="so", tool_calls=[call(0, "look", '{"at":"x"}')]))
    whole = [*CHAT.user("u"), *CHAT.assistant_open(), *tokens, *answer.finish()[0], *CHAT.assistant_open()]
    (made,) = read(whole).messages[1]["tool_calls"]
    assert made["function"] == {"name": "look", "arguments": '{"at":"x"}'}
