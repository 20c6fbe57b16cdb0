"""`tenuto up` whose node and api reach Postgres and Temporal through bridges that a bench can cut.

python -m bench.cut_stack --node-postgres PORT --node-temporal PORT --api-postgres PORT
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import click

from runtime.settings import Settings
from runtime.up import COMPONENTS, Component, Stack, up


@click.command()
@click.option("--node-postgres", type=int, required=True)
@click.option("--node-temporal", type=int, required=True)
@click.option("--api-postgres", type=int, required=True)
def main(node_postgres: int, node_temporal: int, api_postgres: int) -> None:
    """Run until a signal; events as JSON lines, as `tenuto up --json` has them."""
    node = {"postgres_dsn": _dsn(node_postgres), "temporal_address": f"127.0.0.1:{node_temporal}"}
    bridged = {"node": node, "api": {"postgres_dsn": _dsn(api_postgres)}}
    components = [_through(one, bridged.get(one.__name__.rstrip("s"), {})) for one in COMPONENTS]
    asyncio.run(up(Settings.load(), _tell, components=components))


def _dsn(port: int) -> str:
    return f"postgresql://tenuto@127.0.0.1:{port}/tenuto?sslmode=disable"


def _through(component: Any, addresses: dict[str, Any]) -> Component:
    """The component, started with other addresses than those that the stack tells everybody else."""

    async def start(stack: Stack) -> None:
        usual = {name: getattr(stack.settings, name) for name in addresses}
        stack.settings = dataclasses.replace(stack.settings, **addresses)
        try:
            await component(stack)
        finally:
            stack.resolve(**usual)

    return start


def _tell(kind: str, **data: Any) -> None:
    click.echo(json.dumps({"kind": kind, **data}))


if __name__ == "__main__":
    main()
