"""A plain model trained for a few windows under the ledger: what the claims about memory and traffic are counted on."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gradcheck_suite.measure.ledger import Ledger
from gradcheck_suite.measure.resets import Parameters

DEPTH = 4


def train(
    reset: Callable[[Parameters], None],
    *,
    width: int,
    items: int,
    micro_batches: int,
    windows: int = 3,
) -> tuple[Ledger, int]:
    """Train `DEPTH` linear layers with tanh between them, float32, plain SGD, a reset after each step.

    Args:
        reset: of the gradients.
        width: of the layers.
        items: in each micro-batch.
        micro_batches: in each window.
        windows: how many; the ledger's window 1 is the first that starts after a reset.

    Returns:
        The closed ledger, and the bytes of one gradient of all parameters.
    """
    layers: list[torch.nn.Module] = []
    for _ in range(DEPTH):
        layers += [torch.nn.Linear(width, width, bias=False), torch.nn.Tanh()]
    model = torch.nn.Sequential(*layers[:-1])
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01, foreach=False)
    x = torch.ones(items, width)
    ledger = Ledger(model, optimizer)
    with ledger:
        for _ in range(windows):
            for _ in range(micro_batches):
                with ledger.phase("forward"):
                    loss = model(x).square().mean() / micro_batches
                loss.backward()
                del loss
            optimizer.step()
            reset(parameters)
    return ledger, sum(p.numel() * p.element_size() for p in parameters)
