"""`/v1/plan`: what a model needs and a device holds. Nothing is created, and nothing of this installation is asked."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import ConfigDict, Field

from engine.capacity import KV_BYTES, WEIGHT_BITS, Device, Plan, PlanError, Wish, devices, make_plan, read_config
from runtime.api.documented import Page, Shape
from runtime.api.guard import Tenant
from runtime.config import Body
from runtime.errors import InvalidRequest

router = APIRouter(prefix="/v1/plan", tags=["plan"])

Part = Annotated[float | None, Field(ge=0.001, le=1)]
Speed = Annotated[float | None, Field(ge=1e-6, le=1e6)]
Tokens = Annotated[int | None, Field(ge=1, le=1 << 28)]
_EXAMPLE: dict[str, Any] = {
    "config": {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
    },
    "device": "h100",
    "tp": 4,
    "context": 8192,
    "users": 500,
}


class PlanIn(Body):
    """The body of POST /v1/plan: a model's config.json, and what is wished for. What is left out is assumed, and the
    answer says what."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    config: dict[str, Any] = Field(max_length=1000, description="The content of a config.json.")
    name: str = Field(default="", max_length=200, description="What the answer calls the model.")
    device: str | None = Field(
        default=None, min_length=1, max_length=64, description="An id of GET /v1/plan/devices; null: h100."
    )
    tp: int | None = Field(default=None, ge=1, le=512)
    context: Tokens = None
    users: int | None = Field(default=None, ge=1, le=1_000_000_000)
    requests_per_second: float | None = Field(default=None, ge=1e-9, le=1e9)
    prompt_tokens: Tokens = None
    output_tokens: Tokens = None
    slo_ttft_s: float | None = Field(default=None, ge=1e-9, le=86_400)
    slo_tpot_s: float | None = Field(default=None, ge=1e-9, le=10)
    kv_dtype: str | None = Field(default=None, max_length=32, description=", ".join(KV_BYTES))
    weights_dtype: str | None = Field(default=None, max_length=32, description=", ".join(WEIGHT_BITS))
    util: Part = None
    overhead_gb: float | None = Field(default=None, ge=0, le=1e6)
    mfu: Part = None
    mbu: Part = None
    headroom: float | None = Field(default=None, ge=0, le=0.95)
    acceptance: float | None = Field(default=None, ge=0, le=1)
    draft_cost: float | None = Field(default=None, ge=0, le=10)
    host_gb_s: Speed = None
    nvme_gb_s: Speed = None
    dp_attention: bool = False
    beyond_context: bool = False


class DeviceOut(Shape):
    """A device with the figures that its maker publishes: bytes, bytes per second, dense FLOP per second; 0: none."""

    id: str
    object: Literal["device"] = "device"
    name: str
    hbm_bytes: int
    hbm_bps: float
    bf16_flops: float
    fp8_flops: float
    int8_flops: float
    link_bps: float
    host_bps: float
    node: int = Field(description="Devices in a machine.")
    domain: int = Field(description="Devices that reach one another at link_bps.")
    source: str
    price_per_hour: float


@router.post("")
async def make(body: PlanIn, tenant: Tenant) -> Plan:
    """What the model needs, how many users a replica holds, and what else follows. Nothing is created."""
    wished = body.model_dump(exclude={"config", "name"})
    try:
        return make_plan(read_config(body.config, body.name), Wish(**wished)).plan
    except PlanError as error:
        raise InvalidRequest(str(error), param=error.key, code="cannot_plan") from None


@router.get("/devices")
async def list_devices(tenant: Tenant) -> Page[DeviceOut]:
    """The devices that can be planned with."""
    data = [_shown(one) for one in devices()]
    return Page(data=data, first_id=data[0].id, last_id=data[-1].id)


def _shown(device: Device) -> DeviceOut:
    return DeviceOut(**vars(device))
