"""Functions that only scripts run: they load a loop by its name, record its steps, and print how its gradients compare.

They are copied into scripts together with what they need of the suite, so they need Python and torch alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from gradcheck_suite.core.contract import Batch
from gradcheck_suite.reference.large_batch import parameter_gradients
from gradcheck_suite.run.observer import Observation, Observer
from gradcheck_suite.run.optimizers import (
    MakeOptimizer,
    ParameterFault,
    Values,
    at_start,
    fault_before,
    fault_between,
    fault_of_step,
)
from gradcheck_suite.verification.separability import SEPARABILITY_TOLERANCE, adds_up


def load(place: str, name: str, folder: str) -> Any:
    """Return what a name stands for in a Python file or a module of a folder; exit with status 2 where that fails."""
    sys.path.insert(0, folder)
    try:
        if not place.endswith(".py"):
            return attrgetter(name)(importlib.import_module(place))
        spec = importlib.util.spec_from_file_location(f"file_of_{Path(place).stem}", Path(folder, place))
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        sys.modules[spec.name] = module  # type: ignore[union-attr]
        spec.loader.exec_module(module)  # type: ignore[union-attr]
        return attrgetter(name)(module)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        print(f"cannot import {name} from {place} in {folder} ({reason}).", file=sys.stderr)
        print("Install what is missing, or change the place in this script.", file=sys.stderr)
        raise SystemExit(2) from None


def recorded(model: torch.nn.Module, optimizer: torch.optim.Optimizer, limit: int) -> list[Any]:
    """Return a list that gets (gradients, parameters) at every optimizer.step(); too many steps end the script."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    own, steps, found = inspect.unwrap(type(optimizer).step).__code__, [], []  # type: ignore[var-annotated]

    def now() -> tuple[dict[str, Any], dict[str, Any]]:
        gradients = {n: None if p.grad is None else p.grad.detach().to_dense().clone() for n, p in trained.items()}
        return gradients, {name: p.detach().clone() for name, p in model.named_parameters()}

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if len(steps) == limit:
            print(f"the loop calls optimizer.step() {limit} times and does not stop there\nthe fault is there", flush=True)
            os._exit(1)  # a loop may catch an exception
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        found[:] = None, now()[1]

        def last() -> Any:  # called after all hooks, which may edit gradients
            value = None if closure is None else closure()
            (gradients, parameters), caller = now(), sys._getframe(1).f_code
            found[:] = gradients if caller is own and not torch.compiler.is_compiling() else None, parameters
            return value

        return args[:1], {**kwargs, "closure": last}

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if found:  # once: a step that calls another one ends twice
            steps.append((found[0] or now()[0], found[1]))  # as the step leaves them, where hooks put another closure
            found.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return steps


def compared(observed: Any, expected: Any, allowed: Any = 0.0) -> tuple[torch.Tensor, ...]:
    """Return four tensors of one shape: expected, observed, |observed - expected|, allowed; None stands for zeros."""
    given = (torch.as_tensor(0.0 if g is None else g, dtype=torch.float64) for g in (expected, observed, allowed))
    want, got, most = torch.broadcast_tensors(*(tensor.cpu() for tensor in given))
    error = (got - want).abs().nan_to_num(torch.inf, torch.inf)
    error[(got == want) | (got.isnan() & want.isnan())] = 0.0
    return want, got, error, most


