import json

import pytest

from runtime.text import as_jsonb, fault


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("a\0b", "a\ufffdb"),
        ("\ud800x", "\ufffdx"),
        ("plain \\u0000 as text", "plain \\u0000 as text"),
        ("\\\0", "\\\ufffd"),
        ("größer 🌊", "größer 🌊"),
    ],
)
async def test_whatever_a_tool_prints_can_be_kept(db, value, kept):
    assert json.loads(as_jsonb({"x": [value]})) == {"x": [kept]}
    row = await db.fetchrow("SELECT $1::jsonb AS value", {"x": [value]})
    assert row["value"] == {"x": [kept]}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"content": "a\0"}, "content: must not contain the character NUL"),
        ({"tools": [{"command": ["x", "\0"]}]}, "tools.0.command.1: must not contain the character NUL"),
        ({"files": {"\ud800": ""}}, "a name in files: must not contain half of a surrogate pair"),
    ],
)
def test_text_that_cannot_be_kept_is_named(body, says):
    assert fault(body) == says


def test_ordinary_text_has_no_fault():
    assert fault({"content": "größer 🌊 \\u0000", "n": 1, "list": [None, True, 1.5]}) is None
