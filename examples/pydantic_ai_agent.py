"""Pydantic AI: an answer of a type, and a conversation that goes on."""

import os

from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel


class Tide(BaseModel):
    """How high the water is."""

    metres: int = Field(ge=0, le=9)


agent = Agent(
    OpenAIChatModel(os.environ["MODEL"]), output_type=Tide, model_settings={"temperature": 0, "max_tokens": 60}
)
first = agent.run_sync("How high is it?")
print("metres:", first.output.metres)
again = agent.run_sync("And now?", message_history=first.all_messages())
print("metres:", again.output.metres)
print("cached:", again.usage.cache_read_tokens)