def largest_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return the largest difference between the gradients in `one` and those of the same parameters in `other`."""
    return max((float(e) for name in one for e in compared(one[name], other[name])[2].flatten()), default=0.0)


def gradient_is_right(observed: Mapping[str, Any], expected: Mapping[str, Any], allowed: Mapping[str, Any]) -> bool:
    """Compare gradients element by element and print the worst of them."""
    right = True
    for name in allowed:
        want, got, error, most = compared(observed[name], expected[name], allowed[name])
        wrong = error > most
        print(f"{name}: {int(wrong.sum())} of {want.numel()} elements differ by more than rounding allows")
        if observed[name] is None or not got.isfinite().all():
            print(f"    {name}.grad is {'None' if observed[name] is None else 'not finite'} at the step")
        for place in sorted(wrong.nonzero().tolist(), key=lambda place: -float(error[tuple(place)]))[:8]:
            line = "    {:<12} expected {:<24} observed {:<24} error {:<10.3g} allowed {:.3g}"
            print(line.format(str(place), *(float(tensor[tuple(place)]) for tensor in (want, got, error, most))))
        right = right and not wrong.any()
    return right


def first_fault(
    make_optimizer: MakeOptimizer | None, start: Observation, observations: list[Observation], end: Values
) -> ParameterFault | None:
    """Return the first fault of the parameters in a run, or None.

    Args:
        make_optimizer: parameters -> the optimizer; None for one whose step changes nothing.
        start: `at_start` of the run.
        observations: one per step, in order.
        end: the parameters after the run.
    """
    previous = start
    for observation in observations:
        fault = fault_before(previous, observation, start.after)
        if fault := fault or fault_of_step(make_optimizer, previous, observation):
            return fault
        previous = observation
    return fault_between(previous, end, start.after)


def parameters_are_right(observer: Observer, make_optimizer: MakeOptimizer | None) -> bool:
    """Return whether the optimizer's steps alone changed the parameters; None is one whose step changes nothing."""
    start, end = at_start(observer.start, observer.start_state), observer.values()
    fault = first_fault(make_optimizer, start, observer.observations, end)
    print(f"parameters: {fault.sentence if fault else 'the optimizer alone changed them'}")
    if fault and fault.error is not None:
        print(f"{fault.parameter}: error {fault.error:.3g}, allowed {fault.allowed:.3g}")
    return fault is None


def added(gradients: Iterable[torch.Tensor | None]) -> torch.Tensor | float:
    """Return the sum of a parameter's gradients; None stands for zeros."""
    return sum((gradient for gradient in gradients if gradient is not None), start=torch.zeros(()))


def is_sum_over_items(
    model: torch.nn.Module,
    loss: Callable[[torch.nn.Module, Batch], torch.Tensor],
    count: Callable[[Batch], Any] | None,
    whole: Batch,
    parts: Sequence[Batch],
) -> bool:
    """Return whether count * loss of all items, and its gradient, are the sums of the same over batches of them.

    Args:
        model: in float64.
        loss: (model, batch) -> a scalar.
        count: batch -> what its mean divides by; None where the loss is a sum.
        whole: all items in one batch.
        parts: the same items in several batches.
    """
    counts = [float(count(part)) if count else 1.0 for part in parts]
    total = float(count(whole)) if count else 1.0
    try:
        large = total * loss(model, whole)
        terms = [n * loss(model, part) for n, part in zip(counts, parts, strict=True) if n]
    except (RuntimeError, ValueError) as refusal:
        print(f"the model refuses one of the batches: {type(refusal).__name__}: {refusal}")
        return False
    summed = [float(term.detach()) for term in terms]
    print(f"count * loss of all items {large:.12g}, summed over the micro-batches {sum(summed):.12g}")
    right = adds_up(float(large.detach()), summed)
    if count is not None:
        print(f"count of all items {total:.12g}, summed over the micro-batches {sum(counts):.12g}")
        right = right and adds_up(total, counts)
    one, gradients = parameter_gradients(large, model), [parameter_gradients(term, model) for term in terms]
    other = {name: added(gradient[name] for gradient in gradients) for name in one}
    error, size = largest_difference(one, other), max(largest_difference(g, dict.fromkeys(g)) for g in gradients)
    print(f"the gradients of the two differ by at most {error:.3g}, the largest element is {size:.3g}")
    return right and error <= SEPARABILITY_TOLERANCE * size


def gradient_accumulates(
    model: torch.nn.Module,
    loss: Callable[[torch.nn.Module, Batch], torch.Tensor],
    count: Callable[[Batch], Any] | None,
    whole: Batch,
    parts: Sequence[Batch],
    allowed: Mapping[str, Any],
) -> bool:
    """Return whether the gradient of a window is the sum of its micro-batches', weighted by their counts; see above."""
    shares = [float(count(part)) / float(count(whole)) if count else 1.0 for part in parts]
    large = parameter_gradients(loss(model, whole), model)
    terms = [parameter_gradients(n * loss(model, part), model) for n, part in zip(shares, parts, strict=True) if n]
    summed = {name: added(term[name] for term in terms) for name in large}
    return gradient_is_right(summed, large, allowed)
