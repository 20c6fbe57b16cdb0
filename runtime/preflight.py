"""What can be known to fail before anything is started, made or downloaded. Every refusal is one sentence.

`check_machine` comes before a model is fetched, `check_model` after it; both block, and both change nothing.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
from typing import Final
from urllib.parse import parse_qs, urlsplit

import asyncpg
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from engine import ModelFileError, models
from engine.modelfile import open_model
from engine.tokens import load_chat_format
from runtime import prices
from runtime.errors import MigrationError, PortTaken, StartupError
from runtime.home import check_alone
from runtime.migrate import check_schema
from runtime.seats import seats
from runtime.settings import Settings
from sandbox import choose

# A new home holds a database cluster (65 MB), the sandboxes' image (130 MB) and a first write-ahead log.
NEW_HOME_BYTES: Final = 320 * 2**20
KEPT_FREE_BYTES: Final = 64 * 2**20
ANSWER_WITHIN_S: Final = 5.0


def check_machine(settings: Settings) -> None:
    """The home, its disk, port, prices, sandbox, and every address that was given. Raises StartupError and kin."""
    check_alone(settings)
    seats(settings)
    prices.load(settings.prices)
    if settings.api_port:
        check_listen(settings.api_host, settings.api_port)
    check_space(settings)
    check_sandbox(settings)
    check_volumes(settings)
    asyncio.run(_check_addresses(settings))


def check_model(settings: Settings) -> None:
    """That the model is here and whole, and that its tokenizer and chat template work. Raises engine.ModelError.

    The template of a catalogue model is known by the file's hash, so for those the header and tensor table suffice.
    """
    if settings.external is not None:  # the engine process asks the server, and waits for one that is away
        return
    path = settings.model_path
    try:
        with open_model(path) as model:
            model.facts()
    except (OSError, OverflowError, MemoryError) as error:
        raise ModelFileError(f"{path} cannot be read as a model: {error}") from error
    if settings.call_format != "auto" or settings.model not in {entry.name for entry in models()}:
        load_chat_format(path, settings.call_format)


def check_sandbox(settings: Settings) -> None:
    """That tools can run here. Raises StartupError with what to install."""
    choice = choose(settings.sandbox)
    if choice.backend is not None:
        return
    reasons = "; ".join(_said(reason) for reason in choice.reasons)
    if settings.sandbox is None:
        raise StartupError(f"no tool can run here: {reasons}; install bubblewrap, or start Docker")
    raise StartupError(
        f"TENUTO_SANDBOX is {settings.sandbox}, and no tool can run in it: {reasons}; mend that, or set"
        " TENUTO_SANDBOX=auto"
    )


def check_volumes(settings: Settings) -> None:
    """That what is opened to tools is there: without it no sandbox could be made. Raises StartupError."""
    for volume in settings.sandbox_volumes:
        if not volume.source.is_dir():
            raise StartupError(
                f"TENUTO_SANDBOX_VOLUMES opens {volume.source} at {volume.target}, and there is no such directory here;"
                " make it, or take it out of the list"
            )


def check_listen(host: str, port: int) -> None:
    """That a server can listen there; port 0 asks about the host alone. Raises PortTaken, StartupError."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            # As servers do: an address that is only waiting to expire may be used again.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(
                f"port {port} on {host} is taken; set TENUTO_API_PORT to another one, or to 0 for any"
            ) from error
        raise StartupError(
            f"TENUTO_API_HOST is {host!r} and the port {port}, where this machine cannot listen ({error.strerror});"
            " 127.0.0.1 always works with a port above 1023"
        ) from error


