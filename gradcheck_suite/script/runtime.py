"""Functions that only scripts run: they load a loop by its name, run it, and print how its gradients compare.

Each is copied into scripts word for word, together with the functions of the suite that it calls. Copied code needs
Python and torch alone. Messages go to standard output. Where a file or module cannot be imported, or the script fails
otherwise than by the fault that it shows, they go to standard error and the exit status is 2.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from gradcheck_suite.core.comparison import LOSS_TOLERANCE, elementwise_error
from gradcheck_suite.core.contract import Batch, Loop, TrainingRun
from gradcheck_suite.reference.large_batch import parameter_gradients
from gradcheck_suite.run.observer import Observation, Observer, Structure, TooManySteps, structure, structure_changes
from gradcheck_suite.run.optimizers import (
    MakeOptimizer,
    ParameterFault,
    Values,
    at_start,
    fault_before,
    fault_between,
    fault_of_step,
)
from gradcheck_suite.verification.separability import adds_up

SHOWN = 8


def load(place: str, name: str, folder: str) -> Any:
    """Return what a name stands for in a Python file or a module of a folder; exit with status 2 where that fails."""
    sys.path.insert(0, folder)
    try:
        if not place.endswith(".py"):
            return attrgetter(name)(importlib.import_module(place))
        spec = importlib.util.spec_from_file_location(f"file_of_{Path(place).stem}", Path(folder, place))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return attrgetter(name)(module)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        print(f"cannot import {name} from {place} in {folder} ({reason}).", file=sys.stderr)
        print("Install what is missing, or change the place in this script.", file=sys.stderr)
        raise SystemExit(2) from None


def exit_status(main: Callable[[], int]) -> int:
    """Return what a script's check returns, and 2 where the check itself fails: Python's own status for that is 1."""
    try:
        return main()
    except Exception:
        traceback.print_exc()
        print("This is another failure than the fault that the script shows.", file=sys.stderr)
        return 2


def completes(
    loop: Loop, run: TrainingRun, observer: Observer, seconds: float | None = None, *, may_raise: bool = False
) -> bool:
    """Run the loop; return whether it returns, without an exception and without far too many steps.

    Args:
        loop: the loop under test.
        run: its argument.
        observer: of its steps, which stops the loop where they are too many.
        seconds: after which the script ends with status 1, where the loop has not returned; None for no limit.
        may_raise: whether an exception is the fault that the script shows; another one is passed on.
    """
    if seconds is not None:
        faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        loop(run)
    except KeyboardInterrupt:
        raise
    except TooManySteps:
        pass
    except BaseException as error:
        if not may_raise:
            raise RuntimeError("the loop raised an exception, which is not the fault that the script shows") from error
        traceback.print_exc(file=sys.stdout)
        print("the loop raised this exception")
        return False
    finally:
        faulthandler.cancel_dump_traceback_later()
    if observer.exceeded:
        print(f"the loop calls optimizer.step() {len(observer.observations)} times and does not stop there")
    return not observer.exceeded


def steps_are_right(observer: Observer, expected: int) -> bool:
    """Return whether the loop took one step per window."""
    taken = len(observer.observations)
    print(f"optimizer.step() was called {taken} times, expected {expected}: one call per window")
    return taken == expected


def broadcast(*gradients: Any) -> list[torch.Tensor]:
    """Return tensors, numbers or nested lists of them in float64 and in one shape; None stands for zeros."""
    tensors = [torch.as_tensor(0.0 if g is None else g, dtype=torch.float64, device="cpu") for g in gradients]
    return list(torch.broadcast_tensors(*tensors))


def largest_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Return the largest difference between the gradients in `one` and those of the same parameters in `other`."""
    errors = [elementwise_error(*broadcast(one[name], other[name])) for name in one]
    return max((float(error.max()) for error in errors if error.numel()), default=0.0)


