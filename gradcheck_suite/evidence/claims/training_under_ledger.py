"""A plain model trained for a few windows under the ledger, for the claims about memory and traffic."""

from __future__ import annotations

import torch

from gradcheck_suite.loops.modes import RESET_MODES
from gradcheck_suite.measure.ledger import Ledger

DEPTH = 4


def train(
    mode: str,
    *,
    width: int,
    items: int,
    micro_batches: int,
    windows: int = 3,
) -> tuple[Ledger, int]:
    """Train `DEPTH` linear layers with tanh between them, float32, plain SGD, a reset after each step.

    Args:
        mode: name of the reset mode.
        width: inputs and outputs of each layer.
        items: number of items in each micro-batch.
        micro_batches: number of micro-batches in each window.
        windows: number of windows; the ledger's window 1 is the first that starts after a reset.

    Returns:
        The closed ledger, and the bytes of one gradient of all parameters.
    """
    reset = RESET_MODES[mode].reset
    assert reset is not None
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
            reset(parameters, optimizer)
    return ledger, sum(p.numel() * p.element_size() for p in parameters)
