"""Speculative verification in the interpreter: both rules against float64, and what the ratio rule gives."""

from __future__ import annotations

import torch

from engine.kernels.verify import drawn_meaning, meaning, verify_drawn, verify_ratio


def run_ratio(
    p: torch.Tensor, q: torch.Tensor, draft: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.full(uniform.shape, -7, dtype=torch.int32)
    accepted = torch.full(draft.shape[:1], -7, dtype=torch.int32)
    verify_ratio(p, q, draft, uniform, tokens, accepted)
    return tokens, accepted


def chi_square(tokens: torch.Tensor, p: torch.Tensor) -> float:
    wanted = len(tokens) * p.double()
    return float(((torch.bincount(tokens, minlength=len(p)) - wanted) ** 2 / wanted).sum())


def test_by_shared_noise_the_output_is_what_was_drawn_up_to_the_first_draft_that_differs():
    drawn = torch.tensor([[4, 5, 6], [4, 5, 6], [4, 5, 6], [4, 5, 6]], dtype=torch.int32)
    draft = torch.tensor([[4, 5], [4, 9], [9, 5], [-1, -1]], dtype=torch.int32)
    tokens, accepted = torch.empty(4, 3, dtype=torch.int32), torch.empty(4, dtype=torch.int32)
    verify_drawn(drawn, draft, tokens, accepted)
    assert tokens.tolist() == [[4, 5, 6], [4, 5, -1], [4, -1, -1], [4, -1, -1]]
    assert accepted.tolist() == [2, 1, 0, 0]
    assert torch.equal(drawn_meaning(drawn, draft), tokens.long())


def test_by_ratio_the_tokens_are_distributed_as_the_target_says():
    """A chi-square of the first token, and of the second where the first draft stood, over 300 fixed rows."""
    rows, vocab = 300, 4
    generator = torch.Generator().manual_seed(21)
    p = torch.randn(2, vocab, generator=generator).softmax(-1)
    q = (p[0].log() + 0.7 * torch.randn(vocab, generator=generator)).softmax(-1)
    draft = torch.multinomial(q, rows, replacement=True, generator=generator).int()[:, None]
    uniform = torch.rand(rows, 2, generator=generator)
    tokens, accepted = run_ratio(
        p.expand(rows, 2, vocab).contiguous(), q.expand(rows, 1, vocab).contiguous(), draft, uniform
    )
    stood = accepted == 1
    assert 0.5 < float(stood.float().mean()) < 0.95
    assert chi_square(tokens[:, 0], p[0]) < 16.3  # 3 degrees of freedom, one in a thousand
    assert chi_square(tokens[stood, 1], p[1]) < 16.3
    assert tokens[~stood, 1].eq(-1).all()


def test_a_draft_that_the_target_calls_impossible_never_stands_and_a_certain_one_always_does():
    p = torch.tensor([[[0.0, 0.4, 0.6], [0.2, 0.8, 0.0]], [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]])
    q = torch.tensor([[[0.9, 0.05, 0.05]], [[0.1, 0.5, 0.4]]])
    draft = torch.tensor([[0], [1]], dtype=torch.int32)
    for uniform in (torch.zeros(2, 2), torch.full((2, 2), 0.9999)):
        tokens, accepted = run_ratio(p, q, draft, uniform)
        assert accepted.tolist() == [0, 1]
        assert torch.equal(tokens.long(), meaning(p, q, draft, uniform))


def test_where_draft_and_target_agree_on_everything_a_replacement_is_drawn_from_the_target():
    p = torch.tensor([[[0.0, 0.25, 0.75], [0.5, 0.5, 0.0]]])
    tokens, accepted = run_ratio(
        p, p[:, :1].contiguous(), torch.zeros(1, 1, dtype=torch.int32), torch.tensor([[0.5, 0.3]])
    )
    assert (tokens.tolist(), accepted.tolist()) == ([[2, -1]], [0])
