"""A model as its authors write it, for tests of what the bridge says about its lines."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn


class LossInside(nn.Module):
    """A classifier that computes its own loss, and looks at the labels first, as DeBERTa-v2 of
    transformers does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleNamespace:
        """Return the logits, and the loss of the labels that are no padding."""
        logits = self.head(x)
        loss = None
        if labels is not None:
            kept = (labels >= 0).nonzero().flatten()
            if kept.size(0) > 0:
                loss = nn.functional.cross_entropy(logits[kept], labels[kept])
        return SimpleNamespace(logits=logits, loss=loss)
