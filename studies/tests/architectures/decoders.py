"""Language models that predict the next token."""

from __future__ import annotations

from studies.tests.architectures.model import SMALL, SPECIAL, VOCABULARY, Architecture, text

DECODER = {**SMALL, **SPECIAL, "num_key_value_heads": 2}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    **SPECIAL,
}
_HALF = {"head_dim": 4}

KIND = "language, decoder"
ARCHITECTURES = (
    Architecture("BioGptForCausalLM", {**SMALL, **SPECIAL}, text),
    Architecture(
        "BloomForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 4, **SPECIAL},
        text,
    ),
    Architecture("CodeGenForCausalLM", {**_GPT2, "rotary_dim": 4}, text),
    Architecture("CohereForCausalLM", DECODER, text),
    Architecture("FalconForCausalLM", {**SMALL, **SPECIAL}, text),
    Architecture("GPT2LMHeadModel", _GPT2, text),
    Architecture("GPTBigCodeForCausalLM", _GPT2, text),
    Architecture("GPTJForCausalLM", {**_GPT2, "rotary_dim": 4}, text),
    Architecture(
        "GPTNeoForCausalLM",
        {
            **SMALL,
            **SPECIAL,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        },
        text,
    ),
    Architecture("GPTNeoXForCausalLM", {**SMALL, **SPECIAL}, text),
    Architecture("GemmaForCausalLM", {**DECODER, **_HALF}, text),
    Architecture("Gemma2ForCausalLM", {**DECODER, **_HALF, "sliding_window": 4}, text),
    Architecture("Gemma3ForCausalLM", {**DECODER, **_HALF, "sliding_window": 4}, text),
    Architecture("GlmForCausalLM", {**DECODER, **_HALF}, text),
    Architecture("GraniteForCausalLM", DECODER, text),
    Architecture("LlamaForCausalLM", DECODER, text),
    Architecture("MistralForCausalLM", {**DECODER, "sliding_window": 4}, text),
    Architecture(
        "MptForCausalLM",
        {"vocab_size": VOCABULARY, "d_model": 16, "n_layers": 2, "n_heads": 4, "max_seq_len": 32},
        text,
    ),
    Architecture("NemotronForCausalLM", DECODER, text),
    Architecture(
        "OPTForCausalLM", {**SMALL, **SPECIAL, "ffn_dim": 24, "word_embed_proj_dim": 16}, text
    ),
    Architecture("OlmoForCausalLM", DECODER, text),
    Architecture("Olmo2ForCausalLM", DECODER, text),
    Architecture("PersimmonForCausalLM", {**SMALL, **SPECIAL}, text),
    Architecture("PhiForCausalLM", DECODER, text),
    Architecture("Phi3ForCausalLM", DECODER, text),
    Architecture("Qwen2ForCausalLM", DECODER, text),
    Architecture("Qwen3ForCausalLM", {**DECODER, **_HALF}, text),
    Architecture("StableLmForCausalLM", DECODER, text),
    Architecture("Starcoder2ForCausalLM", DECODER, text),
)
