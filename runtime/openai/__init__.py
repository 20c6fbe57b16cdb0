"""OpenAI's requests and answers, as data: what a request asks of a session, and what a session's events tell of it."""

from runtime.openai.chat import ChatIn
from runtime.openai.chatting import Chatting, completion
from runtime.openai.items import Chain, Items, as_engine, input_items, listed
from runtime.openai.requests import ConversationIn, ItemsIn, MetadataIn, ResponseIn
from runtime.openai.telling import Telling, usage_of
from runtime.openai.tools import Tools

__all__ = [
    "Chain",
    "ChatIn",
    "Chatting",
    "ConversationIn",
    "Items",
    "ItemsIn",
    "MetadataIn",
    "ResponseIn",
    "Telling",
    "Tools",
    "as_engine",
    "completion",
    "input_items",
    "listed",
    "usage_of",
]
