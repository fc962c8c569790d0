"""What scripts carry: functions that are copied into them word for word, with whatever they need.

They load a loop by its name, watch what it hands to the optimizer, and print how that compares with what is right.
Messages go to standard output; where the loop cannot be imported, to standard error, with exit status 2.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import sys
import traceback
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from gradcheck_suite.execution.instance import map_leaves

SHOWN = 8


def named(place: str, name: str, folder: str) -> Any:
    """Return what a name means in a Python file or in a module, which may lie in the folder."""
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            give_up(f"{path} is gone: change its path in this script to where it is now")
        spec = importlib.util.spec_from_file_location(f"file_of_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        sys.path.insert(0, str(path.parent))
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, folder)
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            give_up(f"cannot import {place} ({error}): install it, or change its folder in this script")
    try:
        return attrgetter(name)(module)
    except AttributeError as error:
        return give_up(f"{place}: {error}")


def give_up(message: str) -> Any:
    """End with a message and status 2: nothing has been found out."""
    print(message, file=sys.stderr)
    raise SystemExit(2)


def loader_of(micro_batches: list[Any]) -> DataLoader[Any]:
    """Return a loader that yields fresh copies, so that a loop may change what it is given."""
    dataset: Any = micro_batches
    return DataLoader(dataset, batch_size=None, collate_fn=lambda batch: map_leaves(torch.clone, batch))


def as_float64(tensor: torch.Tensor) -> torch.Tensor:
    """Return a floating tensor in float64, another as it is."""
    return tensor.double() if tensor.is_floating_point() else tensor


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that want a gradient, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def gradient_of(loss: torch.Tensor, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradient of a loss by parameter, zeros where it does not reach one."""
    parameters = trainable(model)
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    pairs = zip(parameters.items(), found, strict=True)
    return {name: torch.zeros_like(p) if g is None else dense(g) for (name, p), g in pairs}


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return a copy of a gradient, dense where it is sparse."""
    gradient = gradient.detach()
    return (gradient.to_dense() if gradient.is_sparse else gradient).clone()


def watch(model: torch.nn.Module, optimizer: torch.optim.Optimizer, most: int) -> list[dict[str, Any]]:
    """Return a list that gets, at every optimizer.step(), the gradients and parameters as they are then.

    A step that is handed a closure makes its gradients inside, so they are looked at once the closure has run.

    Args:
        model: whose.
        optimizer: whose steps.
        most: steps after which the script ends: the loop would go on for ever.
    """
    parameters = trainable(model)
    steps: list[dict[str, Any]] = []

    def see(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if len(steps) == most:
            print(f"the loop calls optimizer.step() {most} times and does not stop there")
            sys.stdout.flush()
            os._exit(1)  # a loop may catch whatever is raised inside it
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            record(optimizer)
            return None
        before = len(steps)

        def run() -> Any:
            loss = closure()
            if len(steps) == before:
                record(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": run}

    def record(optimizer: torch.optim.Optimizer) -> None:
        steps.append(
            {
                "gradients": {name: None if p.grad is None else dense(p.grad) for name, p in parameters.items()},
                "parameters": {name: p.detach().clone() for name, p in parameters.items()},
                "settings": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
            }
        )

    optimizer.register_step_pre_hook(see)
    return steps


def completes(loop: Any, run: Any, seconds: float | None = None) -> bool:
    """Run the loop; return whether it comes to its end. One that takes too long ends the script with status 1."""
    if seconds is not None:
        faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        loop(run)
    except KeyboardInterrupt:
        raise
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        print("the loop raises")
        return False
    finally:
        faulthandler.cancel_dump_traceback_later()
    return True


def steps_are_right(steps: list[Any], expected: int) -> bool:
    """Return whether the loop took one step per window."""
    print(f"optimizer.step() was called {len(steps)} times, the windows ask for {expected}")
    return len(steps) == expected


def gradient_is_right(seen: dict[str, Any], expected: dict[str, Any], allowed: dict[str, Any]) -> bool:
    """Compare gradients element by element and print the worst of them; None stands for zeros."""
    right = True
    for name, tolerance in allowed.items():
        want = torch.as_tensor(expected[name], dtype=torch.float64)
        most = torch.as_tensor(tolerance, dtype=torch.float64).expand(want.shape)
        got = torch.zeros_like(want) if seen[name] is None else seen[name].cpu().double()
        error = (got - want).abs()
        # two infinities or two NaN at the same place are equal, anything else that is not finite is an error
        error[(got == want) | (got.isnan() & want.isnan())] = 0
        error[error.isnan()] = torch.inf
        wrong = error > most
        print(f"{name}: {int(wrong.sum())} of {want.numel()} elements are off by more than rounding allows")
        if seen[name] is None:
            print(f"    {name}.grad is None at the step")
        elif not got.isfinite().all():
            print(f"    {name}.grad is not finite at the step")
        worst = sorted(wrong.nonzero().tolist(), key=lambda place: -float(error[tuple(place)]))
        for place in worst[:SHOWN]:
            numbers = (float(tensor[tuple(place)]) for tensor in (want, got, error, most))
            line = "    {:<12} expected {:<24} observed {:<24} off by {:<10.3g} allowed {:.3g}"
            print(line.format(str(place), *numbers))
        right = right and not bool(wrong.any())
    return right


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return how far gradients, of the parameters that are in both, lie apart; None stands for zeros."""
    both = [(one[name], other[name]) for name in one]
    pairs = [[torch.as_tensor(0.0 if g is None else g, dtype=torch.float64).cpu() for g in two] for two in both]
    return max((float((a - b).abs().max()) for a, b in pairs if a.numel() and b.numel()), default=0.0)


