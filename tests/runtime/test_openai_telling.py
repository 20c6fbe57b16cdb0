"""What OpenAI's clients are told where a model server was lost in the middle of an answer and begins it anew."""

from __future__ import annotations

import itertools
from typing import Any

from engine.tokens import FORMATS
from runtime.openai.chatting import Chatting, completion
from runtime.openai.telling import Telling

POSITIONS = itertools.count(1)


def event(type_: str, step: int, **data: Any) -> dict[str, Any]:
    return {"id": next(POSITIONS), "type": type_, "step": step, "data": data}


def lost_in(*said: str) -> tuple[list[dict[str, Any]], Telling]:
    telling = Telling({"id": "r", "output": []}, "ses_a", FORMATS[0], {"look"}, None)
    kv, anew = {"external": 7, "computed": 3}, {"kind": "think", "keep": 0, "dropped": 9}
    events = [
        event("step.started", 2, kind="think"),
        *(event("model.delta", 2, text=text) for text in said),
        event("step.retrying", 2, **anew),
        event("model.delta", 2, text="Yes, "),
        event("model.delta", 2, text="it is."),
        event("message.completed", 2, text="Yes, it is.", outcome="final"),
        event("step.completed", 2, kind="think", kv=kv, sampled=4),
        event("session.idle", 2),
    ]
    telling._began = True
    return [told for one in events for told in telling.feed(one)], telling


def test_what_was_cut_off_is_incomplete_and_no_part_of_the_answer():
    told, telling = lost_in("Yes, it", " was")
    assert [(item["status"], len(item["content"])) for item in telling.output] == [("incomplete", 0), ("completed", 1)]
    assert [one["text"] for one in telling.kept] == ["Yes, it is."]
    assert [one["item"]["status"] for one in told if one["type"].endswith("item.done")] == ["incomplete", "completed"]
    usage = told[-1]["response"]["usage"]
    assert (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]) == (10, 7, 4)
    whole = completion({"id": "c"}, [telling.response()], False)
    assert whole["choices"][0]["message"]["content"] == "Yes, it is."


def test_a_call_that_was_cut_off_is_not_kept():
    _, telling = lost_in('<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>', "\n<tool_call>")
    assert [item["status"] for item in telling.output] == ["incomplete", "completed"]
    assert [one["type"] for one in telling.kept] == ["message"]


def test_a_stream_of_chunks_which_can_take_nothing_back_ends_with_an_error():
    told, _ = lost_in("Yes, it")
    chunks = Chatting({}, 0).chunks(told)
    said = [chunk["choices"][0]["delta"].get("content") for chunk in chunks if "choices" in chunk]
    assert said == ["", "Yes, it"]
    assert chunks[-1]["error"]["code"] == "answer_begun_anew"


def test_an_answer_of_which_nothing_was_told_is_told_as_any_other():
    told, telling = lost_in()
    chunks = Chatting({}, 0).chunks(told)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Yes, it is."
    assert len(telling.output) == 1
