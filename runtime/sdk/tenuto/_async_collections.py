"""What a tenant has beside sessions, as the asyncio client offers it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tenuto import _wire
from tenuto.models import _Open
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

if TYPE_CHECKING:
    from tenuto._async import AsyncClient

_T = TypeVar("_T", bound=_Open)


class _Collection:
    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def _all(self, kind: type[_T], path: str, **asked: Any) -> AsyncIterator[_T]:
        """Everything of a list, page by page."""
        query = _wire.given(**asked)
        while True:
            page = await self._client.get(path, query)
            for row in page["data"]:
                yield kind.model_validate(row)
            if not page["has_more"]:
                return
            query["after"] = page["last_id"]

    async def _delete(self, path: str) -> None:
        await self._client.delete(path)


class AsyncAgents(_Collection):
    """Agents: what sessions are made of, under a name, in versions that never change."""

    async def create(self, name: str, *, idempotency_key: str | None = None, **content: Any) -> Agent:
        """Make an agent: `system`, `tools`, `limits` and whatever else a session is made of, `description`,
        `metadata`. Raises APIError (409) where the name is taken."""
        body = {"name": name, **_wire.agent_body(content)}
        return Agent.model_validate(await self._client.post("/v1/agents", body, key=idempotency_key))

    def list(self, *, archived: bool = False) -> AsyncIterator[Agent]:
        """Every agent; with `archived`, those that are archived too."""
        return self._all(Agent, "/v1/agents", archived="true" if archived else None)

    async def get(self, name: str) -> Agent:
        """The agent, as its latest version says."""
        return Agent.model_validate(await self._client.get(f"/v1/agents/{_wire.segment(name)}"))

    async def revise(self, name: str, *, idempotency_key: str | None = None, **content: Any) -> AgentVersion:
        """Make the next version, of all that it is to say; what equals the latest one is that one."""
        path = f"/v1/agents/{_wire.segment(name)}/versions"
        return AgentVersion.model_validate(
            await self._client.post(path, _wire.agent_body(content), key=idempotency_key)
        )

    def versions(self, name: str) -> AsyncIterator[AgentVersion]:
        """Its versions, newest first."""
        return self._all(AgentVersion, f"/v1/agents/{_wire.segment(name)}/versions")

    async def version(self, name: str, number: int) -> AgentVersion:
        """One of its versions."""
        path = f"/v1/agents/{_wire.segment(name)}/versions/{number}"
        return AgentVersion.model_validate(await self._client.get(path))

    async def archive(self, name: str) -> Agent:
        """Make no more sessions of it; those that there are go on."""
        return Agent.model_validate(await self._client.post(f"/v1/agents/{_wire.segment(name)}/archive"))


class AsyncSchedules(_Collection):
    """Schedules: sessions of an agent, by cron or interval."""

    async def create(
        self,
        agent: str,
        message: str,
        *,
        cron: str | None = None,
        every_s: float | None = None,
        idempotency_key: str | None = None,
        **more: Any,
    ) -> Schedule:
        """Make one: `cron` with `time_zone`, or `every_s`; `jitter_s`, `overlap`, `catchup_s` and so on."""
        body = {"agent": agent, "message": message, **_wire.given(cron=cron, every_s=every_s), **more}
        return Schedule.model_validate(await self._client.post("/v1/schedules", body, key=idempotency_key))

    def list(self) -> AsyncIterator[Schedule]:
        """Every schedule."""
        return self._all(Schedule, "/v1/schedules")

    async def get(self, schedule_id: str) -> Schedule:
        """One of them, with when it fires next."""
        return Schedule.model_validate(await self._client.get(f"/v1/schedules/{_wire.segment(schedule_id)}"))

    async def change(self, schedule_id: str, **fields: Any) -> Schedule:
        """Change what is given, and nothing else."""
        return Schedule.model_validate(await self._client.patch(f"/v1/schedules/{_wire.segment(schedule_id)}", fields))

    async def pause(self, schedule_id: str) -> Schedule:
        """Fire no more until `unpause`."""
        return Schedule.model_validate(await self._client.post(f"/v1/schedules/{_wire.segment(schedule_id)}/pause"))

    async def unpause(self, schedule_id: str) -> Schedule:
        """Fire again."""
        return Schedule.model_validate(await self._client.post(f"/v1/schedules/{_wire.segment(schedule_id)}/unpause"))

    async def trigger(self, schedule_id: str, *, idempotency_key: str | None = None) -> ScheduleRun:
        """One run now, beside whatever runs."""
        path = f"/v1/schedules/{_wire.segment(schedule_id)}/trigger"
        return ScheduleRun.model_validate(await self._client.post(path, key=idempotency_key))

    def runs(self, schedule_id: str) -> AsyncIterator[ScheduleRun]:
        """Its runs, newest first."""
        return self._all(ScheduleRun, f"/v1/schedules/{_wire.segment(schedule_id)}/runs")

    async def delete(self, schedule_id: str) -> None:
        """It fires no more; sessions that it made stay."""
        await self._delete(f"/v1/schedules/{_wire.segment(schedule_id)}")


class AsyncSecrets(_Collection):
    """Secrets: values for tools' headers and env, by name."""

    async def set(self, name: str, value: str) -> Secret:
        """Make or replace one. Nothing shows the value again."""
        return Secret.model_validate(await self._client.put(f"/v1/secrets/{_wire.segment(name)}", {"value": value}))

    def list(self) -> AsyncIterator[Secret]:
        """Names, and when each was set and used last."""
        return self._all(Secret, "/v1/secrets")

    async def get(self, name: str) -> Secret:
        """When it was set and used last."""
        return Secret.model_validate(await self._client.get(f"/v1/secrets/{_wire.segment(name)}"))

    async def delete(self, name: str) -> None:
        """Remove it: calls that need it fail, and say so."""
        await self._delete(f"/v1/secrets/{_wire.segment(name)}")