def gradient_is_right(observed: Mapping[str, Any], expected: Mapping[str, Any], allowed: Mapping[str, Any]) -> bool:
    """Compare gradients element by element and print the worst of them.

    Args:
        observed: parameter name -> the loop's gradient.
        expected: parameter name -> the right gradient.
        allowed: parameter name -> the bound on |observed - expected|, for each element or for all of them.
    """
    right = True
    for name in allowed:
        want, got, most = broadcast(expected[name], observed[name], allowed[name])
        error = elementwise_error(got, want)
        wrong = error > most
        print(f"{name}: {int(wrong.sum())} of {want.numel()} elements differ by more than rounding allows")
        if observed[name] is None:
            print(f"    {name}.grad is None at the step")
        elif not got.isfinite().all():
            print(f"    {name}.grad is not finite at the step")
        worst = sorted(wrong.nonzero().tolist(), key=lambda place: -float(error[tuple(place)]))
        for place in worst[:SHOWN]:
            numbers = (float(tensor[tuple(place)]) for tensor in (want, got, error, most))
            line = "    {:<12} expected {:<24} observed {:<24} error {:<10.3g} allowed {:.3g}"
            print(line.format(str(place), *numbers))
        right = right and not bool(wrong.any())
    return right


def structure_is_kept(before: Structure, model: torch.nn.Module) -> bool:
    """Return whether the loop changed the model's parameters in nothing but their values."""
    changes = structure_changes(before, structure(model))
    print(f"changes to the model's parameters other than their values: {changes or 'none'}")
    return changes is None


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
    weigh = count or (lambda batch: 1.0)
    counts = [float(weigh(part)) for part in parts]
    try:
        large = float(weigh(whole)) * loss(model, whole)
        terms = [n * loss(model, part) for n, part in zip(counts, parts, strict=True) if n]
    except (RuntimeError, ValueError) as refusal:
        print(f"the model refuses one of the batches: {type(refusal).__name__}: {refusal}")
        return False
    summed = [float(term.detach()) for term in terms]
    print(f"count * loss of all items {large:.12g}, summed over the micro-batches {sum(summed):.12g}")
    right = adds_up(float(large.detach()), summed)
    if count is not None:
        print(f"count of all items {float(count(whole)):.12g}, summed over the micro-batches {sum(counts):.12g}")
        right = right and adds_up(float(count(whole)), counts)
    one, gradients = parameter_gradients(large, model), [parameter_gradients(term, model) for term in terms]
    other = {name: sum(broadcast(*(gradient[name] for gradient in gradients))) for name in one}
    error, size = largest_difference(one, other), max(largest_difference(g, dict.fromkeys(g)) for g in gradients)
    print(f"the gradients of the two differ by at most {error:.3g}, the largest element is {size:.3g}")
    return right and error <= LOSS_TOLERANCE * size


def gradient_accumulates(
    model: torch.nn.Module,
    loss: Callable[[torch.nn.Module, Batch], torch.Tensor],
    count: Callable[[Batch], Any] | None,
    whole: Batch,
    parts: Sequence[Batch],
    allowed: Mapping[str, Any],
) -> bool:
    """Return whether the gradient of a window in one batch is the sum of its micro-batches', weighted by their counts.

    Args:
        model: in float64.
        loss: (model, batch) -> a scalar.
        count: batch -> what its mean divides by; None where the loss is a sum.
        whole: the window's items in one batch.
        parts: its micro-batches.
        allowed: parameter name -> the bound on the difference, for each element or for all of them.
    """
    weigh = count or (lambda batch: 1.0)
    total = float(weigh(whole))
    large = parameter_gradients(loss(model, whole), model)
    shares = [float(weigh(part)) / total for part in parts]
    terms = [parameter_gradients(n * loss(model, part), model) for n, part in zip(shares, parts, strict=True) if n]
    summed = {name: sum(broadcast(*(term[name] for term in terms))) for name in large}
    return gradient_is_right(summed, large, allowed)
