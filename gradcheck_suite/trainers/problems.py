"""Problems in the form that language model trainers take: dictionaries with `input_ids` and `labels`, padded rows.

The models are transformers' own, tiny and with random weights.
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
"""Standard deviation of the weights: large, so that the losses of rows differ as those of a trained model do."""


def padded_rows(items: int, seed: int) -> dict[str, torch.Tensor]:
    """Return rows of 2 to `LONGEST` tokens, padded on the right, as transformers' language model collator makes them.

    Returns:
        `input_ids`, `attention_mask` and `labels`, all (items, `LONGEST`); labels are the input ids, `IGNORED` where
        there is padding.
    """
    ids, is_token = padded_ids(items, torch.Generator().manual_seed(seed), range(1, VOCABULARY))
    return {
        "input_ids": ids,
        "attention_mask": is_token.long(),
        "labels": torch.where(is_token, ids, IGNORED),
    }


def padded_ids(
    items: int, generator: torch.Generator, vocabulary: range, shortest: int = 2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (items, `LONGEST`) token ids, padded on the right with 0, and which of them are no padding."""
    ids = torch.randint(vocabulary.start, vocabulary.stop, (items, LONGEST), generator=generator)
    is_token = torch.arange(LONGEST) < torch.randint(shortest, LONGEST + 1, (items, 1), generator=generator)
    return torch.where(is_token, ids, 0), is_token


def next_tokens(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return how many targets a causal language model's mean divides by: the first token of a row is no target."""
    return (batch["labels"][:, 1:] != IGNORED).sum()


def own_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss that the model computes from its labels."""
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
    """Return the mean cross-entropy with `SMOOTHING` of each target spread evenly over the vocabulary."""
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
            **_WITHOUT_DROPOUT,
        )
    )


_WITHOUT_DROPOUT: dict[str, Any] = {
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