class AsyncWebhooks(_Collection):
    """Webhooks: where events are sent."""

    async def create(
        self, url: str, types: Sequence[str], *, description: str = "", idempotency_key: str | None = None
    ) -> Webhook:
        """Send events of these types (`session.*`) there. `secret` of the answer is shown this once."""
        body = {"url": url, "types": [*types], "description": description}
        return Webhook.model_validate(await self._client.post("/v1/webhooks", body, key=idempotency_key))

    def list(self) -> AsyncIterator[Webhook]:
        """Every webhook."""
        return self._all(Webhook, "/v1/webhooks")

    async def get(self, webhook_id: str) -> Webhook:
        """One of them."""
        return Webhook.model_validate(await self._client.get(f"/v1/webhooks/{_wire.segment(webhook_id)}"))

    async def change(self, webhook_id: str, **fields: Any) -> Webhook:
        """Change `url`, `types`, `description` or `disabled`."""
        return Webhook.model_validate(await self._client.patch(f"/v1/webhooks/{_wire.segment(webhook_id)}", fields))

    async def rotate(
        self, webhook_id: str, *, overlap_s: float = 86_400, idempotency_key: str | None = None
    ) -> Webhook:
        """A new secret; deliveries are signed with both until `overlap_s` has passed."""
        path = f"/v1/webhooks/{_wire.segment(webhook_id)}/rotate"
        return Webhook.model_validate(await self._client.post(path, {"overlap_s": overlap_s}, key=idempotency_key))

    async def test(self, webhook_id: str) -> Delivery:
        """Send an event that tells of nothing."""
        return Delivery.model_validate(await self._client.post(f"/v1/webhooks/{_wire.segment(webhook_id)}/test"))

    def deliveries(self, webhook_id: str, *, state: str | None = None) -> AsyncIterator[Delivery]:
        """What was sent there or is to be, newest first."""
        return self._all(Delivery, f"/v1/webhooks/{_wire.segment(webhook_id)}/deliveries", state=state)

    async def replay(self, webhook_id: str, delivery_id: str) -> Delivery:
        """Send one again, with the same id and body."""
        path = f"/v1/webhooks/{_wire.segment(webhook_id)}/deliveries/{_wire.segment(delivery_id)}/replay"
        return Delivery.model_validate(await self._client.post(path))

    async def delete(self, webhook_id: str) -> None:
        """Send nothing there any more."""
        await self._delete(f"/v1/webhooks/{_wire.segment(webhook_id)}")


