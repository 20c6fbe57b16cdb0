"""A shepherd that a tool kills while the agent talks to it."""

from __future__ import annotations

import os
import signal
import socket
import sys

import pytest

from sandbox.agent.shepherd import Shepherd

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="packets in order over a socket pair")


def test_one_that_is_killed_before_it_reads_its_order_has_started_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shepherd = Shepherd({"limits": {}, "nice": 0})
    os.kill(shepherd.pid, signal.SIGSTOP)
    os.waitpid(shepherd.pid, os.WUNTRACED)
    send_fds = socket.send_fds

    def sent_and_killed(*arguments: object) -> int:
        sent = send_fds(*arguments)  # type: ignore[arg-type]
        os.kill(shepherd.pid, signal.SIGKILL)
        os.waitpid(shepherd.pid, 0)
        return sent

    monkeypatch.setattr(socket, "send_fds", sent_and_killed)
    assert shepherd.start(b'[["true"], {}, "/"]', None) is None
    shepherd.line.close()
