"""A Hugging Face directory as a model: config.json, safetensors, tokenizer.json, a chat template.

Nothing in it is run, and no file outside it is named by one inside; links are followed, for the hub's cache is made of
them. See `engine.modelfile.ModelFile`.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import ModelFileError
from engine.facts import ModelFacts
from engine.families import facts_of, is_interleaved, tensor_name
from engine.modelfile import ChatTemplate, parts
from engine.quantised import Groups, grouped
from engine.safetensors import SafetensorsFile

if TYPE_CHECKING:
    from engine.tokens.vocabulary import Tokenizer

Array = np.ndarray[Any, np.dtype[Any]]
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_SHARDS = 1024
_MAX_JSON = {"config.json": 1 << 20, "generation_config.json": 1 << 20, "tokenizer.json": 1 << 26}
_MAX_OTHER = 1 << 24
_TEMPLATE = "chat_template.jinja"
_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", _TEMPLATE)
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors")


class HuggingFaceModel:
    """See `engine.modelfile.ModelFile`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._config = self.document("config.json")
        self._facts: ModelFacts | None = None
        self._shards: dict[str, SafetensorsFile] = {}
        try:
            self._places = self._open_shards()
        except ModelFileError:
            self.close()
            raise

    @property
    def path(self) -> Path:
        return self._path

    def facts(self) -> ModelFacts:
        if self._facts is None:
            size = sum(shard.size_bytes for shard in self._shards.values())
            try:
                facts = facts_of(self._config, size)
            except ModelFileError as error:
                raise ModelFileError(f"{self._path}: {error}") from error
            self._check_tensors(facts)
            self._facts = facts
        return self._facts

    def digest(self) -> str:
        """Of the names, the lengths and the bytes of all files that are read."""
        digest = hashlib.sha256()
        for name in sorted([*_FILES, *self._shards]):
            path = self._path / name
            if not path.is_file():
                continue
            digest.update(f"{name}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                while chunk := file.read(8 * 1024 * 1024):
                    digest.update(chunk)
        return digest.hexdigest()

    def values(self, part: str) -> Array:
        value, order = self._tensor(tensor_name(part)), self._order(part)
        return value.copy() if order is None else value[order]

    def groups(self, part: str) -> Groups:
        return grouped(part, self.values(part))

    def tokenizer(self) -> Tokenizer:
        from engine.tokens.document import tokenizer_of

        document, written = self.document("tokenizer.json"), self.document("tokenizer_config.json", needed=False)
        generation = self.document("generation_config.json", needed=False)
        ends = [generation.get("eos_token_id"), self._config.get("eos_token_id")]
        return tokenizer_of(self._path, document, _text_of(written.get("eos_token")), ends, self.facts().vocab)

    def chat_template(self) -> ChatTemplate | None:
        """Of several templates, the one that is called default."""
        written = self.document("tokenizer_config.json", needed=False)
        text: Any = written.get("chat_template")
        if isinstance(text, list):
            text = next((t.get("template") for t in text if isinstance(t, dict) and t.get("name") == "default"), None)
        if (self._path / _TEMPLATE).is_file():
            text = self._read(_TEMPLATE)
        return ChatTemplate(text, _text_of(written.get("bos_token"))) if isinstance(text, str) else None

    def close(self) -> None:
        for shard in self._shards.values():
            shard.close()

    def document(self, name: str, needed: bool = True) -> dict[str, Any]:
        """A JSON file of the directory; {} where one that is not needed is not there."""
        if not needed and not (self._path / name).is_file():
            return {}
        try:
            value = json.loads(self._read(name))
        except (ValueError, RecursionError) as error:
            raise ModelFileError(f"{self._path / name} is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ModelFileError(f"{self._path / name} is not a JSON object")
        return value

    # -- inside ---------------------------------------------------------------------------------------------------

    def _read(self, name: str) -> str:
        path, most = self._path / name, _MAX_JSON.get(name, _MAX_OTHER)
        try:
            with path.open("rb") as file:
                data = file.read(most + 1)
        except OSError as error:
            raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error
        if len(data) > most:
            raise ModelFileError(f"{path} has more than the {most} bytes that are sensible")
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{path} is not text: {error}") from error

    def _open_shards(self) -> dict[str, SafetensorsFile]:
        """Tensor -> the file that holds it."""
        index = self._index()
        for name in sorted({_ONE} if index is None else set(index.values())):
            self._shards[name] = SafetensorsFile(self._path / name)
        places: dict[str, SafetensorsFile] = {}
        for shard in self._shards.values():
            for tensor in shard.tensors:
                if tensor in places:
                    raise ModelFileError(f"{self._path}: tensor {tensor!r} is in two files")
                places[tensor] = shard
        for tensor, name in (index or {}).items():
            if places.get(tensor) is not self._shards[name]:
                raise ModelFileError(f"{self._path}: tensor {tensor!r} is not in {name}, where {_INDEX} has it")
        return places

    def _index(self) -> dict[str, str] | None:
        """Tensor -> file name, of a model in several files; None: it is in one."""
        if (self._path / _ONE).is_file():
            return None
        if not (self._path / _INDEX).is_file():
            pickled = any(self._path.glob("*.bin")) or any(self._path.glob("*.pt*"))
            hint = "; pickled weights are not read, save them as safetensors" if pickled else ""
            raise ModelFileError(f"{self._path} has neither {_ONE} nor {_INDEX}{hint}")
        index = self.document(_INDEX).get("weight_map")
        if not isinstance(index, dict) or not index or len(set(map(str, index.values()))) > _MAX_SHARDS:
            raise ModelFileError(f"{self._path / _INDEX} has no 'weight_map' of 1 to {_MAX_SHARDS} files")
        for name in index.values():
            if not isinstance(name, str) or not _SHARD_NAME.fullmatch(name):
                raise ModelFileError(f"{self._path / _INDEX} names the file {name!r}, which is not one beside it")
        return index

    def _check_tensors(self, facts: ModelFacts) -> None:
        """Raise ModelFileError for the first tensor that is missing, extra or of another shape."""
        expected = {tensor_name(part): shape for part, shape in parts(facts).items()}
        for name, shape in expected.items():
            if name not in self._places:
                raise ModelFileError(f"{self._path}: tensor {name!r} is missing from a {facts.arch} model")
            found = self._places[name].tensors[name].shape
            if found != shape:
                raise ModelFileError(
                    f"{self._path}: {name!r} is {list(found)}, a {facts.arch} model of this size needs {list(shape)}"
                )
        extra = sorted(name for name in set(self._places) - set(expected) if not _is_spare(name, facts))
        if extra:
            raise ModelFileError(
                f"{self._path}: tensor {extra[0]!r} is not part of the {facts.arch} models that are supported"
            )

    def _tensor(self, name: str) -> Array:
        return self._places[name].tensor(name)

    def _order(self, part: str) -> Array | None:
        """DeepSeek stores what is rotated as neighbouring pairs; this puts it in rotate-half's order."""
        mla, name = self.facts().mla, part.split(".")[-1]
        if mla is None or name not in ("q", "q_b", "kv_a") or not is_interleaved(self._config):
            return None
        still = mla.kv_rank if name == "kv_a" else mla.nope_size
        heads = 1 if name == "kv_a" else self.facts().heads
        head = np.concatenate([np.arange(still), still + np.arange(mla.rope_size).reshape(-1, 2).T.reshape(-1)])
        order: Array = (np.arange(heads)[:, None] * len(head) + head).reshape(-1)
        return order


def _is_spare(name: str, facts: ModelFacts) -> bool:
    """Whether a tensor may be there without being used: a copy of a tied head, old tables, layers that guess ahead."""
    layer = re.match(r"model\.layers\.(\d{1,6})\.", name)
    ahead = layer is not None and int(layer[1]) >= facts.layers and facts.mla is not None
    return ahead or (facts.tied_output and name == "lm_head.weight") or name.endswith("rotary_emb.inv_freq")


def _text_of(token: object) -> str:
    """A special token as tokenizer_config.json writes it: its text, or a mapping around it; "" where there is none."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
