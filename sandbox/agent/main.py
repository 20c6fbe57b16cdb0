"""Where the agent starts: reads its configuration from an inherited file, then from nobody ever again."""

from __future__ import annotations

import json
import os
import socket
import sys

from .server import Agent, harden


def main() -> None:
    """argv: ... tenuto-agent HOME SANDBOX CONFIG, where CONFIG is a file descriptor or a path that is then removed."""
    source = sys.argv[-1]
    with open(int(source) if source.isdigit() else source, "rb") as f:
        config = json.load(f)
    if not source.isdigit():
        os.unlink(source)
    harden(config["seccomp"])
    if config["listen_fd"] is not None:
        listener = socket.socket(fileno=config["listen_fd"])
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(config["listen_path"])
        listener.listen(16)
    os.set_inheritable(listener.fileno(), False)
    os.umask(0o022)
    Agent(listener, config).run()
