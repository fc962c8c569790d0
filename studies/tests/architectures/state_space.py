"""State-space models and other recurrences, some with attention or experts between."""

from __future__ import annotations

from studies.tests.architectures.decoders import DECODER
from studies.tests.architectures.model import SPECIAL, VOCABULARY, Architecture, text, whole_text

_MAMBA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "state_size": 4,
    "conv_kernel": 3,
    "use_cache": False,
    **SPECIAL,
}

KIND = "state space"
ARCHITECTURES = (
    Architecture(
        "BambaForCausalLM",
        {
            **DECODER,
            "mamba_n_heads": 8,
            "mamba_d_head": 4,
            "mamba_d_state": 4,
            "mamba_chunk_size": 4,
            "mamba_n_groups": 1,
            "attn_layer_indices": [1],
            "use_cache": False,
        },
        text,
    ),
    Architecture("FalconMambaForCausalLM", _MAMBA, whole_text, attention=None),
    Architecture(
        "JambaForCausalLM",
        {
            **DECODER,
            "mamba_d_state": 4,
            "mamba_d_conv": 3,
            "mamba_dt_rank": 2,
            "use_mamba_kernels": False,
            "num_experts": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "use_cache": False,
        },
        text,
        experts="grouped_mm",
    ),
    Architecture("MambaForCausalLM", _MAMBA, whole_text, attention=None),
    Architecture(
        "Mamba2ForCausalLM",
        {**_MAMBA, "num_heads": 8, "head_dim": 4, "n_groups": 1, "chunk_size": 4},
        whole_text,
        attention=None,
    ),
    Architecture(
        "RecurrentGemmaForCausalLM",
        {
            "num_hidden_layers": 3,
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_attention_heads": 4,
            "lru_width": 16,
            "attention_window_size": 4,
            "use_cache": False,
            **SPECIAL,
        },
        text,
        attention=None,
    ),
    Architecture(
        "RwkvForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "attention_hidden_size": 16,
            "num_hidden_layers": 2,
            "intermediate_size": 24,
            "context_length": 16,
            "use_cache": False,
            **SPECIAL,
        },
        whole_text,
        attention=None,
    ),
    Architecture(
        "Zamba2ForCausalLM",
        {
            **DECODER,
            "num_key_value_heads": 4,
            "mamba_d_state": 4,
            "mamba_ngroups": 1,
            "n_mamba_heads": 2,
            "mamba_headdim": 16,
            "mamba_expand": 2,
            "chunk_size": 4,
            "layers_block_type": ["mamba", "hybrid"],
            "num_mem_blocks": 1,
            "adapter_rank": 4,
            "use_cache": False,
        },
        text,
    ),
    Architecture(
        "xLSTMForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_blocks": 2,
            "num_hidden_layers": 2,
            "num_heads": 2,
            "chunk_size": 4,
            "use_cache": False,
            **SPECIAL,
        },
        whole_text,
        attention=None,
    ),
)
