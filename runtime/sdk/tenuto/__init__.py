"""The Tenuto SDK: durable agent sessions that keep their KV while tools run.

```python
import tenuto

with tenuto.Client() as client, client.sessions.create(tools=["python"], limits={"max_think_tokens": 16}) as session:
    print(session.run("What is 12! ? Use Python.").text)
```
"""

from tenuto._async import AsyncClient
from tenuto._async_sessions import AsyncSession
from tenuto._async_turns import AsyncRunningTurn
from tenuto._sync import Client
from tenuto._sync_sessions import Session
from tenuto._sync_turns import RunningTurn
from tenuto._tool import Tool, tool
from tenuto._turns import TurnReader
from tenuto.errors import APIError, ConnectionFailed, NeedsAnswer, SessionFailed, TenutoError, ToolError
from tenuto.models import Event, File, Question, Ran, Receipt, SessionInfo, Turn
from tenuto.records import (
    Agent,
    AgentVersion,
    Delivery,
    Key,
    Schedule,
    ScheduleRun,
    Secret,
    Tenant,
    UsageRow,
    Webhook,
)

__all__ = [
    "APIError",
    "Agent",
    "AgentVersion",
    "AsyncClient",
    "AsyncRunningTurn",
    "AsyncSession",
    "Client",
    "ConnectionFailed",
    "Delivery",
    "Event",
    "File",
    "Key",
    "NeedsAnswer",
    "Question",
    "Ran",
    "Receipt",
    "RunningTurn",
    "Schedule",
    "ScheduleRun",
    "Secret",
    "Session",
    "SessionFailed",
    "SessionInfo",
    "Tenant",
    "TenutoError",
    "Tool",
    "ToolError",
    "Turn",
    "TurnReader",
    "UsageRow",
    "Webhook",
    "tool",
]
