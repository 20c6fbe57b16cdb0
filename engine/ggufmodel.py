"""A GGUF file as a model; see `engine.modelfile.ModelFile`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.facts import ModelFacts, read_facts
from engine.gguf import GgufFile
from engine.modelfile import ChatTemplate
from engine.quantised import Groups, read_groups

if TYPE_CHECKING:
    from engine.tokens.vocabulary import Tokenizer

Array = np.ndarray[Any, np.dtype[Any]]
_WHOLE = {"embed": "token_embd.weight", "head": "output.weight", "norm": "output_norm.weight"}
_LAYER = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o": "attn_output.weight",
    "ffn_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}


class GgufModel:
    """See `engine.modelfile.ModelFile`."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self._facts: ModelFacts | None = None

    @property
    def path(self) -> Path:
        return self._file.path

    def facts(self) -> ModelFacts:
        if self._facts is None:
            self._facts = read_facts(self._file)
        return self._facts

    def digest(self) -> str:
        return self._file.digest()

    def values(self, part: str) -> Array:
        value, order = self._file.tensor(_tensor_name(part)), self._order(part)
        return value.copy() if order is None else value[order]

    def groups(self, part: str) -> Groups:
        groups, order = read_groups(self._file, _tensor_name(part)), self._order(part)
        return groups if order is None else groups.rows(order)

    def tokenizer(self) -> Tokenizer:
        from engine.tokens.vocabulary import tokenizer_from

        return tokenizer_from(self._file)

    def chat_template(self) -> ChatTemplate | None:
        text = self._file.metadata.get("tokenizer.chat_template")
        return ChatTemplate(text) if isinstance(text, str) else None

    def close(self) -> None:
        self._file.close()

    def _order(self, part: str) -> Array | None:
        """GGUF stores q and k of the llama architecture for interleaved rope; this puts them back for rotate-half."""
        facts, name = self.facts(), part.split(".")[-1]
        if facts.arch != "llama" or name not in ("q", "k", "q_bias", "k_bias"):
            return None
        heads = facts.heads if name.startswith("q") else facts.kv_heads
        pairs = np.arange(heads * facts.head_size).reshape(heads, -1, 2)
        return pairs.swapaxes(1, 2).reshape(-1)


def _tensor_name(part: str) -> str:
    layer, dot, name = part.partition(".")
    return f"blk.{layer}.{_LAYER[name]}" if dot else _WHOLE[part]
