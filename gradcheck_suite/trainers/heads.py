"""Heads of transformers' models, tiny and with random weights, each a problem by its class's name.

    gradcheck-suite verify hf-trainer --problem gradcheck_suite.trainers.heads:BertForMaskedLM

Whether a trainer's gradient is right hangs on what a head does with the count of targets that it is handed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from gradcheck_suite.schema.contract import Problem
from gradcheck_suite.trainers.problems import ATTENTION, IGNORED, next_tokens, own_loss, seeded

VOCABULARY, LONGEST, CLASSES, PIXELS = 13, 6, 3, 8
Batch = dict[str, torch.Tensor]


def _rows(items: int, generator: torch.Generator, shortest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and which of them are there; the others are padding on the right."""
    ids = torch.randint(3, VOCABULARY, (items, LONGEST), generator=generator)
    there = torch.arange(LONGEST) < torch.randint(shortest, LONGEST + 1, (items, 1), generator=generator)
    return torch.where(there, ids, 0), there


def _text(items: int, seed: int, label: Callable[..., torch.Tensor], shortest: int = 2) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids, there = _rows(items, generator, shortest)
    return {"input_ids": ids, "attention_mask": there.long(), "labels": label(ids, there, generator)}


def _every_token(items: int, seed: int) -> Batch:
    return _text(items, seed, lambda ids, there, _: torch.where(there, ids, IGNORED))


def _some_tokens(items: int, seed: int) -> Batch:
    def label(ids: torch.Tensor, there: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        chosen = there & (torch.rand(ids.shape, generator=generator) < 0.6)
        chosen[:, 0] = True  # no row without a target
        return torch.where(chosen, ids, IGNORED)

    return _text(items, seed, label)


def _class_of_tokens(items: int, seed: int) -> Batch:
    def label(ids: torch.Tensor, there: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return torch.where(there, torch.randint(0, CLASSES, ids.shape, generator=generator), IGNORED)

    return _text(items, seed, label)


def _class_of_row(items: int, seed: int) -> Batch:
    # without padding, which only some of these heads look at
    return _text(items, seed, lambda ids, there, g: torch.randint(0, CLASSES, (len(ids),), generator=g), LONGEST)


def _class_of_image(items: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(items, 3, PIXELS, PIXELS, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(0, CLASSES, (items,), generator=generator)}


def _not_ignored(batch: Batch) -> torch.Tensor:
    return (batch["labels"] != IGNORED).sum()


@dataclass(frozen=True)
class _Head:
    """What a kind of head is trained on.

    Attributes:
        batch: its items.
        count: what its mean divides by; items when None.
        models: the models that are tried, by the first part of their class's name, with settings of their own.
        settings: of every such model.
    """

    batch: Callable[[int, int], Batch]
    count: Callable[[Batch], torch.Tensor] | None
    models: Mapping[str, Mapping[str, Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)


_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 20,
    "attn_implementation": ATTENTION,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.5,
}
_CHANCES = (
    "hidden_dropout_prob attention_probs_dropout_prob classifier_dropout_prob hidden_dropout attention_dropout dropout "
    "activation_dropout classifier_dropout attn_pdrop resid_pdrop embd_pdrop dropout_rate seq_classif_dropout "
    "summary_first_dropout embedding_dropout embed_dropout encoder_layerdrop decoder_layerdrop"
)
_GPT = {"n_positions": 20, "n_embd": 8, "n_layer": 1, "n_head": 2}
_T5 = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
_BART = {
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "decoder_start_token_id": 1,
}
_DISTILBERT = {"dim": 8, "hidden_dim": 12, "n_layers": 1, "n_heads": 2}
_ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": {},
    "Roberta": {},
    "DistilBert": _DISTILBERT,
    "Electra": {"embedding_size": 8},
    "ModernBert": {"global_attn_every_n_layers": 1, "local_attention": 4},
}
_DECODERS: dict[str, dict[str, Any]] = {"Llama": {}, "Qwen2": {}, "GPT2": _GPT, "GPTNeoX": {}}
_CLASSES = {"num_labels": CLASSES}
_IMAGE = {"image_size": PIXELS, "patch_size": 4}
HEADS: dict[str, _Head] = {
    "ForCausalLM": _Head(
        _every_token, next_tokens, {"Llama": {}, "Mistral": {}, "Qwen2": {}, "GPTNeoX": {}, "Bloom": {**_GPT}}
    ),
    "LMHeadModel": _Head(
        _every_token,
        next_tokens,
        {
            "GPT2": _GPT,
            "OpenAIGPT": {**_GPT, "afn": "gelu"},
            "CTRL": {**_GPT, "dff": 12},
            "Bert": {"is_decoder": True},
        },
    ),
    "ForMaskedLM": _Head(_some_tokens, _not_ignored, _ENCODERS),
    "ForConditionalGeneration": _Head(
        _every_token, _not_ignored, {"T5": _T5, "MT5": _T5, "Bart": _BART, "Pegasus": _BART}
    ),
    "ForSequenceClassification": _Head(_class_of_row, None, {**_ENCODERS, **_DECODERS}, _CLASSES),
    "ForTokenClassification": _Head(_class_of_tokens, _not_ignored, {**_ENCODERS, **_DECODERS}, _CLASSES),
    "ForImageClassification": _Head(
        _class_of_image,
        None,
        {
            "ViT": _IMAGE,
            "Dinov2": _IMAGE,
            "ConvNext": {"hidden_sizes": [8], "depths": [1], "patch_size": 4, "num_stages": 1},
        },
        _CLASSES,
    ),
}
"""Kinds of heads, by the last part of their class's name."""
NAMES = tuple(model + head for head, kind in HEADS.items() for model in kind.models)
"""Every head's class, by name; each is an attribute of this module, a function that returns the problem."""


def _problem(name: str) -> Problem:
    head = next(head for head in HEADS if name.endswith(head))
    kind, model = HEADS[head], name.removesuffix(head)
    settings = {**_COMMON, **dict.fromkeys(_CHANCES.split(), 0.0), **kind.models[model], **kind.settings}
    make, config = getattr(transformers, name), getattr(transformers, f"{model}Config")
    return Problem(seeded(lambda: make(config(**settings))), kind.batch, own_loss, count=kind.count)


def __getattr__(name: str) -> Callable[[], Problem]:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return lambda: _problem(name)
