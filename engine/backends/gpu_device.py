"""The device of the GPU backend, and whether a model fits: answers in sentences, before anything is allocated."""

from __future__ import annotations

import torch

from engine.backends.memory import pool_memory
from engine.errors import BackendUnavailable, RequestError
from engine.facts import ModelFacts
from engine.kernels.target import INTERPRETED
from engine.precision import Precision

LEAST_CAPABILITY = (8, 0)
_WORKSPACE_BYTES = 1 << 30  # graphs, partial results, cuBLAS-free: what a step needs beside weights and pages


def open_device() -> torch.device:
    """The CUDA device, or the CPU where kernels are interpreted. Raises BackendUnavailable with what is missing."""
    if INTERPRETED:
        return torch.device("cpu")
    reason = why_not()
    if reason is not None:
        raise BackendUnavailable(f"the triton backend needs a GPU: {reason}")
    return torch.device("cuda", torch.cuda.current_device())


def why_not() -> str | None:
    """Why no GPU can be used here; None where one can. Nothing is allocated on it."""
    hip = torch.version.hip is not None
    if torch.version.cuda is None and not hip:
        return f"this PyTorch ({torch.__version__}) is built for CPUs only; install a CUDA build of it"
    try:
        count = torch.cuda.device_count()
        if count == 0 or not torch.cuda.is_available():
            return "PyTorch sees no device; check that nvidia-smi lists one and that its driver is new enough"
        capability = torch.cuda.get_device_capability()
    except (RuntimeError, AssertionError) as error:
        return f"the driver does not answer: {str(error).splitlines()[0]}"
    return None if hip else too_old(torch.cuda.get_device_name(), capability)


def too_old(name: str, capability: tuple[int, int]) -> str | None:
    """Why a device of this compute capability cannot be used."""
    if capability >= LEAST_CAPABILITY:
        return None
    least = ".".join(map(str, LEAST_CAPABILITY))
    return f"{name} has compute capability {capability[0]}.{capability[1]}; {least} (A100 and later) is needed for bf16"


def check_memory(
    device: torch.device, facts: ModelFacts, pool_blocks: int, weights_bytes: int, precision: Precision
) -> None:
    """Raises RequestError (bad_request) where pool, weights and workspace are more than the device has free."""
    page = facts.page_bytes(str(precision))
    pool = pool_blocks * page
    if device.type != "cuda":
        pool_memory(pool).close()
        return
    free, _ = torch.cuda.mem_get_info(device)
    must_fit(free, pool, weights_bytes, page)


def must_fit(free: int, pool: int, weights: int, page: int) -> None:
    """As `check_memory`, of sizes in bytes."""
    if pool + weights + _WORKSPACE_BYTES <= free:
        return
    room = max(0, free - weights - _WORKSPACE_BYTES) // page * 16
    remedy = f"lower --kv-tokens (TENUTO_KV_TOKENS): {room} would fit" if room else "take a smaller model"
    raise RequestError(
        "bad_request",
        f"the GPU has {free / 1e9:.1f} GB free; the weights take {weights / 1e9:.1f}, a step"
        f" {_WORKSPACE_BYTES / 1e9:.1f} and the KV pool {pool / 1e9:.1f}: {remedy}",
    )
