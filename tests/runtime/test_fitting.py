import pytest

from engine.tokens import ToolResult, load_chat_format
from runtime.errors import InvalidRequest
from runtime.steps.fitting import fitted, shortened


@pytest.fixture(scope="module")
def chat(model_path):
    return load_chat_format(model_path)[1]


def result(text: str) -> ToolResult:
    return ToolResult("call_1", "bash", text)


@pytest.mark.model
def test_a_result_that_fits_is_told_whole(chat):
    results = [result("tide " * 50)]
    assert fitted(chat, results, 1000) == chat.tool_results(results)


@pytest.mark.model
@pytest.mark.parametrize("room", [200, 1000, 3000])
def test_results_of_any_size_are_shortened_to_the_room_there_is(chat, room):
    digits = "".join(str(i) for i in range(60_000))
    assert len(fitted(chat, [result(digits), result("short"), result("x y " * 9000)], room)) <= room


@pytest.mark.model
def test_a_context_without_room_is_refused_in_a_sentence(chat):
    with pytest.raises(InvalidRequest, match="the context is full"):
        fitted(chat, [result("tide " * 500)], 10)


def test_the_beginning_and_the_end_are_kept():
    text = shortened("begin" + "x" * 1000 + "end", 60)
    assert text.startswith("begin")
    assert text.endswith("end")
    assert "characters left out" in text
