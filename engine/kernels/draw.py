"""From logits to tokens: top-k, top-p, min-p and the draw of `engine.sampler`, with the same noise, so the same token.

logits:  fp32 [B, V], stride 1 within a row; what is not finite is never drawn
allowed: bool [B, V] of the same stride, or None
rules:   see `Rules`
out:     int32 [B], the token, or -1 where none is possible
probs:   fp32 [B, V] or None; the distribution that is drawn from, for `verify`

Gumbel-max with SplitMix64 noise keyed by seed, position and token, in float64. Nothing is sorted: the edge of top-k is
found by bisection of a count over the logits' bits, which order as integers, and the edge of top-p by bisection of the
mass. Of tokens equal to the edge, the first are kept: as many as the count or the mass asks for. One program a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.noise import gumbel, stream_of
from engine.kernels.sample import Sample, Size
from engine.kernels.target import Config, device, pick
from engine.sampler import uniform

_GREEDY_BELOW = tl.constexpr(1e-100)  # as the sampler of the CPU
_EVERY = tl.constexpr(-2147483648)  # an edge below every logit
_NONE = tl.constexpr(2147483647)


@dataclass(frozen=True)
class Rules:
    """For each row: temperature, top_p and log_min_p float64 [B], top_k int32 [B], seed and position int64 [B]. As
    `Sampling`; the logarithm of a min_p of 0 is -inf."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    position: Tensor
    log_min_p: Tensor


@dataclass(frozen=True, kw_only=True)
class DrawConfig(Config):
    """block: logits of one iteration."""

    block: int


CONFIGS: dict[tuple[str, object], DrawConfig] = {
    ("*", "*"): DrawConfig(block=4096, num_warps=16),
    ("gfx942", "*"): DrawConfig(block=4096, num_warps=8),
    ("interpreter", "*"): DrawConfig(block=1024),
}


@triton.jit
def _block(logits_at, allowed_at, start, vocab, HAS_ALLOWED: tl.constexpr, BLOCK: tl.constexpr):
    """Ids, logits and whether they are possible, and the logits' bits so that they order as integers."""
    token = start + tl.arange(0, BLOCK)
    inside = token < vocab
    x = tl.load(logits_at + token, mask=inside, other=float("-inf"))
    possible = tl.abs(x) < float("inf")  # false for NaN
    if HAS_ALLOWED:
        possible = possible & (tl.load(allowed_at + token, mask=inside, other=0) != 0)
    x = tl.where(possible & (x != 0.0), x, 0.0)  # one zero, not two
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(possible, bits ^ ((bits >> 31) & 0x7FFFFFFF), _EVERY)
    return token, x, possible, key


@triton.jit
def _weight(x, peak, temperature):
    return tl.exp(((x - peak).to(tl.float64) / temperature).to(tl.float32)).to(tl.float64)


@triton.jit
def _logit(key):
    """The logit that a key stands for."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _tally(
    logits_at, allowed_at, vocab, edge, peak, temperature,
    MASS: tl.constexpr, HAS_ALLOWED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How many possible logits lie at or above the edge, or their mass: sum of exp((logit - peak) / temperature)."""
    sums = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        _, x, possible, key = _block(logits_at, allowed_at, start, vocab, HAS_ALLOWED, BLOCK)
        counted = possible & (key >= edge.to(tl.int32))
        if MASS:
            sums += tl.where(counted, _weight(x, peak, temperature), 0.0)
        else:
            sums += counted.to(tl.float64)
    return tl.sum(sums, 0)


