"""Problems in the form that language model trainers take: dictionaries with `input_ids` and `labels`, padded rows.

The models are transformers' own, tiny and with random weights, so that a trainer meets them as it meets any other: by
their `forward`, their loss and what their loss accepts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from gradcheck_suite.schema.contract import Problem

VOCABULARY, LONGEST = 11, 6
IGNORED = -100
"""What transformers' losses take for no target."""
ATTENTION = "eager"
"""Old versions build the other implementations' masks in float32, too narrow for a float64 run."""
SPREAD = 0.5
"""Standard deviation of the weights: wide, so that rows differ in their losses as those of a trained model do."""


def padded_rows(items: int, seed: int) -> dict[str, torch.Tensor]:
    """Return rows of 2 to `LONGEST` tokens, padded on the right, as transformers' language model collator makes them.

    Returns:
        `input_ids`, `attention_mask` and `labels`, all (items, `LONGEST`); labels are the input ids, `IGNORED` where
        there is padding.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (items, LONGEST), generator=generator)
    lengths = torch.randint(2, LONGEST + 1, (items, 1), generator=generator)
    there = torch.arange(LONGEST) < lengths
    return {
        "input_ids": torch.where(there, ids, 0),
        "attention_mask": there.long(),
        "labels": torch.where(there, ids, IGNORED),
    }


def next_tokens(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return how many targets a causal language model's mean divides by: a row's first token is nobody's target."""
    return (batch["labels"][:, 1:] != IGNORED).sum()


def own_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss that the model computes of its labels."""
    return model(**batch).loss


def seeded(make: Callable[[], torch.nn.Module]) -> Callable[[int], torch.nn.Module]:
    """Return a function of a seed that makes the model with weights drawn from it."""

    def model(seed: int) -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make()

    return model


def gpt2() -> Problem:
    """A causal language model with absolute positions and tied embeddings, on padded rows."""
    return Problem(seeded(_gpt2), padded_rows, own_loss, count=next_tokens)


def llama() -> Problem:
    """A causal language model with rotary positions and gated layers, on padded rows."""
    return Problem(seeded(_llama), padded_rows, own_loss, count=next_tokens)


def llama_smoothed() -> Problem:
    """The same as `llama` with the smoothed loss that `TrainingArguments(label_smoothing_factor=0.1)` asks for."""
    return Problem(seeded(_llama), padded_rows, smoothed_loss, count=next_tokens)


SMOOTHING = 0.1


def smoothed_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross-entropy against targets that hold back `SMOOTHING`, spread over the vocabulary."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits, targets = model(**inputs).logits[:, :-1], batch["labels"][:, 1:]
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, VOCABULARY), targets.reshape(-1), ignore_index=IGNORED, label_smoothing=SMOOTHING
    )


def _gpt2() -> torch.nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LONGEST,
            n_embd=8,
            n_layer=1,
            n_head=2,
            initializer_range=SPREAD,
            attn_implementation=ATTENTION,
            **_WITHOUT_CHANCE,
        )
    )


_WITHOUT_CHANCE: dict[str, Any] = {
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "use_cache": False,
}


def _llama() -> torch.nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=LONGEST,
            initializer_range=SPREAD,
            attn_implementation=ATTENTION,
            bos_token_id=1,
            eos_token_id=1,
            use_cache=False,
        )
    )
