"""Chat formats: a transcript as token ids, every message tokenised once and appended.

The scaffold around contents comes from the template in the model's file, rendered once with markers for contents and
cut at them. The scaffold is tokenised with control tokens, contents without: what a user or a tool writes is never a
control token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from engine.errors import TemplateError
from engine.modelfile import ChatTemplate, open_model
from engine.tokens.formats import HERMES, CallFormat, format_named
from engine.tokens.grammar import Choice, Form, tool_grammar
from engine.tokens.incremental import CallEnded, Delta, MessageParser, TextDelta
from engine.tokens.scaffold import Scaffold, Template, learn
from engine.tokens.stops import StopText
from engine.tokens.values import Call, Parsed, ToolResult, ToolSpec
from engine.tokens.vocabulary import Tokenizer

_HERMES = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)


class ChatFormat:
    """How one model's transcripts are written.

    Immutable and thread-safe; `opening` may block ~100 ms the first time.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, bos: str = "", calls: CallFormat | None = None) -> None:
        """`calls`: how calls are written, whatever the template says of it. Raises TemplateError where it cannot be
        used, and where calls are given though it knows no tools."""
        self._tokenizer = tokenizer
        self.template = ChatTemplate(template, bos)
        self._template = Template(template, bos, self._eos_text())
        self.given_calls = calls
        self._scaffold: Scaffold = learn(self._template, calls)
        self._opening_text = lru_cache(maxsize=256)(self._render_opening)
        self.calls: CallFormat = self._scaffold.calls or HERMES
        tokens = {mark: tokenizer.encode(mark, allow_special=True) for mark in self.calls.marks}
        self._control = {mark: ids[0] for mark, ids in tokens.items() if len(ids) == 1 and tokenizer.is_control(ids[0])}

    @property
    def native_tools(self) -> bool:
        """Whether the template itself knows tools; if not, they are described in the system message."""
        return self._scaffold.native_tools

    def opening(self, system: str | None, tools: Sequence[ToolSpec] = ()) -> list[int]:
        """The start of a transcript. `system` None gives the template's own system message, if it has one."""
        if tools and not self.native_tools:
            listed = "".join("\n" + _tojson(tool.as_function()) for tool in tools)
            described = _HERMES.format(tools=listed)
            return self.opening(f"{system}\n\n{described}" if system else described)
        functions = tuple(_tojson(self._defanged(tool.as_function())) for tool in tools)
        parts = self._opening_text(system is not None, functions)
        return self._fill(parts, [system or ""] * (len(parts) - 1))

    def user(self, text: str) -> list[int]:
        return self._fill(self._scaffold.user, [text])

    def tool_results(self, results: Sequence[ToolResult]) -> list[int]:
        """All results of one assistant message, in the order of its calls."""
        if not results:
            return []
        if not self.native_tools:
            return self.user("\n".join(f"<tool_response>\n{r.content}\n</tool_response>" for r in results))
        first, between, last = self._scaffold.tools
        parts = [first, *[between] * (len(results) - 1), last]
        return self._fill(parts, [self._scaffold.result(r.content) for r in results])

    def assistant_open(self) -> list[int]:
        """What makes the model speak."""
        return self._tokenizer.encode(self._scaffold.assistant_open, allow_special=True)

    def assistant_close(self, ended: bool = True) -> list[int]:
        """What follows an assistant message. `ended`: its last token is the model's eos; else an eos is added."""
        eos = [] if ended else [self._tokenizer.eos_token_ids[0]]
        return eos + self._tokenizer.encode(self._scaffold.assistant_close, allow_special=True)

    def assistant(self, text: str, calls: Sequence[Call] = ()) -> list[int]:
        """A whole assistant message that was not generated here, from opening to close."""
        pieces = self.calls.pieces([(call.name, call.arguments) for call in calls])
        ids = self._tokenizer.encode(text)
        ids += self._tokenizer.encode(self.calls.gap) if text and calls else []
        return self.assistant_open() + ids + self._marked(pieces) + self.assistant_close(ended=False)

    def tool_grammar(
        self, tools: Sequence[ToolSpec], choice: Choice, form: Form | None = None, parallel: bool | None = None
    ) -> str | None:
        """See `engine.tokens.grammar.tool_grammar`."""
        return tool_grammar(tools, choice, form, format=self.calls, parallel=parallel, control=self._control)

    def written(self, stops: Sequence[str] = ()) -> StopText:
        """What turns the ids of a generated message into its text, in which the marks of calls can be seen."""
        return StopText(self._tokenizer, stops, frozenset(self._control.values()))

    def parse_assistant(
        self, ids: Sequence[int], stops: Sequence[str] = (), tools: Collection[str] | None = None
    ) -> Parsed:
        """Text and calls of a generated message. A call cut short is left out and makes the message incomplete. One of
        `stops` ends it, and is not part of it. `tools`: see `MessageParser`."""
        watch = self.written(stops)
        text = watch.push(ids) + watch.finish()
        ended = watch.found is not None or (bool(ids) and ids[-1] in self._tokenizer.eos_token_ids)
        parser = MessageParser(self.calls, tools)
        told: list[Delta] = [*parser.push(text), *parser.finish()]
        said = "".join(delta.text for delta in told if isinstance(delta, TextDelta))
        calls = [delta.call for delta in told if isinstance(delta, CallEnded) and delta.call is not None]
        text = said.strip("\n") if calls or parser.broken else said
        return Parsed(text=text, calls=tuple(calls), complete=ended and not parser.broken)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _fill(self, parts: Sequence[str], contents: Sequence[str]) -> list[int]:
        ids = self._tokenizer.encode(parts[0], allow_special=True)
        for content, part in zip(contents, parts[1:], strict=True):
            ids += self._tokenizer.encode(content) + self._tokenizer.encode(part, allow_special=True)
        return ids

    def _marked(self, pieces: Iterable[tuple[str, bool]]) -> list[int]:
        """Calls as tokens: marks that the format writes itself are tokens of their own, if there are such."""
        marks = re.compile("(" + "|".join(map(re.escape, self.calls.marks)) + ")")
        cut = [
            (text, bool(index % 2))
            for piece, is_own in pieces
            for index, text in enumerate(marks.split(piece) if is_own and self.calls.marks else [piece])
        ]
        return [
            token
            for is_mark, group in groupby(cut, key=itemgetter(1))
            for token in self._tokenizer.encode("".join(text for text, _ in group), allow_special=is_mark)
        ]

    def _render_opening(self, has_system: bool, functions: tuple[str, ...]) -> tuple[str, ...]:
        return self._scaffold.opening(self._template, has_system, [json.loads(f) for f in functions])

    def _eos_text(self) -> str:
        return self._tokenizer.decode([self._tokenizer.eos_token_ids[0]], show_control=True)

    def _defanged(self, value: Any) -> Any:
        """Tool descriptions go through the template, so control tokens in them are broken up beforehand."""
        if isinstance(value, str):
            for text in (*self._tokenizer.control_texts(), *self.calls.marks):
                value = value.replace(text, f"{text[0]} {text[1:]}")
            return value
        if isinstance(value, dict):
            return {self._defanged(key): self._defanged(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._defanged(item) for item in value]
        return value


def load_chat_format(path: Path, calls: str = "auto") -> tuple[Tokenizer, ChatFormat]:
    """Tokenizer and chat format of a model, a file or a directory. `calls`: the name of the format in which calls are
    written; auto: as the template writes them. Raises ModelFileError or TemplateError."""
    with open_model(path) as model:
        template = model.chat_template()
        if template is None:
            raise TemplateError(f"{path} has no chat template; use an instruct model")
        tokenizer = model.tokenizer()
    return tokenizer, ChatFormat(tokenizer, template.text, template.bos, format_named(calls))


def _tojson(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
