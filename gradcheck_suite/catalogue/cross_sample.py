"""What is not accumulable: layers and losses in which the items of a batch meet each other.

No accumulation over micro-batches can equal the large batch of such a problem. They are drawn only where
`problems(accumulable=False)` is asked for, to show that the forward-only check finds every one of them before any loop
is blamed; they have no JAX meaning, since no gradient of theirs is ever compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import torch

from gradcheck_suite.catalogue.definitions import (
    Arguments,
    LayerDefinition,
    LossDefinition,
    Options,
    Signal,
    Tensors,
    expect,
)
from gradcheck_suite.catalogue.losses.common import normal_targets, on
from gradcheck_suite.catalogue.normalisation import EPS
from gradcheck_suite.errors import UsageError

F = torch.nn.functional


class SequenceBatchNorm(torch.nn.BatchNorm1d):
    """`BatchNorm1d` over (n, T, D)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def _floats(signal: Signal) -> Sequence[Options]:
    return () if signal.form == "tokens" else ({},)


def _same(signal: Signal, options: Options) -> Signal:
    expect(signal.form != "tokens", "batch_norm_train", "floating values", signal)
    return signal


def _batch_norm(signal: Signal, options: Options) -> torch.nn.Module:
    module = {"vector": torch.nn.BatchNorm1d, "sequence": SequenceBatchNorm, "image": torch.nn.BatchNorm2d}
    return module[signal.form](signal.features, eps=EPS)


def _negatives(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    scores = out @ batch["target"].T
    return F.cross_entropy(scores, torch.arange(len(out), device=out.device), reduction=reduction)


def _product(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    mean = out.mean() * (1 + batch["target"].mean())
    return mean if reduction == "mean" else mean * len(out)


def _standardised(options: Options, out: torch.Tensor, batch: Tensors, reduction: str) -> torch.Tensor:
    target = batch["target"]
    target = (target - target.mean(0)) / (target.var(0, correction=0) + EPS).sqrt()
    errors = ((out - target) ** 2).mean(1)
    return errors.mean() if reduction == "mean" else errors.sum()


def _count(options: Options, batch: Tensors) -> torch.Tensor:
    return torch.tensor(float(len(batch["target"])))


def _no_meaning(options: Options, *arrays: jax.Array | Arguments) -> jax.Array:
    raise UsageError("a loss in which items meet each other has no item losses")


def _loss(name: str, torch_loss: object) -> LossDefinition:
    return LossDefinition(
        name,
        on("vector"),
        normal_targets,
        torch_loss,  # type: ignore[arg-type]
        _count,
        _no_meaning,
        _no_meaning,
        drawn=False,
    )


LAYERS = (LayerDefinition("batch_norm_train", _floats, _same, _batch_norm, trainable=True),)
LOSSES = (
    _loss("in_batch_negatives", _negatives),
    _loss("product_of_means", _product),
    _loss("standardised_targets", _standardised),
)
