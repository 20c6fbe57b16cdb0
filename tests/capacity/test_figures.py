"""The public figures of each system, to the digits that they are given with, out of a plan."""

from __future__ import annotations

import pytest

from engine.capacity import formulas as f
from tests.capacity.support import config, facts, plan

PARAMETERS = {
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "gemma-2-27b": 27_227_128_320,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "gemma-3-27b": 27_009_346_304,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "jamba-v0.1": 51_570_323_328,
    "kimi-k2": 1_026_408_232_448,
    "lfm2-1.2b": 1_170_340_608,
    "llama-3-70b": 70_553_706_496,
    "llama-3-8b": 8_030_261_248,
    "mamba-2.8b": 2_768_345_600,
    "mamba-codestral-7b": 7_285_403_648,
    "mistral-7b-v0.1": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "smollm2-135m": 134_515_008,
}


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_parameters_are_counted_exactly(name: str) -> None:
    assert facts(name).parameters.total == PARAMETERS[name]


def test_system_4_kv_per_token() -> None:
    assert plan("llama-3-70b").kv_bytes_per_token == 327_680
    assert f"{plan('llama-3.1-70b', context=30_000).kv_bytes_per_session / 1e9:.2f}" == "9.83"
    assert f"{plan('llama-3.1-70b', context=131_072).kv_bytes_per_session / 1e9:.2f}" == "42.95"


def test_system_5_attention_layouts() -> None:
    found = [plan(name).kv_bytes_per_token for name in ("mha-70b", "llama-3-70b", "deepseek-v3")]
    assert found == [2_621_440, 327_680, 70_272]


def test_system_6_paged_allocation() -> None:
    one = plan("llama-3.1-70b", context=300)
    assert f"{f.reserved_waste(300, 2048):.0%}" == "85%"
    assert f"{one.paging.half_page_waste:.1%}" == "2.6%"
    assert f"{one.paging.waste:.1%}" == "1.3%"


def test_system_7_block_table() -> None:
    assert plan("llama-3.1-70b", context=131_072).paging.table_bytes == 32 << 10


def test_system_9_launches() -> None:
    assert plan("llama-3-70b").launches_ms == 4


def test_system_10_tokens_per_pass() -> None:
    found = {one.drafted: f"{one.tokens_per_pass:.2f}" for one in plan("llama-3-70b", acceptance=0.8).speculation}
    assert [found[drafted] for drafted in (2, 4, 6)] == ["2.44", "3.36", "3.95"]


def test_system_12_touched_experts() -> None:
    mixture = plan("deepseek-v3", tp=8, device="h200").mixture
    assert mixture is not None
    assert (round(mixture.touched_at_8), round(mixture.touched_at_64)) == (57, 222)


def test_system_14_long_context() -> None:
    one = plan("llama-3.1-70b", tp=8, context=131_072, mfu=0.5)
    assert (f"{one.prefill_flops / 1e15:.0f}", f"{one.prefill_s:.1f}") == ("41", "10.4")


def test_system_15_roofline() -> None:
    one = plan("llama-3-70b", context=8192)
    assert one.intensity_limit is not None
    assert (f"{one.ridge:.0f}", f"{one.intensity_limit:.1f}", one.decode_bound) == ("295", "60.6", "memory")


def test_system_16_users_per_device() -> None:
    wish = {"device": "h100", "tp": 4, "util": 0.9, "context": 8192, "overhead_gb": 0}
    assert plan("llama-3-70b", **wish).users_by_memory == 54
    assert plan("llama-3-70b", weights_dtype="fp8", kv_dtype="fp8", **wish).users_by_memory == 162
    wide = plan("llama-3-70b", **wish | {"tp": 16})
    assert (wide.kv_replication, wide.kv_bytes_per_token_per_device) == (2, 327_680 // 8)


def test_system_19_replicas() -> None:
    """54 sessions a replica, a fifth of them free: 500 users need 12, at 4 devices each two to a machine."""
    one = plan("llama-3-70b", tp=4, users=500, headroom=0.2)
    assert (one.users, one.binding, one.replicas, one.replicas_binding, one.nodes) == (54, "memory", 12, "users", 6)
    busy = plan("llama-3-70b", tp=4, users=500, requests_per_second=20.0)
    assert (busy.binding, busy.replicas_binding) == ("throughput", "users")
    tight = plan("llama-3-70b", tp=4, slo_tpot_s=0.013)
    assert (tight.binding, tight.users) == ("throughput", tight.max_batch_for_slo)


def test_system_20_one_million_tokens() -> None:
    found = {one.tokens: one for one in plan("llama-3-70b", tp=8, mfu=0.5).long_context}
    million = found[1_000_000]
    assert (f"{million.kv_bytes / 1e9:.1f}", f"{million.prefill_s:.0f}") == ("327.7", "367")
    assert million.of_full_attention == 1 / 8


def test_system_21_giant_mixture() -> None:
    one = plan("deepseek-v3", device="gb200-nvl72", tp=72, dp_attention=True)
    assert one.mixture is not None
    assert (one.mixture.dispatch_bytes, one.mixture.combine_bytes) == (57_344, 114_688)
    assert one.fits
    assert one.mixture.all_to_all_ms > 0
    assert one.mixture.imbalance > 1


def test_system_22_break_even() -> None:
    one = plan("llama-3-70b", tp=8, mfu=0.5)
    assert (f"{one.recompute_us_per_token:.1f}", f"{one.break_even_gb_s:.1f}") == ("35.7", "9.2")


def test_system_26_each_number_is_for_what_binds() -> None:
    reading_weights = plan("llama-3-8b", context=512, slo_tpot_s=0.0055)
    assert "reading weights binds" in reading_weights.precision_advice
    assert "reading KV binds" in plan("llama-3-70b", tp=4).precision_advice
    assert "memory binds" in plan("llama-3-70b", tp=1).precision_advice
    assert all(one.guards for one in plan("llama-3-70b", tp=4).precision)


def test_system_27_drafts_pay_where_there_is_compute_to_spare() -> None:
    assert plan("llama-3-70b", tp=4, acceptance=0.8).speculation_advice.startswith("draft")
    assert "draft nothing" in plan("llama-3-70b", tp=4, acceptance=0.02).speculation_advice
    full = plan("llama-3-8b", context=128, slo_tpot_s=1.0)
    assert full.decode_bound == "compute"
    assert "draft nothing" in full.speculation_advice


@pytest.mark.soak
@pytest.mark.parametrize("name", sorted(set(PARAMETERS) - {"kimi-k2"}))
def test_transformers_counts_the_same_parameters(name: str) -> None:
    """Its own model of that config, without memory for its weights. What DeepSeek V3 corrects its router by is no
    parameter to it."""
    import torch
    import transformers

    wanted = transformers.AutoConfig.for_model(**config(name))
    wanted = getattr(wanted, "text_config", wanted)
    wanted.quantization_config = None
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(wanted)
    corrections = 58 * 256 if name == "deepseek-v3" else 0
    assert sum(one.numel() for one in model.parameters()) + corrections == PARAMETERS[name]
