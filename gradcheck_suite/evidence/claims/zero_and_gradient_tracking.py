"""Claims of the answer about `grad.zero_()` and gradient tracking (C2.1 to C2.6)."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable

import torch

from gradcheck_suite.evidence.claims.claim import Claim, Finding
from gradcheck_suite.execution.custom_functions import ancestors


def _parameter(*values: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))


def _not_reset() -> Finding:
    weight, bias = _parameter(1.0), _parameter(0.0)
    x = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    target = torch.tensor([3.0, -3.0, -2.0], dtype=torch.float64)
    held: list[float] = []
    alone: list[float] = []
    for i in range(3):
        loss = ((weight * x[i] + bias - target[i]) ** 2).sum()
        (own,) = torch.autograd.grad(loss, bias, retain_graph=True)
        loss.backward()
        assert bias.grad is not None
        alone.append(own.item())
        held.append(bias.grad.item())
    sums = [math.fsum(alone[: i + 1]) for i in range(3)]
    assert held == sums
    assert abs(held[1]) < abs(held[0])
    return Finding(
        "conditional",
        "Without a reset, the gradient is the sum of all gradients so far, to the bit. It accumulates but need not "
        "grow, since gradients of different signs cancel.",
        condition="gradients keep their sign from one iteration to the next",
        figures={"bias.grad of each iteration alone": alone, "bias.grad after each iteration": held},
        counterexample="one bias, three items with gradients -4, 4 and 5: bias.grad is -4, 0 and 5",
    )


def _whenever_tracked() -> Finding:
    def train(reset: Callable[[torch.nn.Parameter], None]) -> list[float]:
        w = _parameter(1.0)
        seen = []
        for x in (1.0, 2.0, 3.0):
            reset(w)
            (w * x).sum().backward()
            assert w.grad is not None
            seen.append(w.grad.item())
        return seen

    def zero(w: torch.nn.Parameter) -> None:
        if w.grad is not None:
            w.grad.zero_()

    def none(w: torch.nn.Parameter) -> None:
        w.grad = None

    def nothing(w: torch.nn.Parameter) -> None:
        pass

    zeroed, released, summed = train(zero), train(none), train(nothing)
    assert zeroed == released == [1.0, 2.0, 3.0]
    assert summed == [1.0, 3.0, 6.0]
    return Finding(
        "conditional",
        "Training needs one reset per optimizer step. `p.grad = None` resets as well as `zero_()`. Between the "
        "micro-batches of one step there must be no reset, since their gradients are to be summed.",
        condition="between two steps, where gradients are not set to None and accumulation is not intended",
        figures={
            "gradients under zero_()": zeroed,
            "gradients under None": released,
            "gradients accumulated on purpose": summed,
        },
        counterexample="w.grad = None before each backward: the gradients equal those under zero_(), which is never "
        "called",
    )


def _what_zero_grad_does() -> Finding:
    default = inspect.signature(torch.optim.Optimizer.zero_grad).parameters["set_to_none"].default
    w = _parameter(2.0)
    optimizer = torch.optim.SGD([w], lr=0.1)
    (w**2).sum().backward()
    held = w.grad
    optimizer.zero_grad()
    by_default = w.grad
    assert held is not None
    assert held.item() == 4.0, "the gradient itself is released, not zeroed"
    (w**2).sum().backward()
    kept = w.grad
    optimizer.zero_grad(set_to_none=False)
    assert kept is not None
    assert w.grad is kept
    assert kept.item() == 0.0
    return Finding(
        "refuted" if default is True and by_default is None else "confirmed",
        "`optimizer.zero_grad()` sets every gradient to None, its default since torch 2.0. With `set_to_none=False` it "
        "calls `zero_()` on each gradient, as the claim says.",
        figures={
            "default of set_to_none": str(default),
            "grad after zero_grad()": str(by_default),
            "grad after zero_grad(set_to_none=False)": kept.tolist(),
            "torch": torch.__version__,
        },
        counterexample="p.grad after optimizer.zero_grad() is None, not a tensor of zeros",
    )


def _none_check() -> Finding:
    first, unused = _parameter(1.0), _parameter(1.0)
    raised = []
    for _ in range(3):
        failed = 0
        for p in (first, unused):
            try:
                p.grad.zero_()  # type: ignore[union-attr]
            except AttributeError:
                failed += 1
        raised.append(failed)
        first.sum().backward()
    assert raised == [2, 1, 1]
    return Finding(
        "confirmed",
        "Before the first backward every gradient is None, and `p.grad.zero_()` raises AttributeError. This happens "
        "not only in early iterations: a frozen parameter, or a parameter that no item reaches, keeps None.",
        figures={"of two parameters, one unused: AttributeErrors in iterations 1, 2, 3": raised},
    )


def _manual_is_equivalent() -> Finding:
    figures = {
        "after zero_grad() / after the loop by hand": _plain_difference(),
        "graph nodes held after 1, 2, 3 resets by hand, create_graph=True": _graph_nodes(by_hand=True),
        "the same with optimizer.zero_grad(set_to_none=False)": _graph_nodes(by_hand=False),
        "parameter outside the optimizer: grad after zero_grad() / by hand over model.parameters()": _outside(),
        "momentum on an unused parameter: value after zero_grad() / by hand": _momentum(),
        "stored rows of a sparse gradient after zero_grad() / by hand": _sparse(),
    }
    return Finding(
        "refuted",
        "Since torch 2.0 `zero_grad()` releases gradients and `zero_()` keeps them. `zero_()` by hand differs from "
        "`zero_grad(set_to_none=False)` for a gradient with a graph, which it keeps and which grows, and for "
        "parameters outside the optimizer. Under a release the optimizer skips an unused parameter; under zeros "
        "momentum and weight decay move it.",
        figures=figures,
        counterexample="SGD(lr=0.1, momentum=0.9), a parameter used only in the first window: it keeps moving under "
        "zero_() and stops under zero_grad()",
    )


def _plain_difference() -> list[str]:
    shown = []
    for by_hand in (False, True):
        w = _parameter(3.0)
        optimizer = torch.optim.SGD([w], lr=0.1)
        (w**2).sum().backward()
        assert w.grad is not None
        if by_hand:
            w.grad.zero_()
        else:
            optimizer.zero_grad()
        shown.append("None" if w.grad is None else str(w.grad.tolist()))
    assert shown == ["None", "[0.0]"]
    return shown


def _graph_nodes(*, by_hand: bool) -> list[int]:
    w = _parameter(2.0)
    optimizer = torch.optim.SGD([w], lr=0.1)
    held = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the reference cycle, the subject here
        for _ in range(3):
            (w**3).sum().backward(create_graph=True)
            assert w.grad is not None
            if by_hand:
                with torch.no_grad():
                    w.grad.zero_()
            else:
                optimizer.zero_grad(set_to_none=False)
            held.append(sum(1 for _ in ancestors([w.grad])))
    w.grad = None
    return held


def _outside() -> list[str]:
    shown = []
    for by_hand in (False, True):
        inside, outside = _parameter(1.0), _parameter(1.0)
        optimizer = torch.optim.SGD([inside], lr=0.1)
        (inside * outside * 5).sum().backward()
        if by_hand:
            for p in (inside, outside):
                assert p.grad is not None
                p.grad.zero_()
        else:
            optimizer.zero_grad()
        shown.append("None" if outside.grad is None else str(outside.grad.tolist()))
    assert shown == ["[5.0]", "[0.0]"]
    return shown


def _momentum() -> list[float]:
    shown = []
    for by_hand in (False, True):
        w = _parameter(1.0)
        optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)
        w.sum().backward()
        optimizer.step()
        assert w.grad is not None
        if by_hand:
            w.grad.zero_()
        else:
            optimizer.zero_grad()
        optimizer.step()
        shown.append(round(w.item(), 12))
    assert shown == [0.9, 0.81]
    return shown


def _sparse() -> list[str]:
    shown = []
    for by_hand in (False, True):
        table = torch.nn.Embedding(8, 2, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        table(torch.tensor([1, 2])).sum().backward()
        assert table.weight.grad is not None
        if by_hand:
            table.weight.grad.zero_()
        else:
            optimizer.zero_grad(set_to_none=False)
        shown.append(str(table.weight.grad._nnz()))
    return shown


def _tracking() -> Finding:
    figures = {}
    for create_graph in (False, True):
        for tracked in (True, False):
            w = _parameter(2.0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                (w**3).sum().backward(create_graph=create_graph)
                assert w.grad is not None
                with torch.set_grad_enabled(tracked):
                    w.grad.zero_()
                left = w.grad
                (w**3).sum().backward(create_graph=create_graph)
            assert w.grad.item() == 12.0, "the next gradient is right either way"
            name = f"create_graph={create_graph}, {'tracking on' if tracked else 'under no_grad'}"
            figures[name] = f"requires_grad {left.requires_grad}, next gradient {w.grad.item()}"
            attached = bool(left.requires_grad)
            assert attached == create_graph
            w.grad = None
    return Finding(
        "confirmed",
        "It makes no difference. An ordinary gradient does not require grad, so autograd tracks nothing while it is "
        "zeroed. After `backward(create_graph=True)` the gradient has a graph, and `zero_()` keeps that graph inside "
        "`no_grad` as well as outside: detach the gradient, as `optimizer.zero_grad` does, or release it. The values "
        "are right in every case.",
        figures=figures,
    )


CLAIMS = (
    Claim(
        "C2.1",
        "Without a reset gradients accumulate over iterations: the bias gradient keeps growing.",
        "three iterations without a reset; the gradient compared with the exact sum of the single gradients",
        _not_reset,
        short="Without a reset, gradients keep growing",
    ),
    Claim(
        "C2.2",
        "grad.zero_() must be used whenever gradients are tracked.",
        "three iterations under zero_(), under None and with no reset",
        _whenever_tracked,
        short="zero_() is needed where tracking is on",
    ),
    Claim(
        "C2.3",
        "optimizer.zero_grad() calls .grad.zero_() on each parameter.",
        "the signature's default, and the gradient before and after the call",
        _what_zero_grad_does,
        short="optimizer.zero_grad() calls zero_()",
    ),
    Claim(
        "C2.4",
        "The `is not None` check is needed, above all in early iterations.",
        "p.grad.zero_() without the check, over three iterations, one of two parameters unused",
        _none_check,
        short="The `is not None` check is needed",
    ),
    Claim(
        "C2.5",
        "Manual zero_() is equivalent to optimizer.zero_grad().",
        "both on plain, graph-attached and sparse gradients, outside the optimizer's groups, and under momentum",
        _manual_is_equivalent,
        short="zero_() is the same as zero_grad()",
    ),
    Claim(
        "C2.6",
        "Whether gradient tracking is enabled while zero_() runs makes no difference (the question itself).",
        "zero_() inside and outside no_grad, with and without create_graph; the next gradient against 3 w^2",
        _tracking,
        short="Tracking during zero_() changes nothing",
    ),
)
