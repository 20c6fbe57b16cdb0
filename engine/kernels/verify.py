"""Speculative verification: how many drafts stand, and the token after them.

draft:    int32 [B, G], -1 from where a row has no more drafts
tokens:   int32 [B, G + 1], out: the drafts that stand and the token after them, then -1
accepted: int32 [B], out: how many drafts stand

By shared noise, the default: `drawn` int32 [B, G + 1] is what `draw` gives at each position, and a draft stands iff it
is the token drawn. The output is that of drawing without drafts, token for token.

By ratio (Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", 2023, A.1): a draft
stands with probability min(1, p / q); the first that does not is replaced by a draw from max(p - q, 0), and
after all of them comes a draw from p. The output is distributed as p, but not the same draw as without drafts.

p: fp32 [B, G + 1, V], the target's distribution at each position; q: fp32 [B, G, V], the draft's; all contiguous
uniform: fp32 [B, G + 1] in [0, 1): one for each draft, the last one for the draw
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.sample import Sample, Size
from engine.kernels.target import Config, device, pick

_NONE = tl.constexpr(2147483647)


@dataclass(frozen=True, kw_only=True)
class VerifyConfig(Config):
    """block: probabilities of one iteration."""

    block: int


CONFIGS: dict[tuple[str, object], VerifyConfig] = {
    ("*", "*"): VerifyConfig(block=2048, num_warps=8),
    ("interpreter", "*"): VerifyConfig(block=1024),
}


@triton.jit
def _drawn_kernel(drawn_ptr, draft_ptr, tokens_ptr, accepted_ptr, DRAFTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    stands = tl.full([], 1, tl.int32)  # whether all drafts before stand
    accepted = tl.full([], 0, tl.int32)
    for i in range(DRAFTS):
        drawn = tl.load(drawn_ptr + row * (DRAFTS + 1) + i)
        tl.store(tokens_ptr + row * (DRAFTS + 1) + i, tl.where(stands == 1, drawn, -1))
        stands = stands * (tl.load(draft_ptr + row * DRAFTS + i) == drawn).to(tl.int32)
        accepted += stands
    last = tl.load(drawn_ptr + row * (DRAFTS + 1) + DRAFTS)
    tl.store(tokens_ptr + row * (DRAFTS + 1) + DRAFTS, tl.where(stands == 1, last, -1))
    tl.store(accepted_ptr + row, accepted)


@triton.jit
def _excess(p_at, q_at, start, vocab, replaces, BLOCK: tl.constexpr):
    """max(p - q, 0) where a draft is replaced, else p; and the ids of the block."""
    token = start + tl.arange(0, BLOCK)
    p = tl.load(p_at + token, mask=token < vocab, other=0.0)
    q = tl.load(q_at + token, mask=(token < vocab) & replaces, other=0.0)
    return tl.maximum(p - q, 0.0), token


@triton.jit
def _mass(p_at, q_at, vocab, replaces, BLOCK: tl.constexpr):
    sums = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        excess, _ = _excess(p_at, q_at, start, vocab, replaces, BLOCK)
        sums += excess.to(tl.float64)
    return tl.sum(sums, 0)


@triton.jit
def _ratio_kernel(
    p_ptr, q_ptr, draft_ptr, uniform_ptr, tokens_ptr, accepted_ptr, vocab,
    DRAFTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tokens_at = tokens_ptr + row * (DRAFTS + 1)
    stands = tl.full([], 1, tl.int32)
    accepted = tl.full([], 0, tl.int32)
    drafts = tl.full([], 0, tl.int32)
    for i in range(DRAFTS):
        draft = tl.load(draft_ptr + row * DRAFTS + i)
        there = draft >= 0
        p = tl.load(p_ptr + (row * (DRAFTS + 1) + i) * vocab + draft, mask=there, other=0.0)
        q = tl.load(q_ptr + (row * DRAFTS + i) * vocab + draft, mask=there, other=0.0)
        uniform = tl.load(uniform_ptr + row * (DRAFTS + 1) + i)
        stands = stands * (there & (uniform * q < p)).to(tl.int32)
        tl.store(tokens_at + i, tl.where(stands == 1, draft, -1))
        accepted += stands
        drafts += there.to(tl.int32)
    tl.store(tokens_at + DRAFTS, -1)
    tl.store(accepted_ptr + row, accepted)

    p_at = p_ptr + (row * (DRAFTS + 1) + accepted) * vocab
    q_at = q_ptr + (row * DRAFTS + tl.minimum(accepted, DRAFTS - 1)) * vocab
    replaces = accepted < drafts
    whole = _mass(p_at, q_at, vocab, replaces, BLOCK)
    if whole == 0.0:  # p and q are the same
        replaces = accepted < 0
        whole = _mass(p_at, q_at, vocab, replaces, BLOCK)
    wanted = tl.load(uniform_ptr + row * (DRAFTS + 1) + DRAFTS).to(tl.float64) * whole
    before = tl.full([], 0.0, tl.float64)
    drawn = tl.full([], -1, tl.int32)
    last = tl.full([], -1, tl.int32)  # where rounding leaves the last sum below what is wanted
    for start in range(0, vocab, BLOCK):
        excess, token = _excess(p_at, q_at, start, vocab, replaces, BLOCK)
        reached = (before + tl.cumsum(excess.to(tl.float64), 0) > wanted) & (excess > 0.0)
        first = tl.min(tl.where(reached, token, _NONE), 0)
        drawn = tl.where((drawn < 0) & (first != _NONE), first, drawn)
        last = tl.maximum(last, tl.max(tl.where(excess > 0.0, token, -1), 0))
        before += tl.sum(excess.to(tl.float64), 0)
    tl.store(tokens_at + accepted, tl.where(drawn < 0, last, drawn))


def verify_drawn(drawn: Tensor, draft: Tensor, tokens: Tensor, accepted: Tensor) -> None:
    """Fill `tokens` and `accepted` by shared noise."""
    batch, drafts = draft.shape
    assert drawn.shape == tokens.shape == (batch, drafts + 1)
    assert all(tensor.is_contiguous() for tensor in (drawn, draft, tokens, accepted))
    config = pick(CONFIGS, "drawn")
    _drawn_kernel[(batch,)](
        drawn, draft, tokens, accepted, DRAFTS=drafts, num_warps=1, num_stages=config.num_stages,
        enable_fp_fusion=False,
    )  # fmt: skip


def verify_ratio(p: Tensor, q: Tensor, draft: Tensor, uniform: Tensor, tokens: Tensor, accepted: Tensor) -> None:
    """Fill `tokens` and `accepted` by ratio."""
    batch, drafts = draft.shape
    vocab = p.shape[2]
    assert p.shape == (batch, drafts + 1, vocab)
    assert q.shape == (batch, drafts, vocab)
    assert uniform.shape == tokens.shape == (batch, drafts + 1)
    assert all(tensor.is_contiguous() for tensor in (p, q, draft, uniform, tokens, accepted))
    config = pick(CONFIGS, "ratio")
    _ratio_kernel[(batch,)](
        p, q, draft, uniform, tokens, accepted, vocab, DRAFTS=drafts, BLOCK=config.block,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=False,
    )  # fmt: skip


def drawn_meaning(drawn: Tensor, draft: Tensor) -> Tensor:
    """Tokens int64 [B, G + 1] by shared noise."""
    equal = (drawn[:, :-1] == draft).long().cumprod(1)
    return torch.where(torch.nn.functional.pad(equal, (1, 0), value=1) == 1, drawn.long(), -1)


def meaning(p: Tensor, q: Tensor, draft: Tensor, uniform: Tensor) -> Tensor:
    """Tokens int64 [B, G + 1] by ratio, in float64."""
    batch, drafts = draft.shape
    tokens = torch.full((batch, drafts + 1), -1)
    for row in range(batch):
        at, excess = 0, p[row, 0].double()
        while at < drafts and (token := int(draft[row, at])) >= 0:
            if not float(uniform[row, at]) * float(q[row, at, token]) < float(p[row, at, token]):
                rest = (p[row, at].double() - q[row, at].double()).clamp(min=0.0)
                excess = rest if rest.any() else excess
                break
            tokens[row, at] = token
            at, excess = at + 1, p[row, at + 1].double()
        sums = excess.cumsum(0)
        tokens[row, at] = torch.searchsorted(sums, float(uniform[row, -1]) * sums[-1], right=True)
    return tokens


def samples(size: Size) -> list[Sample]:
    """Both rules, with rows that have fewer drafts than there is room for."""
    batch, drafts, vocab = (6, 3, 300) if size == "tiny" else (8, 4, 32768)
    generator = torch.Generator().manual_seed(16)
    p = torch.randn(batch, drafts + 1, vocab, generator=generator).softmax(-1)
    q = (p[:, :-1].log() + 0.5 * torch.randn(batch, drafts, vocab, generator=generator)).softmax(-1)
    draft = torch.multinomial(q.flatten(0, 1), 1, generator=generator).reshape(batch, drafts).int()
    draft[0], draft[1, 1:] = -1, -1
    uniform = torch.rand(batch, drafts + 1, generator=generator)
    drawn = torch.cat((draft.clamp(min=0), torch.full((batch, 1), 5, dtype=torch.int32)), 1)
    drawn[:, 1] += (torch.arange(batch) % 2).int()  # every second row's second draft is another token
    p, q, draft, uniform, drawn = (tensor.contiguous().to(device()) for tensor in (p, q, draft, uniform, drawn))
    tokens = torch.empty(batch, drafts + 1, dtype=torch.int32, device=device())
    accepted = torch.empty(batch, dtype=torch.int32, device=device())

    def by_ratio() -> None:
        verify_ratio(p, q, draft, uniform, tokens, accepted)

    def by_noise() -> None:
        verify_drawn(drawn, draft, tokens, accepted)

    def wrong(meant: Tensor) -> float:
        counted = torch.equal((meant >= 0).sum(1) - 1, accepted.long())
        return float((tokens.long() != meant).sum() + (not counted))

    def worst_by_ratio() -> float:
        by_ratio()
        return wrong(meaning(p, q, draft, uniform).to(device()))

    def worst_by_noise() -> float:
        by_noise()
        return wrong(drawn_meaning(drawn, draft))

    return [Sample("by ratio", by_ratio, worst_by_ratio, 0.0), Sample("by shared noise", by_noise, worst_by_noise, 0.0)]
