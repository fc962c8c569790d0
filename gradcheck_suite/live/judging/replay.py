"""Computes recorded calls of modules again, and the gradients that follow from the gradients of their outputs.

The run stays what it is: the parameters are aliases without hooks, the buffers copies, and random numbers, training
modes and plain attributes are put back. What the modules print is dropped.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules import module as module_hooks
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import _pytree as pytree

from gradcheck_suite.live.judging.custom_functions import users_kinds_of
from gradcheck_suite.live.recording.forwards import Forward, RandomState, differentiable
from gradcheck_suite.numerics.bounds import UNIT_ROUNDOFF

Gradients = dict[int, torch.Tensor]
"""The id of a parameter -> a gradient."""

SCALE = 8.0
"""A power of two, by which the gradients of outputs are multiplied and what follows is divided. A backward pass that is
linear gives the same bits."""


@dataclass(frozen=True)
class How:
    """How calls are computed again.

    Attributes:
        modes: `training` of each submodule, in place of the recorded ones.
        hooks: whether the backward hooks of modules run.
        scale: by which the gradients of outputs are multiplied.
        seed: of a relative change of each parameter and input by one unit roundoff; None for no change.
    """

    modes: tuple[bool, ...] | None = None
    hooks: bool = False
    scale: float = SCALE
    seed: int | None = None


@dataclass
class Replayed:
    """What calls gave when they were computed again.

    Attributes:
        gradients: of the parameters that they reach.
        outputs: the output tensors through which a gradient may come, in the order of the recorded ones.
        functions: classes of custom `torch.autograd.Function`s on the way.
        random: whether random numbers were drawn.
    """

    gradients: Gradients = field(default_factory=dict)
    outputs: list[torch.Tensor] = field(default_factory=list)
    functions: frozenset[type] = frozenset()
    random: bool = False


_PLAIN = frozenset(vars(torch.nn.Module()))
_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


def backward_hooks(module: torch.nn.Module) -> list[str]:
    """Return the names of the submodules that have backward hooks of the user's."""
    return [name or type(part).__name__ for name, part in module.named_modules() if any(vars(part)[h] for h in _HOOKS)]


@contextlib.contextmanager
def _unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Put back what calls of a module may change: random numbers, modes, attributes and, one level deep, containers."""
    before = RandomState.now()
    kept = [
        (part, part.training, {k: (v, _content(v)) for k, v in vars(part).items() if k not in _PLAIN})
        for part in module.modules()
    ]
    try:
        yield
    finally:
        before.set()
        for part, training, attributes in kept:
            part.training = training
            for name in [name for name in vars(part) if name not in _PLAIN and name not in attributes]:
                del vars(part)[name]
            for name, (value, content) in attributes.items():
                vars(part)[name] = value
                if content is not None:
                    _refill(value, content)


def _content(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict, set) else None


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(content)


@contextlib.contextmanager
def _without_hooks(module: torch.nn.Module) -> Iterator[None]:
    """Switch off backward hooks."""
    hooks = [vars(part)[name] for part in module.modules() for name in _HOOKS]
    hooks += [module_hooks._global_backward_hooks, module_hooks._global_backward_pre_hooks]
    kept = [(each, each.copy()) for each in hooks if each]
    for each, _ in kept:
        each.clear()
    try:
        yield
    finally:
        for each, content in kept:
            each.update(content)


def _nudged(value: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Return a tensor whose elements are changed by one unit roundoff up or down."""
    unit = UNIT_ROUNDOFF.get(str(value.dtype).removeprefix("torch."))
    if generator is None or unit is None:
        return value
    # one step of the format for a number in the middle of a binade
    signs = torch.randint(0, 2, value.shape, generator=generator, dtype=torch.int8).to(value.device) * 2 - 1
    return value + signs.to(value.dtype) * (2 * unit) * value


@contextlib.contextmanager
def _replaced(module: torch.nn.Module, tensors: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Replace parameters and buffers by those with their ids.

    `torch.func.functional_call` would leave its replacements in a submodule that has two names (pytorch#164759).
    """
    before: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    try:
        for part in module.modules():
            holders: list[dict[str, Any]] = [vars(part)["_parameters"], vars(part)["_buffers"]]
            for holder in holders:
                for name, tensor in list(holder.items()):
                    if id(tensor) in tensors:
                        holder[name] = tensors[id(tensor)]
                        before.append((holder, name, tensor))
        yield
    finally:
        for holder, name, tensor in before:
            holder[name] = tensor


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop what the user's code prints and warns of."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def replay(forward: Forward, arguments: list[Any], cotangents: dict[int, torch.Tensor], how: How) -> Replayed:
    """Compute a call again, and the gradients of the parameters.

    Args:
        forward: the recorded call.
        arguments: flat arguments in place of the recorded ones.
        cotangents: index of an output -> its gradient.
        how: how.

    Raises:
        Exception: whatever the user's module raises.
    """
    module = forward.module
    generator = None if how.seed is None else torch.Generator().manual_seed(how.seed)
    real = [p for p in module.parameters() if p.requires_grad]
    leaves = [_nudged(p.detach(), generator).detach().requires_grad_() for p in real]
    replacing = {id(b): b.detach().clone() for b in module.buffers()}
    replacing.update((id(p), leaf) for p, leaf in zip(real, leaves, strict=True))
    values = [
        _nudged(v, generator).detach().requires_grad_(need) if isinstance(v, torch.Tensor) else v
        for v, need in zip(arguments, forward.needs_gradient, strict=True)
    ]
    positional, keywords = pytree.tree_unflatten(values, forward.structure)
    device, dtype, enabled = forward.autocast
    result, seen = Replayed(), list[Any]()

    def compute() -> None:
        forward.random.set()
        for each, training in zip(module.modules(), how.modes or forward.modes, strict=True):
            each.training = training
        with torch.autocast(device, dtype=dtype, enabled=enabled):
            module(*positional, **keywords)
        now = RandomState.now()
        states = zip((now.cpu, *now.devices), (forward.random.cpu, *forward.random.devices), strict=True)
        result.random = not all(torch.equal(a, b) for a, b in states)
        outputs = differentiable(seen[-1])
        scaled = [g * how.scale for g in cotangents.values()]
        found = [outputs[index] for index in cotangents]
        gradients = torch.autograd.grad(found, leaves, scaled, allow_unused=True)
        both = zip(real, gradients, strict=True)
        result.gradients = {id(p): g / how.scale for p, g in both if g is not None}
        result.outputs = [output.detach() for output in outputs]
        result.functions = users_kinds_of(outputs)

    handle = register_module_forward_hook(lambda part, _, output: seen.append(output) if part is module else None)
    hooks = contextlib.nullcontext() if how.hooks else _without_hooks(module)
    try:
        with _unchanged(module), hooks, quiet(), torch.enable_grad(), _replaced(module, replacing):
            compute()
    finally:
        handle.remove()
    return result