class AsyncKeys(_Collection):
    """API keys. All but `own` take a key of scope admin."""

    async def own(self) -> Key:
        """The key that this client uses."""
        return Key.model_validate(await self._client.get("/v1/keys/self"))

    async def create(
        self, *, tenant: str = "default", scope: str = "use", idempotency_key: str | None = None, **more: Any
    ) -> Key:
        """Make one: `name`, `expires_at`, `requests_per_minute`. `key` of the answer is shown this once."""
        body = {"tenant": tenant, "scope": scope, **more}
        return Key.model_validate(await self._client.post("/v1/admin/keys", body, key=idempotency_key))

    def list(self, *, tenant: str | None = None) -> AsyncIterator[Key]:
        """Newest first, those that do not work any more too."""
        return self._all(Key, "/v1/admin/keys", tenant=tenant)

    async def get(self, key_id: str) -> Key:
        """One of them."""
        return Key.model_validate(await self._client.get(f"/v1/admin/keys/{_wire.segment(key_id)}"))

    async def rotate(self, key_id: str, *, grace_s: int = 0, idempotency_key: str | None = None) -> Key:
        """A new key in the place of an old one, which works for `grace_s` more."""
        path = f"/v1/admin/keys/{_wire.segment(key_id)}/rotate"
        return Key.model_validate(await self._client.post(path, {"grace_s": grace_s}, key=idempotency_key))

    async def revoke(self, key_id: str) -> Key:
        """The key works no more."""
        return Key.model_validate(await self._client.post(f"/v1/admin/keys/{_wire.segment(key_id)}/revoke"))


class AsyncTenants(_Collection):
    """Tenants, for a key of scope admin."""

    async def create(
        self, tenant_id: str, *, quotas: Mapping[str, int | None] | None = None, idempotency_key: str | None = None
    ) -> Tenant:
        """Make one. Quotas: open_sessions, tokens_per_day, disk_bytes, sandboxes; None is any amount."""
        body = {"id": tenant_id, "quotas": dict(quotas or {})}
        return Tenant.model_validate(await self._client.post("/v1/admin/tenants", body, key=idempotency_key))

    def list(self) -> AsyncIterator[Tenant]:
        """Every tenant."""
        return self._all(Tenant, "/v1/admin/tenants")

    async def get(self, tenant_id: str) -> Tenant:
        """One of them."""
        return Tenant.model_validate(await self._client.get(f"/v1/admin/tenants/{_wire.segment(tenant_id)}"))

    async def limit(self, tenant_id: str, **quotas: int | None) -> Tenant:
        """Change the quotas that are given."""
        body = {"quotas": quotas}
        return Tenant.model_validate(await self._client.patch(f"/v1/admin/tenants/{_wire.segment(tenant_id)}", body))

    async def disable(self, tenant_id: str) -> Tenant:
        """Refuse its keys; its sessions stay open."""
        return Tenant.model_validate(await self._client.post(f"/v1/admin/tenants/{_wire.segment(tenant_id)}/disable"))

    async def enable(self, tenant_id: str) -> Tenant:
        """Its keys work again."""
        return Tenant.model_validate(await self._client.post(f"/v1/admin/tenants/{_wire.segment(tenant_id)}/enable"))


class AsyncUsage(_Collection):
    """What was used, and what it costs."""

    def list(
        self,
        *,
        group_by: str = "day",
        since: str | None = None,
        until: str | None = None,
        everybody: bool = False,
        tenant: str | None = None,
    ) -> AsyncIterator[UsageRow]:
        """By tenant, session, model or day, from `since` to `until` (a day or a time). `everybody`, or one `tenant`:
        for a key of scope admin."""
        path = "/v1/admin/usage" if everybody or tenant else "/v1/usage"
        asked = {"group_by": group_by, "from": since, "to": until, "tenant": tenant}
        return self._all(UsageRow, path, **asked)
