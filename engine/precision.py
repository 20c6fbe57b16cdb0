"""In which numbers a model's weights, its activations and its KV are kept."""

from __future__ import annotations

from dataclasses import dataclass

from engine.capacity import KV_BYTES

DTYPES = ("bf16", "fp32", "w4a8", "w4a16", "w8a16", "w8a8")
KV_DTYPES = ("auto", "e4m3")
QUANTISED = ("w4a16", "w8a16", "w8a8")  # made from bf16 weights as they are loaded onto a GPU
_KV = {"bf16": "bf16", "fp32": "fp32"} | dict.fromkeys(("w4a8", *QUANTISED), "bf16")  # what pages are kept in
_E4M3_KV = "+e4m3kv"


@dataclass(frozen=True)
class Precision:
    """`dtype`: of DTYPES; `kv`: of KV_DTYPES, where auto keeps pages in what the dtype computes in.

    w4a16 has weights in 4 bits, w8a16 and w8a8 in e4m3, w8a8 activations as well; see `engine.backends.gpu_weights`.
    """

    dtype: str = "bf16"
    kv: str = "auto"

    def __str__(self) -> str:
        """What identities and the model card say: the dtype alone, or bf16+e4m3kv and the like."""
        return self.dtype if self.kv == "auto" else self.dtype + _E4M3_KV

    @property
    def loaded(self) -> str:
        """The dtype of the weights as they are read and cached."""
        return "bf16" if self.dtype in QUANTISED else self.dtype

    @property
    def settings(self) -> str:
        """What was set so that only a GPU can do it; empty where other backends can."""
        kv = "--kv-dtype e4m3 (TENUTO_KV_DTYPE)" if self.kv == "e4m3" else ""
        weights = f"--dtype {self.dtype} (TENUTO_ENGINE_DTYPE)" if self.dtype in QUANTISED else ""
        return " and ".join(setting for setting in (weights, kv) if setting)


def kept_in(precision: str) -> str:
    """The numbers of the KV as `engine.capacity` calls them, by the precision's name. Raises KeyError for one that does
    not exist."""
    plain = _KV[precision.removesuffix(_E4M3_KV)]
    return "fp8" if precision.endswith(_E4M3_KV) else plain


def element_bytes(precision: str) -> int:
    """Bytes of a number of the KV. Raises KeyError as `kept_in`."""
    return KV_BYTES[kept_in(precision)]
