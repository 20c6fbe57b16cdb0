"""A real MCP server, written with the official library: `python mcp_server.py stdio`, or `http PORT_FILE`.

Runs in a process of its own, in a sandbox too, with nothing else of ours.
"""

import os
import socket
import sys
import time

import uvicorn
from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("counting")
said: list[str] = []


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return f"{a} + {b} = {a + b}"


@server.tool()
def again(word: str) -> str:
    """Say a word, and how often this server was asked to."""
    said.append(word)
    with open(os.environ["COUNT_FILE"], "a") as f:
        f.write(word + "\n")
    return f"{word} {len(said)}"


@server.tool()
def secret() -> str:
    """Tell a secret."""
    return f"it is {os.environ['SECRET_WORD']}"


@server.tool()
def picture() -> Image:
    """Draw."""
    return Image(data=bytes(300), format="png")


@server.tool()
def long(characters: int) -> str:
    """Say much."""
    return "x" * characters


@server.tool()
def hang() -> str:
    """Never answer."""
    time.sleep(600)
    return "late"


@server.tool()
def wait() -> str:
    """Answer when a file is there."""
    while not os.path.exists(os.environ["GO_FILE"]):
        time.sleep(0.02)
    return again("waited")


@server.tool()
def die() -> str:
    """End the server."""
    print("last words", file=sys.stderr, flush=True)
    os._exit(7)


@server.tool(name="no name.")
def unnamed() -> str:
    """Its name cannot be called."""
    return ""


def serve_http(port_file: str) -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    with open(port_file + ".part", "w") as f:
        f.write(str(sock.getsockname()[1]))
    os.replace(port_file + ".part", port_file)
    uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="error")).run([sock])


if __name__ == "__main__":
    while (gate := os.environ.get("START_AFTER")) and not os.path.exists(gate):
        time.sleep(0.02)
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        serve_http(sys.argv[2])