def check_space(settings: Settings) -> None:
    """That the home can be written and has room. Raises StartupError with how much is missing and where."""
    place = next(path for path in (settings.home, *settings.home.parents) if path.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise StartupError(f"TENUTO_HOME is {settings.home}, which cannot be used: {place} cannot be written to")
    is_new = settings.postgres_dsn is None and not (settings.postgres_dir / "data" / "PG_VERSION").exists()
    needed = NEW_HOME_BYTES if is_new else KEPT_FREE_BYTES
    free = shutil.disk_usage(place).free
    if free < needed:
        raise StartupError(
            f"TENUTO_HOME is {settings.home}, where {free >> 20} MiB are free and {needed >> 20} MiB are needed;"
            " make room, or choose another TENUTO_HOME"
        )
    _check_arena_space(settings)


def _check_arena_space(settings: Settings) -> None:
    """The arena is a sparse file in memory: a page of it that finds no room would kill the engine later."""
    place = next(path for path in (settings.arena_dir, *settings.arena_dir.parents) if path.exists())
    held = settings.host_arena.stat().st_blocks * 512 if settings.host_arena.exists() else 0
    room = shutil.disk_usage(place).free + held
    if settings.host_kv_bytes > room:
        raise StartupError(
            f"TENUTO_HOST_KV_BYTES is {settings.host_kv_bytes >> 20} MiB, and {place} has room for {room >> 20} MiB;"
            f" set TENUTO_HOST_KV_BYTES={max(room // 2 >> 20, 1)}M, or give {place} more"
        )


# --- addresses that were given -------------------------------------------------------------------------------------


async def _check_addresses(settings: Settings) -> None:
    if settings.postgres_dsn is not None:
        await check_postgres(settings.postgres_dsn)
    if settings.temporal_address is not None:
        await check_temporal(settings.temporal_address, settings.temporal_namespace)
    if settings.engine_address is not None:
        await check_engine(settings.engine_address)


async def check_postgres(dsn: str) -> None:
    """That a Postgres answers whose schema this release can use. Raises StartupError, MigrationError."""
    try:
        await asyncio.wait_for(check_schema(dsn), ANSWER_WITHIN_S)
    except MigrationError as error:
        raise MigrationError(f"TENUTO_POSTGRES_DSN names {_shown(dsn)}: {error}") from error
    except (asyncpg.PostgresError, asyncpg.InterfaceError, ValueError) as error:
        raise StartupError(
            f"TENUTO_POSTGRES_DSN names {_shown(dsn)}, which refuses: {_said(error)}; correct it, or unset it and"
            " Tenuto starts a Postgres of its own"
        ) from error
    except (OSError, TimeoutError) as error:
        raise StartupError(
            f"TENUTO_POSTGRES_DSN names {_shown(dsn)}, where no Postgres answers ({_said(error)}); start it, or unset"
            " the variable and Tenuto starts one of its own"
        ) from error


async def check_temporal(address: str, namespace: str) -> None:
    """That a Temporal answers which has the namespace. Raises StartupError."""
    try:
        await asyncio.wait_for(_ask_temporal(address, namespace), ANSWER_WITHIN_S)
    except RPCError as error:
        if error.status == RPCStatusCode.NOT_FOUND:
            raise StartupError(
                f"Temporal at {address} has no namespace {namespace!r}; make it, or set TENUTO_TEMPORAL_NAMESPACE"
            ) from error
        raise _no_temporal(address, error) from error
    except (OSError, OverflowError, RuntimeError, TimeoutError) as error:
        raise _no_temporal(address, error) from error


async def _ask_temporal(address: str, namespace: str) -> None:
    await _reach(address)  # its error is one line, that of the client is a page
    client = await Client.connect(address, namespace=namespace)
    await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace=namespace))


def _no_temporal(address: str, error: Exception) -> StartupError:
    return StartupError(
        f"TENUTO_TEMPORAL_ADDRESS is {address}, where no Temporal answers ({_said(error)}); start it, or unset the"
        " variable and Tenuto starts one of its own"
    )


async def check_engine(address: str) -> None:
    """That something listens where an engine should. Raises StartupError."""
    try:
        await asyncio.wait_for(_reach(address), ANSWER_WITHIN_S)
    except (OSError, OverflowError, TimeoutError) as error:
        raise StartupError(
            f"TENUTO_ENGINE_ADDRESS is {address}, where no engine answers ({_said(error)}); start it, or unset the"
            " variable and Tenuto starts one of its own"
        ) from error


async def _reach(address: str) -> None:
    """Connects to host:port or the path of a socket, and hangs up. Raises OSError, OverflowError."""
    if address.startswith("/"):
        _, writer = await asyncio.open_unix_connection(address)
    else:
        host, _, port = address.rpartition(":")
        _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    writer.close()


def _shown(dsn: str) -> str:
    """Where a DSN leads, without its user and password: errors end up in logs."""
    try:
        parts = urlsplit(dsn)
        host = parts.hostname or parse_qs(parts.query).get("host", ["localhost"])[0]
        return f"{host}:{parts.port or 5432}{parts.path}"
    except ValueError:
        return "an address that cannot be read"


def _said(error: Exception | str) -> str:
    """In one line that goes on; asyncpg and gRPC use several."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return " ".join(str(error).split())[:200].rstrip(".;?! ") or f"nothing within {ANSWER_WITHIN_S:.0f} s"
