"""Real architectures from transformers and torch.nn, small, with random weights: loss and gradients against torch's.

Most language models compute their norms, rotary embeddings and losses in float32 whatever their own dtype. Each model
is therefore held to torch twice: as it is, within what float32 leaves; and with every request for float32 answered by
float64, within 1e-10.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.bridge import torch_models
from tests.bridge.agreeing import TOLERANCE, assert_agreement

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

SINGLE = 2.0**-24
SMALL = {
    "vocab_size": 53,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
DECODER = {**SMALL, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
}
Made = tuple[Any, dict[str, torch.Tensor]]


class _Widened(TorchFunctionMode):
    """Answers every request for float32 with float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double

        def wide(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        return func(*map(wide, args), **{name: wide(x) for name, x in (kwargs or {}).items()})


def _model(name: str, config: Any, **kwargs: Any) -> Any:
    return getattr(transformers, name)._from_config(config, attn_implementation="eager", **kwargs)


def _tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(3, 53, (rows, length))


def _rows() -> dict[str, torch.Tensor]:
    """Rows of text, the first one padded."""
    tokens = _tokens(3, 7)
    tokens[0, 5:] = 0
    return {"input_ids": tokens, "labels": tokens.masked_fill(tokens == 0, -100)}


def _text(name: str, config: Any, **kwargs: Any) -> Made:
    batch = _rows()
    return _model(name, config, **kwargs), {**batch, "attention_mask": (batch["input_ids"] != 0).long()}


def _images(name: str, config: Any, size: int) -> Made:
    batch = {"pixel_values": torch.randn(3, 3, size, size), "labels": torch.randint(0, 5, (3,))}
    return _model(name, config), batch


# fmt: off
def _t5() -> Made:
    config = transformers.T5Config(vocab_size=53, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4,
                                   dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)
    labels = _tokens(3, 5)
    labels[0, 3:] = -100
    return _model("T5ForConditionalGeneration", config), {"input_ids": _tokens(3, 7), "labels": labels}


def _clip() -> Made:
    text = {**SMALL, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.CLIPConfig(text_config=text, vision_config=VISION, projection_dim=8)
    batch = {"input_ids": _tokens(3, 7), "pixel_values": torch.randn(3, 3, 8, 8), "return_loss": True}
    return _model("CLIPModel", config), batch


def _whisper() -> Made:
    config = transformers.WhisperConfig(
        vocab_size=53, num_mel_bins=8, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, max_source_positions=8,
        max_target_positions=16, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        apply_spec_augment=False)
    batch = {"input_features": torch.randn(2, 8, 16), "labels": _tokens(2, 5)}
    return _model("WhisperForConditionalGeneration", config), batch


def _mamba() -> Made:
    config = transformers.MambaConfig(
        vocab_size=53, hidden_size=16, num_hidden_layers=2, state_size=4, conv_kernel=3, use_cache=False)
    tokens = _tokens(3, 7)
    return transformers.MambaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


ARCHITECTURES: dict[str, Callable[[], Made]] = {
    "bert": lambda: _text("BertForMaskedLM", transformers.BertConfig(**SMALL, **STILL)),
    "clip": _clip,
    "convnext": lambda: _images("ConvNextForImageClassification", transformers.ConvNextConfig(
        hidden_sizes=[8, 16], depths=[1, 2], num_labels=5, num_stages=2, drop_path_rate=0.0), 16),
    "gemma": lambda: _text("GemmaForCausalLM", transformers.GemmaConfig(**DECODER, head_dim=4)),
    "gemma2": lambda: _text("Gemma2ForCausalLM", transformers.Gemma2Config(**DECODER, head_dim=4, sliding_window=4)),
    "gpt2": lambda: _text("GPT2LMHeadModel", transformers.GPT2Config(
        vocab_size=53, n_embd=16, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=1, eos_token_id=2)),
    "llama": lambda: _text("LlamaForCausalLM", transformers.LlamaConfig(**DECODER)),
    "mamba": _mamba,
    "mistral": lambda: _text("MistralForCausalLM", transformers.MistralConfig(**DECODER, sliding_window=4)),
    "mixtral": lambda: _text("MixtralForCausalLM", transformers.MixtralConfig(
        **DECODER, num_local_experts=4, output_router_logits=True), experts_implementation="batched_mm"),
    "qwen2": lambda: _text("Qwen2ForCausalLM", transformers.Qwen2Config(**DECODER)),
    "qwen3": lambda: _text("Qwen3ForCausalLM", transformers.Qwen3Config(**DECODER, head_dim=4)),
    "resnet": lambda: _images("ResNetForImageClassification", transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], num_labels=5, layer_type="basic"), 16),
    "roberta": lambda: _text("RobertaForMaskedLM", transformers.RobertaConfig(**SMALL, **STILL, pad_token_id=0)),
    "t5": _t5,
    "torch_lstm": lambda: (torch_models.LSTM(), _rows()),
    "torch_transformer": lambda: (torch_models.Transformer(), _rows()),
    "vit": lambda: _images("ViTForImageClassification", transformers.ViTConfig(**VISION, **STILL, num_labels=5), 8),
    "whisper": _whisper,
}
# fmt: on
PURE = {"bert", "convnext", "resnet", "roberta", "torch_lstm", "torch_transformer", "whisper"}
"""Models that compute in their own dtype throughout."""


def _loss(model: Any, batch: Any) -> torch.Tensor:
    return model(**batch).loss


def _widened_loss(model: Any, batch: Any) -> torch.Tensor:
    with _Widened():
        return _loss(model, batch)


def _made(name: str) -> Made:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model, batch = ARCHITECTURES[name]()
    wide = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in batch.items()}
    return model.double().train(), wide


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_in_its_own_dtypes_agrees_with_torch(name, note_agreement):
    """Each operation in float32 may round once in torch and once in JAX: 2 roundoffs of the largest entry for each."""
    model, batch = _made(name)
    from gradcheck_suite.bridge import lower

    narrow = lower(model, _loss, batch).narrow
    assert (not narrow) == (name in PURE), narrow
    tolerance = max(TOLERANCE, 2 * SINGLE * len(narrow))
    note_agreement(model, assert_agreement(model, _loss, batch, tolerance=tolerance), tolerance)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in PURE])
def test_an_architecture_in_float64_throughout_agrees_with_torch(name, note_agreement):
    model, batch = _made(name)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        agreement = assert_agreement(model, _widened_loss, batch)
    finally:
        torch.set_default_dtype(default)
    assert agreement.lowered.narrow == ()
    note_agreement(model, agreement, TOLERANCE, widened=True)
