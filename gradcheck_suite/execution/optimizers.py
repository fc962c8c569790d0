"""The optimizers of a run: one whose step changes nothing, one of bounded steps, and torch's by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from gradcheck_suite.errors import UsageError


class NoOpOptimizer(torch.optim.Optimizer):
    """An optimizer whose step changes nothing, so that every window is judged at the same parameters."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.0, "foreach": None, "fused": None})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure, if any, and return what it returns."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()


class NormalizedSGD(torch.optim.Optimizer):
    """Gradient descent with momentum, on each parameter's gradient divided by its largest element.

    No element moves by more than lr / (1 - momentum) in a step, in every dtype: no loop diverges under it.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.02, momentum: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "foreach": None, "fused": None})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure, if any; update every parameter that has a gradient; return the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or not p.numel():
                    continue
                gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
                # a sharded gradient is gathered: max() fails on a rank whose part of it is empty
                whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                largest = float(whole.abs().max())
                direction = gradient / largest if largest else gradient.clone()
                state = self.state[p]
                if "momentum_buffer" in state:
                    direction = state["momentum_buffer"].mul_(group["momentum"]).add_(direction)
                state["momentum_buffer"] = direction
                p.sub_(group["lr"] * direction)
        return loss


_Factory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, _Factory] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "muon": lambda p: torch.optim.Muon(p, lr=0.01),
    "sparseadam": lambda p: torch.optim.SparseAdam(p, lr=0.01),
    "normalized": lambda p: NormalizedSGD(p),
}
TAKES_SPARSE = frozenset({"normalized", "sgd", "nesterov", "adagrad", "lbfgs", "sparseadam"})
"""Names of the optimizers that support sparse gradients. SGD does, but not with weight decay."""
_ONLY_SPARSE = "sparse gradients alone: those of the weights of torch.nn.Embedding(sparse=True)"
NEEDS_CLOSURE = frozenset({"lbfgs"})
"""Names of the optimizers whose step must be given a closure."""
NEEDS = {"muon": "parameters with two dimensions alone: no bias", "sparseadam": _ONLY_SPARSE}
"""What some optimizers train, which the random models are not made of."""
FOR_ANY_LOOP = tuple(name for name in OPTIMIZERS if name not in NEEDS and name not in NEEDS_CLOSURE)
"""Names of the optimizers that train any model, in any loop."""


def checked_optimizer(name: str) -> str:
    """Return the name; raises `UsageError` if no optimizer has it."""
    if name not in OPTIMIZERS:
        raise UsageError(f"optimizer must be one of {', '.join(OPTIMIZERS)}; got {name!r}")
    return name


def in_groups(optimizer: torch.optim.Optimizer, groups: int) -> torch.optim.Optimizer:
    """Deal the parameters out to so many groups, in turn; each group has a learning rate of its own.

    LBFGS takes one group only, and keeps it.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return optimizer
    (group,) = optimizer.param_groups
    dealt = [group["params"][g::groups] for g in range(groups)]
    optimizer.param_groups = [
        {**group, "params": parameters, "lr": group["lr"] / (1 + g)} for g, parameters in enumerate(dealt) if parameters
    ]
    return optimizer


def _expect_trainable(name: str, model: torch.nn.Module) -> None:
    """Raise `UsageError` where an optimizer cannot train some parameter of a model."""
    if name not in NEEDS:
        return
    sparse = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, sparse) and m.sparse}
    fits = {"muon": lambda p: p.ndim == 2 and id(p) not in embeddings, "sparseadam": lambda p: id(p) in embeddings}
    for parameter, p in model.named_parameters():
        if p.requires_grad and not fits[name](p):
            raise UsageError(
                f"optimizer {name} trains {NEEDS[name]}; the model's {parameter} of shape {tuple(p.shape)} is none of "
                "them: choose another optimizer, or a --problem that it can train"
            )


def make_optimizer(name: str | None, model: torch.nn.Module, groups: int = 1) -> torch.optim.Optimizer:
    """Return the named optimizer over a model's trainable parameters, or `NoOpOptimizer` for None."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise UsageError("the model has no parameter with requires_grad=True: there is no gradient to check")
    if name is None:
        return in_groups(NoOpOptimizer(parameters), groups)
    _expect_trainable(checked_optimizer(name), model)
    return in_groups(OPTIMIZERS[name](parameters), groups)