def structure(model: torch.nn.Module) -> dict[str, Any]:
    """Return what a loop must leave as it is: which parameters there are, their shapes, dtypes and requires_grad."""
    return {name: (id(p), p.shape, p.dtype, p.device, p.requires_grad) for name, p in model.named_parameters()}


def is_unchanged(before: dict[str, Any], model: torch.nn.Module) -> bool:
    """Return whether the loop has left the model's structure alone."""
    after = structure(model)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    print(f"replaced, removed or changed: {', '.join(changed) or 'nothing'}")
    return not changed


def parameters_are_right(model: torch.nn.Module, expected: dict[str, torch.Tensor], steps: int) -> bool:
    """Return whether the parameters are, up to rounding, where they should be at the end."""
    right = True
    for name, p in trainable(model).items():
        want = expected[name].double()
        error = float((p.detach().double() - want).abs().max()) if want.numel() else 0.0
        scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
        allowed = 64 * torch.finfo(p.dtype).eps * scale * steps
        print(f"{name} ends up off by {error:.3g}, allowed {allowed:.3g}")
        right = right and error <= allowed
    return right


def stepped(optimizer_of: Any, start: dict[str, torch.Tensor], steps: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return where an optimizer takes parameters on the gradients that were recorded."""
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    optimizer = optimizer_of(list(parameters.values()))
    for step in steps:
        for name, p in parameters.items():
            p.grad = step["gradients"][name]
        for group, settings in zip(optimizer.param_groups, step["settings"], strict=False):
            group.update(settings)
        optimizer.step()
    return {name: p.detach() for name, p in parameters.items()}


def is_sum_over_items(loss: Any, count: Any, whole: Any, parts: list[Any]) -> bool:
    """Return whether a mean over all items is the mean of its parts weighted by their counts, as any sum's is.

    Args:
        loss: of a batch, in float64.
        count: of a batch; 1 for a sum.
        whole: all items.
        parts: the same items, in several batches.
    """
    with torch.no_grad():
        large = float(count(whole)) * float(loss(whole))
        weighted = [(float(count(part)), part) for part in parts]
        terms = [n * float(loss(part)) for n, part in weighted if n]
    counts, of_all = sum(n for n, _ in weighted), float(count(whole))
    small, size = sum(terms), sum(map(abs, terms))
    print(f"count * loss of all items {large:.12g}, summed over the micro-batches {small:.12g}")
    print(f"count of all items {of_all:.12g}, summed over the micro-batches {counts:.12g}")
    return abs(large - small) <= 1e-5 * max(size, abs(large)) and abs(of_all - counts) <= 1e-5 * max(counts, of_all)
