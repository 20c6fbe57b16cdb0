"""The Tenuto SDK: durable agent sessions that keep their KV while tools run.

import tenuto

with tenuto.Client() as client:
    session = client.sessions.create(tools=["python"])
    print(session.run("What is 12! ? Use Python.").text)
"""

from tenuto._async import AsyncClient, AsyncSession
from tenuto._sync import Client, Session
from tenuto._wire import TurnReader
from tenuto.errors import APIError, ConnectionFailed, SessionFailed, TenutoError
from tenuto.models import Event, File, Question, Ran, Receipt, SessionInfo, Turn

__all__ = [
    "APIError",
    "AsyncClient",
    "AsyncSession",
    "Client",
    "ConnectionFailed",
    "Event",
    "File",
    "Question",
    "Ran",
    "Receipt",
    "Session",
    "SessionFailed",
    "SessionInfo",
    "TenutoError",
    "Turn",
    "TurnReader",
]
