"""Layers and losses that are not separable over samples, such as batch norm and in-batch negatives.

No accumulation over micro-batches equals the large batch of such a problem. The strategies draw these kinds only for
`problems(accumulable=False)`, to test that the forward-only check detects each of them before a loop is blamed. They
have no JAX implementation, since their gradients are never compared.
"""

from __future__ import annotations

import jax
import torch

from gradcheck_suite.catalogue.definitions import Arguments, LayerDefinition, LossDefinition, Tensors
from gradcheck_suite.catalogue.losses.common import normal_targets
from gradcheck_suite.catalogue.normalization import EPS
from gradcheck_suite.catalogue.signals import FLOATS, Options, Signal, keeps_signal, on
from gradcheck_suite.errors import UsageError

F = torch.nn.functional


class SequenceBatchNorm(torch.nn.BatchNorm1d):
    """`BatchNorm1d` over (n, T, D)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


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


def _no_item_losses(options: Options, *arrays: jax.Array | Arguments) -> jax.Array:
    raise UsageError("a loss that is not separable over samples has no item losses")


def _loss(name: str, torch_loss: object) -> LossDefinition:
    return LossDefinition(
        name,
        on("vector"),
        normal_targets,
        torch_loss,  # type: ignore[arg-type]
        _count,
        _no_item_losses,
        _no_item_losses,
        drawn=False,
    )


LAYERS = (
    LayerDefinition(
        "batch_norm_train", on(*FLOATS), keeps_signal("batch_norm_train", *FLOATS), _batch_norm, trainable=True
    ),
)
LOSSES = (
    _loss("in_batch_negatives", _negatives),
    _loss("product_of_means", _product),
    _loss("standardised_targets", _standardised),
)
