"""Temporal's own plugin for the OpenAI Agents SDK: the agent is a workflow, each call of the model an activity."""

import asyncio
import os
from datetime import timedelta

from agents import Agent, ModelSettings, OpenAIProvider, Runner, set_tracing_disabled
from openai import AsyncOpenAI
from temporalio import workflow
from temporalio.client import Client
from temporalio.openai_agents import ModelActivityParameters, OpenAIAgentsPlugin
from temporalio.worker import Worker


@workflow.defn
class Keeper:
    @workflow.run
    async def run(self, model: str) -> str:
        keeper = Agent(name="keeper", model=model, model_settings=ModelSettings(temperature=0, max_tokens=200))
        return str((await Runner.run(keeper, "Say hello.")).final_output)


async def main() -> None:
    set_tracing_disabled(True)
    async with AsyncOpenAI(max_retries=0) as openai:  # Temporal tries again
        plugin = OpenAIAgentsPlugin(
            model_params=ModelActivityParameters(start_to_close_timeout=timedelta(minutes=2)),
            model_provider=OpenAIProvider(openai_client=openai),
        )
        client = await Client.connect(os.environ["TEMPORAL_ADDRESS"], plugins=[plugin])
        async with Worker(client, task_queue="keepers", workflows=[Keeper]):
            print(
                "answer:",
                await client.execute_workflow(Keeper.run, os.environ["MODEL"], id="keeper", task_queue="keepers"),
            )


if __name__ == "__main__":  # the workflow's sandbox reads this file again
    asyncio.run(main())
