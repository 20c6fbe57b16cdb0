"""The arithmetic of memory and speed: what a model needs, what a device holds, and which of the two binds.

Nothing here loads a model or a tensor library: a config.json or the header of a GGUF file, and published figures, are
enough.
"""

from engine.capacity.devices import Device, device_named, devices, disk, measured_cpu
from engine.capacity.explain import Line, explain
from engine.capacity.facts import Group, KvHeads, ModelFacts, Parameters, QueryHeads, attention_group, latent_group
from engine.capacity.formulas import PAGE_TOKENS, kv_bytes_per_token, page_bytes, prefill_flops, session_bytes
from engine.capacity.models import model_facts
from engine.capacity.numbers import KV_BYTES, WEIGHT_BITS
from engine.capacity.plan import Planned, make_plan
from engine.capacity.plots import plots
from engine.capacity.read_config import parse_config, read_config
from engine.capacity.results import Plan
from engine.capacity.trace import TierSizes, TraceReport, read_trace
from engine.capacity.wish import Wish
from engine.errors import PlanError

__all__ = [
    "KV_BYTES",
    "PAGE_TOKENS",
    "WEIGHT_BITS",
    "Device",
    "Group",
    "KvHeads",
    "Line",
    "ModelFacts",
    "Parameters",
    "Plan",
    "PlanError",
    "Planned",
    "QueryHeads",
    "TierSizes",
    "TraceReport",
    "Wish",
    "attention_group",
    "device_named",
    "devices",
    "disk",
    "explain",
    "kv_bytes_per_token",
    "latent_group",
    "make_plan",
    "measured_cpu",
    "model_facts",
    "page_bytes",
    "parse_config",
    "plots",
    "prefill_flops",
    "read_config",
    "read_trace",
    "session_bytes",
]
