"""What a family's function makes of a config, before what all families share is added."""

from __future__ import annotations

from dataclasses import dataclass

from engine.capacity.facts import Experts, KvHeads, QueryHeads
from engine.capacity.layers import Heads, Latent, Layer


@dataclass(frozen=True)
class Sketch:
    """`heads`: of the layers with attention, None where there are none. `tied`, `vocab`, `context`: where the config
    does not say. `extra_norm`: weights of norms outside of layers, beside the last one."""

    hidden: int
    heads: Heads | Latent | None
    layers: list[Layer]
    experts: Experts | None = None
    degrees: tuple[tuple[str, int], ...] = ()
    tied: bool = False
    vocab: int | None = None
    context: int | None = None

    @property
    def query(self) -> QueryHeads:
        return self.heads.query if self.heads else QueryHeads(0)

    @property
    def kept(self) -> KvHeads:
        """Heads among which a token's row can be divided: one for a latent row, none where nothing grows."""
        if self.heads is None:
            return KvHeads(0)
        return self.heads.kept if isinstance(self.heads, Heads) else KvHeads(1)
