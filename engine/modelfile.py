"""A model on disk, whatever its format: a GGUF file or a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from engine.facts import ModelFacts
from engine.quantised import Groups

if TYPE_CHECKING:  # the tokens' side reads models through this
    from engine.tokens.vocabulary import Tokenizer

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, and the text of the token that a transcript begins with where the template writes one."""

    text: str
    bos: str = ""


class ModelFile(Protocol):
    """One model, open for reading. Parts of it are named alike in all formats, as `parts` lists them.

    Everything raises ModelFileError, in a sentence, for what is missing, damaged or of a kind that is not supported.
    """

    @property
    def path(self) -> Path: ...

    def facts(self) -> ModelFacts:
        """Dimensions, checked against the tensors that are there."""
        ...

    def digest(self) -> str:
        """sha256, in hex, of everything that the model is made of."""
        ...

    def values(self, part: str) -> Array:
        """A part in fp32, [outputs, inputs] or [width]; rows that are rotated are in rotate-half's order."""
        ...

    def groups(self, part: str) -> Groups:
        """A matrix in groups of 32 inputs, see `engine.quantised`. Raises ModelError where its rows are no whole
        number of groups."""
        ...

    def tokenizer(self) -> Tokenizer: ...

    def chat_template(self) -> ChatTemplate | None: ...

    def close(self) -> None: ...


def parts(facts: ModelFacts) -> dict[str, tuple[int, ...]]:
    """Part -> shape, of all that a model of these facts is made of; those of layer L begin with `L.`"""
    hidden, head = facts.hidden, facts.head_size
    whole: dict[str, tuple[int, ...]] = {"embed": (facts.vocab, hidden), "norm": (hidden,)}
    if not facts.tied_output:
        whole["head"] = (facts.vocab, hidden)
    layer = _latent_parts(facts) if facts.mla else _attention_parts(facts)
    layer |= {
        "attn_norm": (hidden,),
        "ffn_norm": (hidden,),
        "gate": (facts.ffn, hidden),
        "up": (facts.ffn, hidden),
        "down": (hidden, facts.ffn),
    }
    if facts.qk_norm:
        layer |= {"q_norm": (head,), "k_norm": (head,)}
    return whole | {f"{n}.{name}": shape for n in range(facts.layers) for name, shape in layer.items()}


def _attention_parts(facts: ModelFacts) -> dict[str, tuple[int, ...]]:
    widths = {"q": facts.query_width, "k": facts.kv_heads * facts.head_size, "v": facts.kv_heads * facts.head_size}
    shapes: dict[str, tuple[int, ...]] = {name: (width, facts.hidden) for name, width in widths.items()}
    if facts.qkv_bias:
        shapes |= {f"{name}_bias": (width,) for name, width in widths.items()}
    return shapes | {"o": (facts.hidden, facts.query_width)}


def _latent_parts(facts: ModelFacts) -> dict[str, tuple[int, ...]]:
    mla = facts.mla
    assert mla is not None
    query = facts.heads * (mla.nope_size + mla.rope_size)
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a": (mla.kv_rank + mla.rope_size, facts.hidden),
        "kv_a_norm": (mla.kv_rank,),
        "kv_b": (facts.heads * (mla.nope_size + mla.value_size), mla.kv_rank),
        "o": (facts.hidden, facts.heads * mla.value_size),
    }
    if mla.q_rank is None:
        return shapes | {"q": (query, facts.hidden)}
    return shapes | {"q_a": (mla.q_rank, facts.hidden), "q_a_norm": (mla.q_rank,), "q_b": (query, mla.q_rank)}


@contextmanager
def open_model(path: Path) -> Iterator[ModelFile]:
    """The model at `path`: a directory in Hugging Face's form, or a GGUF file. Raises ModelFileError."""
    from engine.ggufmodel import GgufModel
    from engine.huggingface import HuggingFaceModel

    model: ModelFile = HuggingFaceModel(path) if path.is_dir() else GgufModel(path)
    try:
        yield model
    finally:
        model.close()


def model_name(path: Path) -> str:
    """What a model is called where it has no name of its own: its directory's name, or its file's."""
    return path.name if path.is_dir() else path.stem
