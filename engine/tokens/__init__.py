"""Text and token ids: tokenizer, chat format, tool grammars. Loads no torch."""

from engine.errors import ToolSchemaError
from engine.tokens.bytewise import byte_chat, may_go_on
from engine.tokens.chat import ChatFormat, load_chat_format
from engine.tokens.formats import FORMATS, CallFormat
from engine.tokens.grammar import MAX_PATTERN_CHARS, Form, check_grammar, tool_grammar
from engine.tokens.incremental import ArgumentsDelta, CallEnded, CallStarted, MessageParser, TextDelta
from engine.tokens.published import PublishedChat, publish_chat, read_chat
from engine.tokens.stops import StopText
from engine.tokens.values import Call, Parsed, ToolResult, ToolSpec, exact_json
from engine.tokens.vocabulary import StreamDecoder, Tokenizer, load_tokenizer

__all__ = [
    "FORMATS",
    "MAX_PATTERN_CHARS",
    "ArgumentsDelta",
    "Call",
    "CallEnded",
    "CallFormat",
    "CallStarted",
    "ChatFormat",
    "Form",
    "MessageParser",
    "Parsed",
    "PublishedChat",
    "StopText",
    "StreamDecoder",
    "TextDelta",
    "Tokenizer",
    "ToolResult",
    "ToolSchemaError",
    "ToolSpec",
    "byte_chat",
    "check_grammar",
    "exact_json",
    "load_chat_format",
    "load_tokenizer",
    "may_go_on",
    "publish_chat",
    "read_chat",
    "tool_grammar",
]
