"""Transcripts for models whose tokens are not ours to count: a token is a byte, and control tokens frame messages.

A transcript in this format says all that a model server must be sent, and nothing else: `engine.external` reads the
messages and the tools back from it. Contents are never control tokens, so what is read is what was written.

    tools? system? { user | assistant | tool }*       each:  <|role|> bytes <|end|>
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from typing import Final

from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Bpe
from tokenizers.models import BPE

from engine.errors import ToolSchemaError
from engine.tokens.chat import ChatFormat
from engine.tokens.formats import HERMES
from engine.tokens.grammar import Choice, Form
from engine.tokens.values import ToolSpec
from engine.tokens.vocabulary import CONTROL, NORMAL, Tables, Tokenizer, byte_of

END: Final = "<|end|>"
ROLES: Final = ("tools", "system", "user", "assistant", "tool")
CALL, CALL_END = HERMES.marker, HERMES.end.strip()
CONTROLS: Final = (END, *(f"<|{role}|>" for role in ROLES), CALL, CALL_END)
ID: Final = {text: 256 + at for at, text in enumerate(CONTROLS)}
VOCAB_SIZE: Final = 256 + len(CONTROLS)

_TEMPLATE = """
{%- if tools %}{{ "<|tools|>" + (tools | tojson) + "<|end|>" }}{% endif -%}
{%- for message in messages -%}
{%- if message.role == "assistant" -%}
{{- "<|assistant|>" + message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) -}}
{{- "}\\n</tool_call>" -}}
{%- endfor -%}
{{- "<|end|>" -}}
{%- else -%}
{{- "<|" + message.role + "|>" + message.content + "<|end|>" -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ "<|assistant|>" }}{% endif -%}
"""


class ByteChat(ChatFormat):
    """The format for model servers. What is asked of an answer's form goes to them as it is."""

    def tool_grammar(
        self, tools: Sequence[ToolSpec], choice: Choice, form: Form | None = None, parallel: bool | None = None
    ) -> str | None:
        """In place of a grammar, what the server is to make of one, as JSON: `tool_choice`, `parallel_tool_calls` and
        `response_format` as its API has them."""
        asked: dict[str, object] = {}
        if tools:
            named = {"type": "function", "function": choice} if isinstance(choice, dict) else choice
            asked["tool_choice"] = named
            if parallel is not None:
                asked["parallel_tool_calls"] = parallel
        if form is not None:
            asked["response_format"] = _response_format(form)
        return json.dumps(asked) if asked else None


def may_go_on(sampled: Sequence[int]) -> bool:
    """Whether a server may go on with a message that was begun: it is text, and text alone."""
    try:
        return plain(bytes(sampled).decode())
    except ValueError:  # a control token, or half a code point
        return False


def plain(text: str) -> bool:
    """Whether there is something, and neither calls nor thoughts in it."""
    return bool(text.strip()) and CALL not in text and "<think>" not in text


def _response_format(form: Form) -> dict[str, object]:
    schema = form.schema
    if schema is None:
        raise ToolSchemaError("a model server takes no pattern for an answer; ask for JSON, or for text")
    if schema == {"type": "object"}:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": dict(schema), "strict": True}}


@cache
def byte_chat() -> tuple[Tokenizer, ByteChat]:
    """Tokenizer and chat format, the same for every model server. Blocking: ~100 ms the first time."""
    tokenizer = Tokenizer(_tables())
    return tokenizer, ByteChat(tokenizer, _TEMPLATE)


def _tables() -> Tables:
    alphabet = {value: char for char, value in byte_of().items()}
    tokens = [alphabet[value] for value in range(256)] + list(CONTROLS)
    return Tables(
        tokens=tokens,
        kinds=[NORMAL] * 256 + [CONTROL] * len(CONTROLS),
        pieces=[bytes([value]) for value in range(256)] + [text.encode() for text in CONTROLS],
        plain=_bpe(tokens),
        special=_bpe(tokens, special=True),
        eos=(ID[END],),
        unwritable=None,
        digest=hashlib.sha256("\0".join(("bytes", *CONTROLS)).encode()).hexdigest(),
    )


def _bpe(tokens: list[str], *, special: bool = False) -> Bpe:
    bpe = Bpe(BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    if special:
        bpe.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROLS])
    return bpe