@triton.jit
def _edge(
    logits_at, allowed_at, vocab, low, high, wanted, peak, temperature,
    MASS: tl.constexpr, HAS_ALLOWED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The highest edge from `low` on and below `high` at or above which lies what is wanted, as it does at `low`."""
    while high - low > 1:
        middle = (low + high) >> 1
        reached = _tally(logits_at, allowed_at, vocab, middle, peak, temperature, MASS, HAS_ALLOWED, BLOCK) >= wanted
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low


@triton.jit
def _top_p(
    logits_at, allowed_at, vocab, edge, equal, over, top_p, peak, temperature,
    HAS_ALLOWED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The edge, and how many tokens at it are kept, after top-p of what the edge before leaves."""
    above = _tally(logits_at, allowed_at, vocab, edge + 1, peak, temperature, True, HAS_ALLOWED, BLOCK)
    at_edge = _weight(_logit(edge.to(tl.int32)), peak, temperature)
    whole = tl.where(edge == _EVERY, above, above + at_edge * equal.to(tl.float64))
    wanted = top_p * whole
    if (above >= wanted) & (above > 0.0):  # top_p of nothing keeps one token, which may be at the edge
        edge = _edge(logits_at, allowed_at, vocab, edge + 1, over, wanted, peak, temperature, True, HAS_ALLOWED, BLOCK)
        above = _tally(logits_at, allowed_at, vocab, edge + 1, peak, temperature, True, HAS_ALLOWED, BLOCK)
        at_edge = _weight(_logit(edge.to(tl.int32)), peak, temperature)
        equal = tl.full([], _NONE, tl.int64)
    needed = tl.ceil((wanted - above) / at_edge).to(tl.int64)
    return edge, tl.minimum(equal, tl.maximum(needed, 1))


@triton.jit
def _kept(
    logits_at, allowed_at, start, vocab, edge, equal, floor, seen, HAS_ALLOWED: tl.constexpr, BLOCK: tl.constexpr
):
    """A block's ids and logits, which of them may be drawn, and how many at the edge were seen with it."""
    token, x, possible, key = _block(logits_at, allowed_at, start, vocab, HAS_ALLOWED, BLOCK)
    at_edge = possible & (key == edge.to(tl.int32))
    rank = seen + tl.cumsum(at_edge.to(tl.int32), 0)
    kept = (possible & (key > edge.to(tl.int32))) | (at_edge & (rank <= equal))
    kept = kept & (x.to(tl.float64) >= floor)
    return token, x, kept, seen + tl.sum(at_edge.to(tl.int32), 0)


@triton.jit
def _kernel(
    logits_ptr, allowed_ptr, temperature_ptr, top_k_ptr, top_p_ptr, seed_ptr, position_ptr, log_min_p_ptr, out_ptr,
    probs_ptr,
    logits_row, probs_row, vocab,
    HAS_ALLOWED: tl.constexpr, WRITE_PROBS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_at = logits_ptr + row * logits_row
    allowed_at = allowed_ptr + row * logits_row
    given = tl.load(temperature_ptr + row)
    greedy = given < _GREEDY_BELOW
    temperature = tl.where(greedy, 1.0, given)

    keys = tl.full([BLOCK], _EVERY, tl.int32)
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        _, _, possible, key = _block(logits_at, allowed_at, start, vocab, HAS_ALLOWED, BLOCK)
        keys = tl.maximum(keys, key)
        counts += possible.to(tl.int32)
    best = tl.max(keys, 0)
    count = tl.sum(counts, 0)
    peak = _logit(best)
    over = best.to(tl.int64) + 1  # an edge above every logit

    edge = tl.full([], _EVERY, tl.int64)
    equal = tl.full([], _NONE, tl.int64)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    if greedy:
        edge = best.to(tl.int64)
        equal = tl.full([], 1, tl.int64)
    elif count > 0:
        if (top_k > 0) & (top_k < count):
            edge = _edge(logits_at, allowed_at, vocab, edge, over, top_k, peak, temperature, False, HAS_ALLOWED, BLOCK)
            above = _tally(logits_at, allowed_at, vocab, edge + 1, peak, temperature, False, HAS_ALLOWED, BLOCK)
            equal = top_k - above.to(tl.int64)
        if top_p < 1.0:
            edge, equal = _top_p(
                logits_at, allowed_at, vocab, edge, equal, over, top_p, peak, temperature, HAS_ALLOWED, BLOCK
            )

    floor = peak.to(tl.float64) + temperature * tl.load(log_min_p_ptr + row)
    stream = stream_of(tl.load(seed_ptr + row), tl.load(position_ptr + row))
    greatest = tl.full([], float("-inf"), tl.float64)
    drawn = tl.full([], -1, tl.int32)
    seen = tl.full([], 0, tl.int32)
    mass = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        token, x, kept, seen = _kept(logits_at, allowed_at, start, vocab, edge, equal, floor, seen, HAS_ALLOWED, BLOCK)
        value = tl.where(kept, x.to(tl.float64) / temperature + gumbel(stream, token), float("-inf"))
        here = tl.max(value, 0)
        first = tl.min(tl.where(kept & (value == here), token, _NONE), 0)
        drawn = tl.where(here > greatest, first, drawn)
        greatest = tl.maximum(greatest, here)
        mass += tl.where(kept, _weight(x, peak, temperature), 0.0)
    tl.store(out_ptr + row, drawn)
    if WRITE_PROBS:
        whole = tl.sum(mass, 0)
        seen = tl.full([], 0, tl.int32)
        for start in range(0, vocab, BLOCK):
            token, x, kept, seen = _kept(
                logits_at, allowed_at, start, vocab, edge, equal, floor, seen, HAS_ALLOWED, BLOCK
            )
            share = tl.where(kept, _weight(x, peak, temperature) / whole, 0.0)
            tl.store(probs_ptr + row * probs_row + token, share.to(tl.float32), mask=token < vocab)


def draw(
    logits: Tensor, rules: Rules, out: Tensor, *, allowed: Tensor | None = None, probs: Tensor | None = None
) -> None:
    """Fill `out`, and `probs` if given."""
    batch, vocab = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert out.shape == rules.temperature.shape == (batch,)
    assert rules.temperature.dtype == rules.top_p.dtype == rules.log_min_p.dtype == torch.float64
    assert rules.seed.dtype == rules.position.dtype == torch.int64
    assert allowed is None or (allowed.shape == logits.shape and allowed.stride() == logits.stride())
    assert probs is None or (probs.shape == logits.shape and probs.stride(1) == 1)
    config = pick(CONFIGS, vocab)
    _kernel[(batch,)](
        logits, out if allowed is None else allowed.view(torch.uint8),
        rules.temperature, rules.top_k, rules.top_p, rules.seed, rules.position, rules.log_min_p, out,
        out if probs is None else probs,
        logits.stride(0), 0 if probs is None else probs.stride(0), vocab,
        HAS_ALLOWED=allowed is not None, WRITE_PROBS=probs is not None, BLOCK=config.block,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=False,
    )  # fmt: skip


def meaning(logits: Tensor, rules: Rules, *, allowed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Tokens int64 [B] and what they are drawn from, float64 [B, V]; -1 and zeros where none is possible."""
    batch, vocab = logits.shape
    tokens, probs = torch.full((batch,), -1), torch.zeros(batch, vocab, dtype=torch.float64)
    columns = (rules.temperature, rules.top_k, rules.top_p, rules.seed, rules.position, rules.log_min_p)
    for row, given in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        temperature, top_k, top_p, seed, position, log_min_p = given
        wide = logits[row].double().cpu()
        possible = wide.isfinite() if allowed is None else wide.isfinite() & allowed[row].cpu()
        count = int(possible.sum())
        order = torch.where(possible, wide, -torch.inf).sort(descending=True, stable=True).indices[:count]
        if temperature < 1e-100:
            temperature, order = 1.0, order[:1]
        elif top_k > 0:
            order = order[:top_k]
        scores = wide[order] / temperature
        mass = scores.softmax(0).cumsum(0)
        if count and top_p < 1.0:
            order = order[: int(torch.searchsorted(mass, top_p * mass[-1])) + 1]
        if count:
            order = order[wide[order] >= wide[order[0]] + temperature * log_min_p]
            scores = wide[order] / temperature
            probs[row, order] = scores.softmax(0)
            noise = torch.from_numpy(uniform(seed, position, order.numpy()))
            tokens[row] = order[(scores - (-noise.log()).log()).argmax()]
    return tokens, probs


def samples(size: Size) -> list[Sample]:
    """Rows of every kind: greedy, all tokens, top-k, top-p, and these with min-p."""
    return [_sample("rows of every kind", 5 if size == "tiny" else 32, 1000 if size == "tiny" else 151936)]


def _sample(name: str, batch: int, vocab: int) -> Sample:
    generator = torch.Generator().manual_seed(15)
    here = device()
    logits = (4 * torch.randn(batch, vocab, generator=generator)).to(here)
    kinds = [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 40, 1.0, 0.0), (1.3, 0, 0.9, 0.0), (1.0, 50, 0.8, 0.1)]
    temperature, top_k, top_p, min_p = zip(*(kinds[row % len(kinds)] for row in range(batch)), strict=True)
    rules = Rules(
        temperature=torch.tensor(temperature, dtype=torch.float64, device=here),
        top_k=torch.tensor(top_k, dtype=torch.int32, device=here),
        top_p=torch.tensor(top_p, dtype=torch.float64, device=here),
        seed=torch.arange(batch, device=here) + 17,
        position=torch.arange(batch, device=here) * 3,
        log_min_p=torch.tensor(min_p, dtype=torch.float64, device=here).log(),
    )
    out = torch.zeros(batch, dtype=torch.int32, device=here)
    probs = torch.zeros(batch, vocab, device=here)

    def launch() -> None:
        draw(logits, rules, out, probs=probs)

    def worst() -> float:
        """Of the probabilities; 1 where a token is another."""
        launch()
        tokens, wanted = meaning(logits, rules)
        off = float((probs.double().cpu() - wanted).abs().max())
        return off if torch.equal(out.long().cpu(), tokens) else 1.0

    return Sample(name, launch, worst, 1e-5)
