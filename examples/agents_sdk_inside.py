"""The OpenAI Agents SDK with a model whose tools run at the server."""

import asyncio
import os

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI


async def main() -> None:
    set_tracing_disabled(True)
    async with AsyncOpenAI(max_retries=8) as client:
        model = OpenAIResponsesModel(os.environ["MODEL"], client)
        settings = ModelSettings(
            temperature=0, max_tokens=40, extra_body={"max_tool_calls": 1, "tool_choice": "required"}
        )
        run = await Runner.run(Agent(name="keeper", model=model, model_settings=settings), "Note it.", max_turns=1)
        (response,) = run.raw_responses
        print("items:", [item.type for item in response.output])
        print("response:", response.response_id)
        print("answer:", run.final_output)


asyncio.run(main())
