"""The OpenAI Agents SDK: an agent with a function, which looks and then answers."""

import asyncio
import os

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def look(place: str) -> str:
    """Look at a place."""
    print("looks at", place)
    return "Fog."


async def main() -> None:
    set_tracing_disabled(True)
    async with AsyncOpenAI(max_retries=8) as client:
        keeper = Agent(
            name="keeper",
            instructions="Look, then answer.",
            model=OpenAIResponsesModel(os.environ["MODEL"], client),
            tools=[look],
            model_settings=ModelSettings(tool_choice="look", temperature=0, max_tokens=40),
        )
        run = await Runner.run(keeper, "How is the pier?", max_turns=3)
        print("turns:", len(run.raw_responses))
        print("cached:", run.raw_responses[-1].usage.input_tokens_details.cached_tokens)
        print("answer:", run.final_output)


asyncio.run(main())
