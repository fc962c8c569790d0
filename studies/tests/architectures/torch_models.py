"""torch.nn's own Transformer and LSTM, as the models around them are written: embeddings, padding,
a head, a loss.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

VOCABULARY, WIDTH, LONGEST, IGNORED = 53, 16, 16, -100


class Transformer(nn.Module):
    """`nn.Transformer` from padded rows to rows, with positions and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.places = nn.Parameter(torch.randn(LONGEST, WIDTH))
        self.core = nn.Transformer(WIDTH, 4, 2, 2, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        """Return the loss of predicting the labels from the rows and the labels before them."""
        shifted = torch.cat((torch.ones_like(labels[:, :1]), labels[:, :-1].clamp(min=0)), 1)
        length, padded = labels.shape[1], input_ids == 0
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        out = self.core(
            self._embedded(input_ids),
            self._embedded(shifted),
            tgt_mask=later,
            tgt_is_causal=True,
            src_key_padding_mask=padded,
            memory_key_padding_mask=padded,
        )
        return SimpleNamespace(loss=_cross_entropy(self.head(out), labels))

    def _embedded(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tokens(ids) + self.places[: ids.shape[1]]


class LSTM(nn.Module):
    """`nn.LSTM`, two layers in both directions, that labels tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.core = nn.LSTM(WIDTH, 12, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        """Return the loss of a label for every token."""
        return SimpleNamespace(
            loss=_cross_entropy(self.head(self.core(self.tokens(input_ids))[0]), labels)
        )


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
