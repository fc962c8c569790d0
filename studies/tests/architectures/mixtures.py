"""Mixtures of experts: each token goes through the experts that a router picks for it."""

from __future__ import annotations

from studies.tests.architectures.decoders import DECODER
from studies.tests.architectures.model import Architecture, text

_ROUTED = {
    **DECODER,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "output_router_logits": True,
}
_DEEPSEEK = {
    **DECODER,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "head_dim": 4,
    "n_group": 2,
    "topk_group": 1,
}
_LOCAL = {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}

KIND = "mixture of experts"
ARCHITECTURES = (
    Architecture("DeepseekV2ForCausalLM", _DEEPSEEK, text, experts="grouped_mm"),
    Architecture("DeepseekV3ForCausalLM", _DEEPSEEK, text, experts="grouped_mm"),
    Architecture(
        "Ernie4_5_MoeForCausalLM",
        {**DECODER, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8},
        text,
        experts="grouped_mm",
    ),
    Architecture(
        "FlexOlmoForCausalLM",
        {**DECODER, "num_experts": 4, "num_experts_per_tok": 2},
        text,
        experts="grouped_mm",
    ),
    Architecture(
        "Glm4MoeForCausalLM", {**_DEEPSEEK, "num_key_value_heads": 2}, text, experts="grouped_mm"
    ),
    Architecture(
        "GptOssForCausalLM",
        {**_LOCAL, "head_dim": 4, "sliding_window": 4},
        text,
        experts="grouped_mm",
    ),
    Architecture("GraniteMoeForCausalLM", _LOCAL, text, experts="grouped_mm"),
    Architecture("MixtralForCausalLM", _LOCAL, text, experts="batched_mm"),
    Architecture("OlmoeForCausalLM", _ROUTED, text, experts="grouped_mm"),
    Architecture(
        "PhimoeForCausalLM",
        _LOCAL,
        text,
        experts="grouped_mm",
        refused="aten.exponential.default draws random numbers",
    ),
    Architecture(
        "Qwen2MoeForCausalLM",
        {**_ROUTED, "shared_expert_intermediate_size": 8},
        text,
        experts="eager",
        refused="for expert_idx in expert_hit",
    ),
    Architecture("Qwen3MoeForCausalLM", {**_ROUTED, "head_dim": 4}, text, experts="grouped_mm"),
)
