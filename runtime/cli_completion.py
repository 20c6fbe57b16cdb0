"""`tenuto completion`: what a shell needs to complete commands, options and the ids of sessions."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script for a shell: eval "$(tenuto completion bash)" in ~/.bashrc."""
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(ctx.find_root().command, {}, "tenuto", "_TENUTO_COMPLETE").source())
