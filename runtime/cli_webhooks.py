"""`tenuto webhooks`: addresses that are told of events."""

from __future__ import annotations

import json

import click
import tenuto

from runtime.cli_listing import AS_JSON, every, moment, segment, show, told


@click.group()
def webhooks() -> None:
    """Addresses that are told of events, with signatures as Standard Webhooks has them."""


@webhooks.command()
@click.argument("url")
@click.option("--type", "types", multiple=True, required=True, help="session.idle, session.*, … (several times)")
@click.option("--description", default="", help="For people.")
@AS_JSON
def create(url: str, types: tuple[str, ...], description: str, as_json: bool) -> None:
    """Make one. Its secret is shown now, and never again."""
    with tenuto.Client() as client:
        made = client.post("/v1/webhooks", {"url": url, "types": list(types), "description": description})
    told(made, as_json, f"{made['id']} is made; its secret, which is not shown again:\n{made['secret']}")


@webhooks.command("list")
@AS_JSON
def list_all(as_json: bool) -> None:
    """List them."""
    with tenuto.Client() as client:
        show(
            every(client, "/v1/webhooks"),
            as_json,
            ("webhook", "url", "types", "state"),
            lambda one: (
                one["id"],
                one["url"],
                ", ".join(one["types"]),
                f"disabled: {one['disabled_why']}" if one["disabled"] else "enabled",
            ),
        )


@webhooks.command()
@click.argument("webhook")
@AS_JSON
def delete(webhook: str, as_json: bool) -> None:
    """Remove one, with all that was still to be sent there."""
    with tenuto.Client() as client:
        told(client.delete(f"/v1/webhooks/{segment(webhook)}"), as_json, f"{webhook} is deleted")


@webhooks.command()
@click.argument("webhook")
@click.option("--overlap", "overlap_s", type=float, default=86_400, show_default=True, help="Seconds of both secrets.")
@AS_JSON
def rotate(webhook: str, overlap_s: float, as_json: bool) -> None:
    """Give one a new secret; the present one signs beside it for a while."""
    with tenuto.Client() as client:
        made = client.post(f"/v1/webhooks/{segment(webhook)}/rotate", {"overlap_s": overlap_s})
    told(made, as_json, f"the new secret, which is not shown again:\n{made['secret']}")


@webhooks.command()
@click.argument("webhook")
@AS_JSON
def enable(webhook: str, as_json: bool) -> None:
    """Send to one again; what happened meanwhile is not told."""
    with tenuto.Client() as client:
        told(client.patch(f"/v1/webhooks/{segment(webhook)}", {"disabled": False}), as_json, f"{webhook} is enabled")


@webhooks.command()
@click.argument("webhook")
@AS_JSON
def disable(webhook: str, as_json: bool) -> None:
    """Send nothing to one until it is enabled."""
    with tenuto.Client() as client:
        told(client.patch(f"/v1/webhooks/{segment(webhook)}", {"disabled": True}), as_json, f"{webhook} is disabled")


@webhooks.command()
@click.argument("webhook")
@AS_JSON
def test(webhook: str, as_json: bool) -> None:
    """Send an event that tells of nothing."""
    with tenuto.Client() as client:
        made = client.post(f"/v1/webhooks/{segment(webhook)}/test")
    told(made, as_json, f"{made['id']} is on its way; see `tenuto webhooks deliveries {webhook}`")


@webhooks.command()
@click.argument("webhook")
@click.option("--state", type=click.Choice(["pending", "delivered", "failed", "cancelled"]))
@AS_JSON
def deliveries(webhook: str, state: str | None, as_json: bool) -> None:
    """What was sent or is to be, newest first."""
    with tenuto.Client() as client:
        show(
            every(client, f"/v1/webhooks/{segment(webhook)}/deliveries", state=state),
            as_json,
            ("delivery", "type", "session", "state", "tries", "last answer", "next try"),
            lambda one: (
                one["id"],
                one["type"],
                one["session_id"] or "",
                one["state"],
                str(one["attempts"]),
                str(one["last_status"] or one["last_error"] or ""),
                moment(one["next_try_at"]) if one["next_try_at"] else "",
            ),
        )


@webhooks.command()
@click.argument("webhook")
@click.argument("delivery")
@AS_JSON
def replay(webhook: str, delivery: str, as_json: bool) -> None:
    """Send a delivery again, under the same id."""
    with tenuto.Client() as client:
        made = client.post(f"/v1/webhooks/{segment(webhook)}/deliveries/{segment(delivery)}/replay")
    click.echo(json.dumps(made) if as_json else f"{delivery} is sent again")
