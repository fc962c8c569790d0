"""How a row of the table becomes a small model of transformers with random weights, and a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

VOCABULARY, PADDING, IGNORED = 53, 0, -100
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
SPECIAL = {"pad_token_id": PADDING, "bos_token_id": 1, "eos_token_id": 2}
Batch = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """A row of the table.

    Attributes:
        name: a class of transformers that returns a loss.
        config: arguments of its configuration. Every probability of dropout is 0 besides.
        batch: returns the arguments of the model, the labels among them.
        attention: implementation of attention; None where the class has only one.
        experts: implementation of a mixture's experts, where it has one.
        refused: a pattern of the message where the bridge refuses the class's own loss; empty where
            it takes it.
    """

    name: str
    config: Mapping[str, Any]
    batch: Callable[[], Batch]
    attention: str | None = "eager"
    experts: str | None = None
    refused: str = ""

    def made(self) -> tuple[torch.nn.Module, Batch]:
        """Return the model in train mode and the batch, both in float64 and always the same."""
        import transformers

        torch.manual_seed(0)
        kind = getattr(transformers, self.name)
        config = _without_dropout(kind.config_class(**self.config))
        chosen = {"attn_implementation": self.attention, "experts_implementation": self.experts}
        model = kind._from_config(
            config, **{name: value for name, value in chosen.items() if value is not None}
        )
        return model.double().train(), {name: _wide(value) for name, value in self.batch().items()}


def _wide(value: Any) -> Any:
    return (
        value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
    )


def _without_dropout(config: Any) -> Any:
    """Set every probability of dropout in a configuration and in those that it contains to 0."""
    for name, value in vars(config).items():
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
        elif hasattr(value, "to_diff_dict"):
            _without_dropout(value)
    return config


def tokens(rows: int = 3, length: int = 7) -> torch.Tensor:
    """Return ids of tokens, none of them special."""
    return torch.randint(3, VOCABULARY, (rows, length))


def text() -> Batch:
    """Return rows of text of which the first is padded."""
    ids = tokens()
    ids[0, 5:] = PADDING
    return {
        "input_ids": ids,
        "attention_mask": (ids != PADDING).long(),
        "labels": ids.masked_fill(ids == PADDING, IGNORED),
    }


def whole_text() -> Batch:
    """Return rows of text of one length, without a mask."""
    ids = tokens()
    return {"input_ids": ids, "labels": ids}


def classified_text() -> Batch:
    """Return padded rows of text, each of one of five classes."""
    return {**text(), "labels": classes()}


def pairs() -> Batch:
    """Return rows of text and padded ones that follow from them."""
    labels, ids = tokens(length=5), tokens()
    labels[0, 3:] = IGNORED
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def classes(rows: int = 3) -> torch.Tensor:
    """Return one of five classes for each row."""
    return torch.randint(0, 5, (rows,))


def images(size: int) -> Callable[[], Batch]:
    """Return a function that returns square images, each of one of five classes."""
    return lambda: {"pixel_values": torch.randn(3, 3, size, size), "labels": classes()}


def sounds(length: int) -> Callable[[], Batch]:
    """Return a function that returns waves, each of one of five classes."""
    return lambda: {"input_values": torch.randn(3, length), "labels": classes()}
