"""Drawing in the interpreter: the tokens of the CPU's sampler, from the same logits and the same noise."""

from __future__ import annotations

import pytest
import torch

from engine import sampler
from engine.kernels.draw import Rules, draw, meaning
from engine.sampling import Sampling

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.7, top_k=7, seed=-9),
    Sampling(temperature=1.4, top_p=0.6, seed=2**62),
    Sampling(temperature=0.9, top_k=40, top_p=0.85, seed=5),
    Sampling(temperature=1.0, top_k=1, seed=6),
    Sampling(temperature=3.0, top_k=10_000, top_p=0.999, seed=7),
    Sampling(temperature=0.01, top_p=0.0, seed=8),
    Sampling(temperature=1.0, top_k=1, top_p=0.0, seed=9),
    Sampling(temperature=1.0, top_k=2, top_p=0.0, seed=10),
    Sampling(temperature=1.0, min_p=0.05, seed=11),
    Sampling(temperature=1.7, top_k=90, top_p=0.95, min_p=0.2, seed=12),
    Sampling(temperature=2.5, min_p=1.0, seed=13),
]
ROWS = len(SAMPLINGS)


def rules_of(samplings: list[Sampling], positions: list[int]) -> Rules:
    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(sampling, name) for sampling in samplings], dtype=dtype)

    return Rules(
        temperature=column("temperature", torch.float64),
        top_k=column("top_k", torch.int32),
        top_p=column("top_p", torch.float64),
        seed=column("seed", torch.int64),
        position=torch.tensor(positions),
        log_min_p=column("min_p", torch.float64).log(),
    )


def run(logits: torch.Tensor, rules: Rules, allowed: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    out, probs = torch.full(logits.shape[:1], -7, dtype=torch.int32), torch.full(logits.shape, float("nan"))
    draw(logits, rules, out, allowed=allowed, probs=probs)
    return out, probs


def logits_of(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("step", [0.0, 0.5], ids=["all-different", "many-equal"])
def test_the_token_is_that_of_the_cpu(step):
    logits = logits_of(ROWS, 1500)
    logits = (logits / step).round() * step if step else logits
    logits[:, 5], logits[:, 6], logits[:, 7], logits[:, 8] = torch.inf, -torch.inf, torch.nan, -0.0
    samplings, positions = SAMPLINGS, [row * 31 for row in range(ROWS)]
    allowed = torch.rand(ROWS, 1500, generator=torch.Generator().manual_seed(1)) < 0.7
    out, probs = run(logits, rules_of(samplings, positions), allowed)
    wanted = [
        sampler.sample(logits[row].numpy(), samplings[row], positions[row], allowed[row].numpy()) for row in range(ROWS)
    ]
    assert out.tolist() == wanted
    tokens, meant = meaning(logits, rules_of(samplings, positions), allowed=allowed)
    assert tokens.tolist() == wanted
    assert torch.equal(probs > 0, meant > 0)
    torch.testing.assert_close(probs.double(), meant, atol=1e-6, rtol=1e-5)


def test_of_equal_logits_top_k_and_top_p_keep_the_first():
    logits = torch.zeros(2, 40)
    rules = rules_of([Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.11)], [0, 0])
    _, probs = run(logits, rules)
    assert [row.nonzero().flatten().tolist() for row in probs] == [[0, 1, 2], [0, 1, 2, 3, 4]]


def test_a_row_without_a_possible_token_says_so():
    logits = torch.full((3, 20), float("nan"))
    logits[1, 4] = 0.0
    out, probs = run(logits, rules_of([Sampling(1.0, top_p=0.5), Sampling(1.0, top_k=2), Sampling()], [0, 0, 0]))
    assert out.tolist() == [-1, 4, -1]
    assert not probs[0].any()


def test_a_row_draws_the_same_in_any_batch():
    logits = logits_of(ROWS, 300)
    positions = list(range(ROWS))
    many, many_probs = run(logits, rules_of(SAMPLINGS, positions))
    one, one_probs = run(logits[3:4], rules_of(SAMPLINGS[3:4], positions[3:4]))
    assert one.tolist() == many[3:4].tolist()
    assert torch.equal(one_probs[0], many_probs[3])


def test_draws_are_distributed_as_the_probabilities_say():
    """A chi-square over the noise of 200 positions."""
    draws, vocab = 200, 4
    logits = logits_of(1, vocab, seed=4).expand(draws, vocab) / 3
    rules = rules_of([Sampling(temperature=0.9, seed=11)] * draws, list(range(draws)))
    draw(logits, rules, out := torch.empty(draws, dtype=torch.int32))
    wanted = draws * meaning(logits, rules)[1][0]
    counts = torch.bincount(out, minlength=vocab)
    assert float(((counts - wanted) ** 2 / wanted).sum()) < 16.3  # 3 degrees of freedom, one in a thousand
