"""Finding gradients that share memory with something else, which makes the reset mode change the gradient.

With `.grad` None, autograd does not copy the first gradient of a window: it takes the tensor that backward returned.
A backward that returns a view of a buffer which it will use again (a static buffer of a CUDA graph, a workspace of a
hand-written `autograd.Function`) thereby gives that buffer away, and the next backward overwrites the running sum.
After a reset to zeros the same backward is added into memory of its own, and all is well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from gradcheck_suite.errors import UsageError
from gradcheck_suite.execution.devices import seeded

Parameters = dict[str, torch.nn.Parameter]
Backwards = Sequence[Callable[[], torch.Tensor]]

_SENTINEL = 0.8125
"""What a gradient is filled with to see who writes into it: exact in every floating dtype."""


@dataclass(frozen=True)
class StolenBuffer:
    """A parameter whose gradient shares memory with something else.

    Attributes:
        kind: `"rewritten"` where a later backward writes into the gradient by itself, `"shared"` where two parameters'
            gradients overlap in memory.
        parameter: whose gradient.
        other: for `"shared"`, the other parameter.
        error: largest difference between the sums after a reset to None and after a reset to zeros.
        explanation: what happens and what to do, in a sentence or two.
    """

    kind: Literal["rewritten", "shared"]
    parameter: str
    other: str | None
    error: float
    explanation: str


def find_stolen_buffers(
    model: torch.nn.Module, loss: Callable[[torch.nn.Module, Any], torch.Tensor], batches: Sequence[Any]
) -> tuple[StolenBuffer, ...]:
    """Look for gradients that share memory with each other or with what backward writes into.

    Parameters and their `.grad` are left as they were; buffers that a forward updates are not.

    Args:
        model: whose trainable parameters are looked at.
        loss: (model, batch) -> the scalar loss of a micro-batch.
        batches: micro-batches, at least two.

    Raises:
        UsageError: fewer than two micro-batches, or no trainable parameter.
    """
    if len(batches) < 2:
        raise UsageError(f"find_stolen_buffers: expected at least 2 micro-batches, got {len(batches)}: pass more")
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise UsageError("find_stolen_buffers: the model has no parameter with requires_grad=True")
    with _gradients_kept(parameters), torch.enable_grad():
        losses = [lambda batch=batch: loss(model, batch) for batch in batches]
        error = _modes_apart(parameters, losses)
        rewritten = _rewritten(parameters, losses)
        shared = _shared(parameters, losses[0])
    found = [
        StolenBuffer("rewritten", name, None, error[name], _rewritten_text(name, error[name], len(batches)))
        for name in rewritten
    ]
    found += [StolenBuffer("shared", a, b, max(error[a], error[b]), _shared_text(a, b)) for a, b in shared]
    return tuple(found)


@contextmanager
def _gradients_kept(parameters: Parameters) -> Iterator[None]:
    kept = {name: p.grad for name, p in parameters.items()}
    for p in parameters.values():
        p.grad = None
    try:
        yield
    finally:
        for name, p in parameters.items():
            p.grad = kept[name]


def _backward(loss: Callable[[], torch.Tensor]) -> None:
    value = loss()
    if value.requires_grad:
        value.backward()


def _sums(parameters: Parameters, losses: Backwards, *, zeros: bool) -> dict[str, torch.Tensor]:
    """Accumulate all micro-batches from zeros or from None; return dense copies."""
    for p in parameters.values():
        p.grad = torch.zeros_like(p) if zeros else None
    device = next((p.device for p in parameters.values()), torch.device("cpu"))
    with seeded(0, device):
        for loss in losses:
            _backward(loss)
    return {name: torch.zeros_like(p) if p.grad is None else _dense(p.grad) for name, p in parameters.items()}


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense().clone() if gradient.is_sparse else gradient.detach().clone()


def _modes_apart(parameters: Parameters, losses: Backwards) -> dict[str, float]:
    released, zeroed = (_sums(parameters, losses, zeros=zeros) for zeros in (False, True))
    return {
        name: float((released[name] - zeroed[name]).abs().max()) if p.numel() else 0.0 for name, p in parameters.items()
    }


def _rewritten(parameters: Parameters, losses: Backwards) -> list[str]:
    """Return the parameters whose gradient changes in a backward that accumulates nothing."""
    for p in parameters.values():
        p.grad = None
    _backward(losses[0])
    watched = {name: p.grad for name, p in parameters.items() if p.grad is not None and not p.grad.is_sparse}
    for gradient in watched.values():
        gradient.fill_(_SENTINEL)
    for loss in losses[1:]:
        value = loss()
        if value.requires_grad:
            # autograd.grad hands gradients back and leaves every `.grad` alone, unless their memory is shared
            torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    return [name for name, gradient in watched.items() if not bool((gradient == _SENTINEL).all())]


def _shared(parameters: Parameters, loss: Callable[[], torch.Tensor]) -> list[tuple[str, str]]:
    """Return the pairs of parameters whose gradients overlap in memory after a reset to None."""
    for p in parameters.values():
        p.grad = None
    _backward(loss)
    places = sorted((*_extent(p.grad), name) for name, p in parameters.items() if _is_dense(p.grad))
    return [
        (name, other) for i, (_, end, name) in enumerate(places) for start, _, other in places[i + 1 :] if start < end
    ]


def _is_dense(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and not gradient.is_sparse and gradient.numel() > 0


def _extent(gradient: torch.Tensor | None) -> tuple[int, int]:
    """Return the first byte's address and the one after the last byte's."""
    assert gradient is not None
    last = sum((size - 1) * stride for size, stride in zip(gradient.shape, gradient.stride(), strict=True))
    return gradient.data_ptr(), gradient.data_ptr() + (last + 1) * gradient.element_size()


def _rewritten_text(name: str, error: float, micro_batches: int) -> str:
    return (
        f"{name}.grad shares its storage with a buffer that the next backward writes: with .grad None, autograd takes "
        f"the tensor that backward returned instead of copying it, and the sum of the earlier micro-batches is lost. "
        f"Over {micro_batches} micro-batches set_to_none and zero_ differ by {error:.3g}. "
        "Return a fresh tensor (buffer.clone()) from that backward, or allocate p.grad as zeros before the first "
        "backward and reset with zero_"
    )


def _shared_text(name: str, other: str) -> str:
    return (
        f"{name}.grad and {other}.grad overlap in memory, so what is added to one changes the other: "
        "return a tensor of its own for each from their backward"
    )
