"""Which precisions there are below another one, on which backend. See engine.precision."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Smaller:
    """`factor`: bytes after the change, of those before it; `evals`: what to run after it."""

    setting: str
    factor: float
    evals: str


_EVAL = "python -m bench.eval --json"
_EVAL_FORMATS = "python -m bench.eval --formats --json"
_E4M3 = "+e4m3kv"


def kv_dtype(dtype: str, backend: str) -> Smaller | None:
    """Of the KV; None where nothing smaller runs."""
    if dtype == "fp32":
        return Smaller("TENUTO_ENGINE_DTYPE=bf16", 0.5, _EVAL)
    if backend == "triton" and not dtype.endswith(_E4M3):
        return Smaller("TENUTO_KV_DTYPE=e4m3", 0.5, _EVAL_FORMATS)
    return None


def weights_dtype(dtype: str, backend: str) -> Smaller | None:
    """Of the weights; None where nothing smaller runs."""
    base = dtype.removesuffix(_E4M3)
    if base == "fp32":
        return Smaller("TENUTO_ENGINE_DTYPE=bf16", 0.5, _EVAL)
    if backend == "cpu" and base == "bf16":
        return Smaller("TENUTO_ENGINE_DTYPE=w4a8", 0.5, _EVAL)  # embedding and head stay large in small models
    if backend == "triton" and base == "bf16":
        return Smaller("TENUTO_ENGINE_DTYPE=w4a16", 0.3, _EVAL_FORMATS)
    if backend == "triton" and base in ("w8a16", "w8a8"):
        return Smaller("TENUTO_ENGINE_DTYPE=w4a16", 0.55, _EVAL_FORMATS)
    return None


def prefill_dtype(dtype: str, backend: str) -> Smaller | None:
    """Of what is multiplied; `factor` is of the time: a device does twice as many products of half the width."""
    base = dtype.removesuffix(_E4M3)
    if backend == "cpu" and base in ("bf16", "fp32"):
        return Smaller("TENUTO_ENGINE_DTYPE=w4a8", 0.5, _EVAL)
    if backend == "triton" and base in ("bf16", "w4a16", "w8a16"):
        return Smaller("TENUTO_ENGINE_DTYPE=w8a8", 0.5, _EVAL_FORMATS)
    return None
