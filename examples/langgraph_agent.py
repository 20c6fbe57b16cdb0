"""LangGraph: a model that is told to call, a node that runs the call, a model that answers."""

import os

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode


@tool
def look(place: str) -> str:
    """Look at a place."""
    print("looks at", place)
    return "Fog."


model = ChatOpenAI(model=os.environ["MODEL"], temperature=0, max_tokens=60)
graph = StateGraph(MessagesState)
graph.add_node(
    "call", lambda state: {"messages": [model.bind_tools([look], tool_choice="look").invoke(state["messages"])]}
)
graph.add_node("run", ToolNode([look]))
graph.add_node("answer", lambda state: {"messages": [model.bind_tools([look]).invoke(state["messages"])]})
for before, after in ((START, "call"), ("call", "run"), ("run", "answer")):
    graph.add_edge(before, after)
said = graph.compile().invoke({"messages": [("user", "How is the pier?")]})["messages"]
print("said:", [message.type for message in said])
print("cached:", said[-1].usage_metadata["input_token_details"]["cache_read"])
