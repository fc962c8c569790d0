"""Steps of both optimizers on the same gradients, and which setting of torch's gives the steps of optax's.

The gradients are torch's, mapped to the port, so that a wrong gradient neither hides nor causes a wrong update. They
are scaled so that a limit on their norm binds at some steps and not at others.
"""

from __future__ import annotations

import inspect
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from gradcheck_suite.errors import UsageError
from gradcheck_suite.port.jax_program import Interpreter, digest
from gradcheck_suite.port.mapping import Leaf, StateMap
from gradcheck_suite.port.matching import array
from gradcheck_suite.port.number_sets import Array
from gradcheck_suite.port.pair import JaxModel, is_float, raised, shaped_as
from gradcheck_suite.reference.programs import PROGRAMS, ProgramRequest

NORMS = (10.0, 0.02, 3.0, 40.0)
"""Norm of all gradients at each step."""
STEP = 1e-8
"""Difference relative to the largest movement that is not looked at. Clipping without torch's 1e-6 makes 1e-7."""
PAIR_SECONDS = 10.0
"""CPU time in which two settings are tried together."""
Steps = list[dict[str, Array]]
Gradients = Sequence[Mapping[str, Array]]


def drawn_gradients(base: Mapping[str, Array], ties: Mapping[str, Any]) -> Steps:
    """Return gradients for each step, near those of the model.

    Args:
        base: parameter -> gradient.
        ties: parameter -> what is the same for tied ones.
    """
    rng, steps = np.random.default_rng(5), []
    for norm in NORMS:
        drawn: dict[Any, Array] = {}
        for name, g in base.items():
            size = float(np.abs(g).mean()) if g.size else 0.0
            drawn.setdefault(ties[name], g + (0.3 * size + 1e-3) * rng.normal(size=g.shape))
        whole = math.sqrt(sum(float((g**2).sum()) for g in drawn.values()))
        steps.append({name: drawn[ties[name]] * norm / whole for name in base})
    return steps


def torch_steps(
    module: nn.Module, make: Callable[..., Any], start: Mapping[str, Array], gradients: Gradients, change: Any = None
) -> Steps:
    """Return the parameters after each step of torch's optimizer.

    Args:
        module: whose parameters are stepped; they are restored.
        make: parameters -> optimizer.
        start: parameters to start at.
        gradients: of each step.
        change: optimizer -> None, which changes its settings, or another optimizer.
    """
    own = dict(module.named_parameters())
    before = {n: p.detach().clone() for n, p in own.items()}
    found = []
    try:
        with torch.no_grad():
            for n, p in own.items():
                p.copy_(shaped_as(start[n], p))
        optimizer = make(module.parameters())
        optimizer = (change(optimizer) or optimizer) if change is not None else optimizer
        for step in gradients:
            for n, p in own.items():
                p.grad = shaped_as(step[n], p).clone() if n in step else None
            optimizer.step()
            found.append({n: array(p).copy() for n, p in own.items()})
    finally:
        with torch.no_grad():
            for n, p in own.items():
                p.copy_(before[n])
                p.grad = None
    return found


def jax_steps(optimizer: Any, model: JaxModel, leaves: Sequence[Any], gradients: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the leaves after each step of optax's optimizer, computed in float64."""
    floats = [is_float(leaf) for leaf in leaves]

    def tree(values: Sequence[Any]) -> Any:
        whole = jax.tree.unflatten(model.structure, [v if f else None for v, f in zip(values, floats, strict=True)])
        # the collections beside `params` (running statistics) are not trained
        return whole["params"] if model.library == "linen" and set(whole) != {"params"} else whole

    def put_back(values: Any) -> list[Any]:
        if model.library == "linen":
            whole = jax.tree.unflatten(model.structure, [v if f else None for v, f in zip(leaves, floats, strict=True)])
            values = {**whole, "params": values} if set(whole) != {"params"} else values
        found = iter(jax.tree.leaves(values))
        return [next(found) if f else leaf for leaf, f in zip(leaves, floats, strict=True)]

    params = tree(leaves)
    state = optimizer.init(params)
    closed, shape = jax.make_jaxpr(optimizer.update, return_shape=True)(tree(gradients[0]), state, params)
    structure, key = jax.tree.structure(shape), ("update", digest(closed))

    def lifted(*given: Any) -> Any:
        return tuple(Interpreter(custom=False).run(closed.jaxpr, closed.consts, given)[0])

    def update(*given: Any) -> Any:
        arrays = [np.asarray(value) for value in jax.tree.leaves(given)]
        return jax.tree.unflatten(structure, PROGRAMS.run(ProgramRequest.of(key, lifted, *arrays), *arrays, few=True))

    found = []
    for step in gradients:
        moves, state = update(tree(step), state, params)
        params = jax.tree.map(lambda p, m: p if m is None else p + m, params, moves, is_leaf=lambda x: x is None)
        found.append([np.asarray(v) if is_float(v) else v for v in put_back(params)])
    return found


# Settings of torch's optimizer that people get wrong.


@dataclass(frozen=True)
class Setting:
    """A change of torch's optimizer.

    Attributes:
        cause: its name.
        words: what the port does.
        change: optimizer -> None, or another optimizer.
    """

    cause: str
    words: str
    change: Callable[[Any], Any]


_VALUES: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("optimizer-eps", "eps", (1e-8, 1e-6, 1e-7, 1e-5, 1e-10, 1e-3, 1e-4, 0.0, 1e-12, 1e-16, 1e-15)),
    ("amsgrad", "amsgrad", (True, False)),
    ("momentum", "momentum", (0.9, 0.0, 0.95, 0.99, 0.8, 0.5)),
    ("nesterov", "nesterov", (True, False)),
    ("centered", "centered", (True, False)),
    ("decay-of-squares", "alpha", (0.9, 0.99, 0.95, 0.999)),
    ("decoupled-decay", "decoupled_weight_decay", (True, False)),
    ("dampening", "dampening", (0.0, 0.1, 0.5, 0.9)),
    ("sign", "maximize", (True, False)),
)
"""Cause, name of the setting, and values."""
_ADAM, _RMS, _SGD, _ADAGRAD = ("Adam", "AdamW"), ("RMSprop",), ("SGD",), ("Adagrad",)
_FORMS: tuple[tuple[tuple[str, ...], str, str, dict[str, Any]], ...] = (
    (_SGD, "momentum-convention", "momentum as an average", {"average": True}),
    (_SGD, "momentum-convention", "momentum as an average without bias", {"average": True, "unbiased": True}),
    (_SGD + _RMS, "momentum-convention", "the learning rate inside of the momentum", {"rate_inside": True}),
    (_SGD, "decoupled-decay", "decoupled weight decay", {"late": True}),
    (_ADAM + _RMS + _ADAGRAD, "eps-inside-root", "eps inside of the root", {"inside": True}),
    (_ADAM, "bias-correction", "no bias correction", {"correct": (False, False)}),
    (_ADAM, "bias-correction", "bias correction of the first moment alone", {"correct": (True, False)}),
    (_ADAM, "bias-correction", "bias correction of the second moment alone", {"correct": (False, True)}),
    (_ADAM, "eps-before-correction", "eps added before the bias correction", {"eps_first": True}),
    (_ADAM, "decay-place", "weight decay after the step", {"late": True, "after": True}),
    (_RMS, "bias-correction", "an average of squares without bias", {"correct": (False, True)}),
    (_RMS, "initial-accumulator", "an average of squares that starts at 1", {"start": 1.0}),
    (_RMS, "initial-accumulator", "an average from 1, eps inside of the root", {"start": 1.0, "inside": True}),
    *((_ADAGRAD, "initial-accumulator", f"an accumulator from {start:g}, eps {'in' if inside else 'out'}side",
       {"start": start, "inside": inside}) for start in (0.1, 1.0, 0.0) for inside in (False, True)),
)  # fmt: skip
"""Optimizers of torch, cause, words, and what `_Written` does otherwise."""
_KINDS = (("decoupled-decay", _ADAM), ("optimizer-kind", ("NAdam", "RAdam", "Adamax", "RMSprop", "SGD", "Adagrad")))
_CLIPPINGS = (
    ("clipping", "norm", "gradients clipped to a global norm of"),
    ("clipping", "value", "gradients clipped, each element to"),
    ("clipping", "each", "gradients clipped to a norm for each parameter of"),
    ("clip-order", "update", "updates clipped to a global norm of"),
)


def _kind(optimizer: Any) -> str:
    """Return the name of torch's class that an optimizer is of."""
    return next(c.__name__ for c in type(optimizer).__mro__ if c.__module__.startswith("torch.optim"))


def _put(**values: Any) -> Callable[[Any], None]:
    def change(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group.update(values)

    return change


def _settings(optimizer: Any, rates: Sequence[Sequence[float]]) -> Iterator[Setting]:
    """Yield changes of an optimizer, the most usual first; `rates` are its learning rates at each step."""
    group, name = optimizer.param_groups[0], _kind(optimizer)
    decays = {g.get("weight_decay", 0.0) for g in optimizer.param_groups}
    if optimizer._optimizer_step_pre_hooks:
        yield Setting("missing-clipping", "no clipping", lambda o: o._optimizer_step_pre_hooks.clear())
        yield Setting("clip-epsilon", "clipping to the norm without 1e-6", _clipped_exactly)
    forms = [
        Setting(cause, words, lambda o, h=how: _written(o, rates, **h))
        for names, cause, words, how in _FORMS
        if name in names
    ]
    yield from forms[: 2 if group.get("momentum") else 0]
    for decay in sorted(decays, reverse=True) if len(decays) > 1 else ():
        yield Setting("decay-mask", f"weight decay {decay:g} on all parameters", _put(weight_decay=decay))
    if len(decays) == 1 and max(decays):
        yield Setting("decay-mask", "weight decay on matrices alone", _decayed_matrices)
    for cause, key, values in _VALUES:
        for value in values if key in group else ():
            if value != group[key] and isinstance(value, bool) == isinstance(group[key], bool):
                yield Setting(cause, f"{key} {value} instead of {group[key]}", _put(**{key: value}))
    yield from _other_betas(group.get("betas"))
    for decay in (0.0, 1e-2, 1e-4, 0.1, 5e-4, 1e-3, 0.05, 0.2):
        if decays != {decay} and "weight_decay" in group:
            cause = "missing-weight-decay" if decay == 0 else "weight-decay"
            yield Setting(cause, f"weight decay {decay:g}", _put(weight_decay=decay))
    yield from _other_rates(rates, [g["lr"] for g in optimizer.param_groups])
    yield from forms
    for rate in sorted({1.0, max(max(r) for r in rates)}) if max(decays) and name in (*_ADAM, *_SGD) else ():
        words = f"decoupled weight decay times {rate:g}, whatever the learning rate"
        yield Setting("decay-place", words, lambda o, r=rate: _written(o, rates, late=True, decay_rate=r))
    for cause, names in _KINDS:
        for other in names:
            if other != name:
                make = getattr(torch.optim, other)
                yield Setting(cause, f"{other} instead of {name}", lambda o, m=make: _remade(o, m))
    for limit in (1.0, 0.5, 0.1, 5.0, 10.0, 2.0):
        for cause, kind, words in _CLIPPINGS:
            yield Setting(cause, f"{words} {limit:g}", lambda o, c=limit, k=kind: _Clipped(o, c, k))


def _other_betas(mine: tuple[float, float] | None) -> Iterator[Setting]:
    b1, b2 = mine or (0.0, 0.0)
    for betas in product((b1, 0.9, 0.95, 0.8, 0.0, 0.5, 0.99, b2), (b2, 0.999, 0.99, 0.95, 0.98, 0.9, b1)):
        if mine is not None and betas != mine:
            yield Setting("betas", f"betas {betas} instead of {mine}", _put(betas=betas))


def _other_rates(rates: Sequence[Sequence[float]], start: Sequence[float]) -> Iterator[Setting]:
    for factor in (0.1, 10.0, 0.5, 2.0, 0.01, 100.0):
        words = f"{factor:g} times the learning rate"
        yield Setting("learning-rate", words, lambda o, f=factor: _at_rates(o, [[f * x for x in r] for r in rates]))
    before = [2 * a - b for a, b in zip(rates[0], rates[1], strict=True)]  # a line goes on backwards
    for words, others in (
        ("a schedule one step ahead", rates[1:]),
        ("a schedule one step behind", [before, *rates]),
        ("no schedule", [rates[0]] * len(rates)),
        ("no schedule", [start] * len(rates)),
    ):
        yield Setting("learning-rate", words, lambda o, r=others: _at_rates(o, r))


def _at_rates(optimizer: Any, rates: Sequence[Sequence[float]]) -> None:
    """Let an optimizer step with learning rates of its groups that are given for each step."""
    left = iter(rates)
    optimizer._optimizer_step_post_hooks.clear()
    optimizer.param_groups[:] = [_Group(g) for g in optimizer.param_groups]

    def set_rates(o: Any) -> None:
        for group, rate in zip(o.param_groups, next(left), strict=True):
            group.fixed = rate

    _around_steps(optimizer, set_rates, lambda o: None)


def _around_steps(optimizer: Any, before: Callable[[Any], None], after: Callable[[Any], None]) -> None:
    """Call functions once before and after each step.

    The `step` of a subclass and that of its base class call the hooks each, once torch has made an optimizer of both.
    """
    depth = 0

    def enter(o: Any, *_: Any) -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            before(o)

    def leave(o: Any, *_: Any) -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            after(o)

    optimizer.register_step_pre_hook(enter)
    optimizer.register_step_post_hook(leave)


class _Group(dict[str, Any]):
    """A parameter group whose learning rate may be fixed: some optimizers set their own in `step`.

    Attributes:
        fixed: the rate that is read whatever is set, None to read what is set.
        read: the rate that was read last.
    """

    fixed: float | None = None
    read: float | None = None

    def __getitem__(self, key: str) -> Any:
        found = super().__getitem__(key)
        if key == "lr":
            found = self.read = found if self.fixed is None else self.fixed
        return found


def _decayed_matrices(optimizer: Any) -> Any:
    groups = []
    for g in optimizer.param_groups:
        for matrices in (True, False):
            decay = g["weight_decay"] if matrices else 0.0
            kept = [p for p in g["params"] if (p.dim() > 1) == matrices]
            groups += [{**g, "params": kept, "weight_decay": decay}] if kept else []
    return _remade(optimizer, type(optimizer), groups)


def _remade(optimizer: Any, cls: Any, groups: Any = None) -> Any:
    known = set(inspect.signature(cls).parameters) - {"foreach", "fused", "capturable", "differentiable"}
    known -= {"decoupled_weight_decay"}
    kept = [{k: v for k, v in g.items() if k == "params" or k in known} for g in groups or optimizer.param_groups]
    made = cls(kept, **({} if "lr" in kept[0] else {"lr": 1e-3}))
    made._optimizer_step_pre_hooks.update(optimizer._optimizer_step_pre_hooks)
    return made


class _Written:
    """Adam, RMSprop, Adagrad and SGD written out, for what torch's do not offer."""

    def __init__(self, optimizer: Any, **how: Any) -> None:
        self.param_groups, self._n, self._how = optimizer.param_groups, 0, how
        name, group = _kind(optimizer), optimizer.param_groups[0]
        self._late = how.get("late", name == "AdamW" or bool(group.get("decoupled_weight_decay")))
        self._correct = how.get("correct", (name in _ADAM, name in _ADAM))
        self._kept: dict[int, dict[str, Any]] = {}
        self._before = list(optimizer._optimizer_step_pre_hooks.values())
        self._after = list(optimizer._optimizer_step_post_hooks.values())

    def step(self) -> None:
        self._n += 1
        for hook in self._before:
            hook(self, (), {})
        with torch.no_grad():
            for g in self.param_groups:
                for p in g["params"]:
                    if p.grad is not None:
                        self._one(p, p.grad, g, self._kept.setdefault(id(p), {}))
        for hook in self._after:
            hook(self, (), {})

    def _one(self, p: Any, grad: Any, g: Mapping[str, Any], kept: dict[str, Any]) -> None:
        rate, decay, how = g["lr"], g["weight_decay"], self._how
        out = self._direction(p, grad if self._late else grad + decay * p, g, kept)
        rate_after = rate
        if m := g.get("momentum"):
            part = 1 - m if how.get("average") else 1.0
            own = rate * out if how.get("rate_inside") else out
            buffer = kept["b"] = m * kept.get("b", 0.0) + part * own
            out = buffer / (1 - m**self._n) if how.get("unbiased") else buffer
            out = part * own + m * out if g.get("nesterov") else out
            rate_after = 1.0 if how.get("rate_inside") else rate
        old = p.clone()
        p -= rate_after * out
        if self._late:
            p -= how.get("decay_rate", rate) * decay * (p if how.get("after") else old)

    def _direction(self, p: Any, grad: Any, g: Mapping[str, Any], kept: dict[str, Any]) -> Any:
        """Return the gradient, for adaptive optimizers its moment over the root of the moment of its squares."""
        if "eps" not in g:
            return grad
        b1, b2 = g.get("betas", (0.0, g.get("alpha", 1.0)))  # Adagrad adds up the squares
        m = kept["m"] = b1 * kept.get("m", 0.0) + (1 - b1) * grad
        start = torch.full_like(p, self._how.get("start", 0.0))
        v = kept["v"] = b2 * kept.get("v", start) + (1 - b2 or 1.0) * grad**2
        if g.get("centered"):
            mean = kept["mean"] = b2 * kept.get("mean", 0.0) + (1 - b2) * grad
            v = v - mean**2
        first, second = (1 - b**self._n if c else 1.0 for b, c in zip((b1, b2), self._correct, strict=True))
        if self._how.get("eps_first"):
            return m / first / ((v.sqrt() + g["eps"]) / second**0.5)
        v = v / second
        return m / first / ((v + g["eps"]).sqrt() if self._how.get("inside") else v.sqrt() + g["eps"])


def _written(optimizer: Any, rates: Sequence[Sequence[float]], **how: Any) -> _Written:
    _at_rates(optimizer, rates)
    return _Written(optimizer, **how)


class _Clipped:
    """Clips what an optimizer reads, or what it does."""

    def __init__(self, optimizer: Any, limit: float, kind: str) -> None:
        optimizer._optimizer_step_pre_hooks.clear()
        self._o, self._limit, self._kind, self.param_groups = optimizer, limit, kind, optimizer.param_groups

    def step(self) -> None:
        params = [p for g in self._o.param_groups for p in g["params"] if p.grad is not None]
        if self._kind == "value":
            nn.utils.clip_grad_value_(params, self._limit)
        for together in {"norm": [params], "each": [[p] for p in params]}.get(self._kind, []):
            if (norm := _norm(p.grad for p in together)) > self._limit:
                for p in together:
                    p.grad *= self._limit / norm
        before = [p.detach().clone() for p in params]
        self._o.step()
        if self._kind == "update":
            moves = [p.detach() - b for p, b in zip(params, before, strict=True)]
            norm = _norm(moves) / self._o.param_groups[0]["lr"]
            with torch.no_grad():
                for p, b, m in zip(params, before, moves, strict=True):
                    p.copy_(b + m * min(1.0, self._limit / norm))


def _norm(tensors: Iterable[Any]) -> float:
    return math.sqrt(sum(float((t**2).sum()) for t in tensors))


def _clipped_exactly(optimizer: Any) -> None:
    """Undo the 1e-6 of torch's clipping, which its hooks have scaled the gradients with."""
    hooks = list(optimizer._optimizer_step_pre_hooks.values())
    optimizer._optimizer_step_pre_hooks.clear()

    def exactly(o: Any, args: Any, kwargs: Any) -> None:
        params = [p for g in o.param_groups for p in g["params"] if p.grad is not None]
        before = _norm(p.grad for p in params)
        for hook in hooks:
            hook(o, args, kwargs)
        if before and _norm(p.grad for p in params) < before:
            for p in params:
                p.grad *= (before + 1e-6) / before

    optimizer.register_step_pre_hook(exactly)


# The judgement.


@dataclass
class UpdateFault:
    """A difference of updates.

    Attributes:
        cause: its name.
        words: what the port does.
        error: difference relative to the largest movement.
        leaf: path of the leaf that shows it most.
        partial: whether fewer than half of the leaves show it.
        expected: torch's optimizer in words.
    """

    cause: str
    words: str
    error: float
    leaf: Leaf
    partial: bool
    expected: str


class Updates:
    """The steps of both optimizers.

    Args:
        state_map: of the pair.
        state: where the steps start.
        leaves: of the JAX parameters there.
        gradient: parameter -> gradient of torch.
    """

    def __init__(
        self, state_map: StateMap, state: Mapping[str, Array], leaves: Sequence[Any], gradient: Mapping[str, Array]
    ) -> None:
        self._map, pair = state_map, state_map.pair
        own = dict(pair.module.named_parameters())
        self._start = {n: state[n] for n in own}
        base = {n: gradient.get(n, np.zeros(state[n].shape)) for n, p in own.items() if p.requires_grad}
        self._gradients = drawn_gradients(base, {n: state_map.offsets.get(n, n) for n in base})
        make = pair.torch_optimizer
        assert make is not None
        self._module, self._make = pair.module, make
        pushed = [state_map.push(self._vector(step)) for step in self._gradients]
        self.sample = raised("torch_optimizer", lambda: make(pair.module.parameters()))
        self._rates: list[list[float]] = []
        if not hasattr(pair.jax_optimizer, "update"):
            raise UsageError(f"jax_optimizer: expected an optax.GradientTransformation, got {pair.jax_optimizer!r}")
        self._theirs = raised("jax_optimizer", lambda: jax_steps(pair.jax_optimizer, state_map.model, leaves, pushed))
        self.leaves = [i for i, leaf in enumerate(state_map.leaves) if self._is_judged(leaf, base)]

    def _vector(self, values: Mapping[str, Array]) -> Array:
        out = np.zeros(self._map.size)
        for name, value in values.items():
            if name in self._map.offsets:
                out[self._map.part(name)] = value.reshape(-1)
        return out

    def _is_judged(self, leaf: Leaf | None, trained: Mapping[str, Array]) -> bool:
        """Return whether a leaf steps as torch's parameters do: it has copies of them, or sums of two."""
        if leaf is None or not leaf.known:
            return False
        parameters = np.zeros(self._map.size, bool)
        for name in trained:
            parameters[self._map.part(name)] = True
        used = leaf.index[leaf.index >= 0]
        return bool(len(used) and parameters[used].all() and (leaf.factor[leaf.index >= 0] == 1).all())

    def wrong(self, mine: Steps) -> dict[int, float]:
        """Return the leaves that step otherwise, with the difference relative to the largest movement of any."""
        m, found, largest = self._map, dict[int, float](), 0.0
        first = self._vector(self._start)
        for step, theirs in zip(mine, self._theirs, strict=True):
            after = self._vector(step)
            for i in self.leaves:
                leaf = m.leaves[i]
                assert leaf is not None
                used = leaf.index >= 0
                expected, before = m.computed(leaf, after).reshape(-1)[used], m.computed(leaf, first).reshape(-1)[used]
                off = np.abs(np.asarray(theirs[i]).reshape(-1)[used] - expected)
                off = np.where(np.isnan(off), np.inf, off)
                largest = max(largest, float(np.abs(expected - before).max(initial=0.0)))
                found[i] = max(found.get(i, 0.0), float(off.max(initial=0.0)))
        return {i: off / max(largest, 1e-300) for i, off in found.items() if off > STEP * max(largest, 1e-300)}

    def run(self, change: Any = None, gradients: Gradients | None = None) -> Steps:
        """Return torch's steps, with a changed optimizer."""
        return torch_steps(self._module, self._make, self._start, gradients or self._gradients, change)

    def _noted(self, optimizer: Any) -> None:
        """Note the learning rate that each group has in each step."""
        groups = [_Group(g) for g in optimizer.param_groups]
        optimizer.param_groups[:] = groups
        hooks, self._rates = list(optimizer._optimizer_step_post_hooks.values()), []
        optimizer._optimizer_step_post_hooks.clear()  # a scheduler in a hook reads the next rate

        def note(o: Any) -> None:
            self._rates.append([float(g["lr"] if g.read is None else g.read) for g in groups])
            for hook in hooks:
                hook(o, (), {})

        _around_steps(optimizer, lambda o: None, note)

    def fault(self) -> UpdateFault | None:
        """Return how updates differ, or None."""
        # one step more: of a schedule one step ahead
        longer = [*self._gradients, self._gradients[-1]]
        mine = raised("torch_optimizer", lambda: self.run(self._noted, longer))
        wrong = self.wrong(mine[: len(self._gradients)])
        if not wrong:
            return None
        at = max(wrong, key=lambda i: wrong[i])
        leaf = self._map.leaves[at]
        assert leaf is not None
        merged = all((one := self._map.leaves[i]) is not None and (one.second >= 0).any() for i in wrong)
        partial = len(wrong) <= len(self.leaves) / 2
        expected = f"{type(self.sample).__name__} with {_shown(self.sample)}"
        if merged:
            words = f"{leaf.path}, which is a sum of {' and '.join(self._map.sources(leaf))}, as one parameter"
            return UpdateFault("merged-biases", words, wrong[at], leaf, True, expected)
        found = self._one_setting() or self._two_settings()
        cause, words = (found.cause, found.words) if found else ("unknown", "other steps")
        return UpdateFault(cause, words, wrong[at], leaf, partial and found is None, expected)

    def _explains(self, change: Callable[[Any], Any]) -> bool:
        try:
            return not self.wrong(self.run(change))
        except Exception:  # an optimizer of another kind may take no such setting
            return False

    def _one_setting(self) -> Setting | None:
        return next((s for s in _settings(self.sample, self._rates) if self._explains(s.change)), None)

    def _two_settings(self) -> Setting | None:
        simple = [s for s in _settings(self.sample, self._rates) if _SIMPLE.fullmatch(s.cause)][:60]
        until = time.process_time() + PAIR_SECONDS
        for i, a in enumerate(simple):
            for b in simple[i + 1 :]:
                if time.process_time() > until:
                    return None

                def both(o: Any, a: Setting = a, b: Setting = b) -> Any:
                    changed = a.change(o) or o
                    return b.change(changed) or changed

                if a.cause != b.cause and self._explains(both):
                    return Setting(f"{a.cause} and {b.cause}", f"{a.words} and {b.words}", both)
        return None


_SIMPLE = re.compile(
    "(missing-)?clipping|clip-epsilon|optimizer-eps|(missing-)?weight-decay|learning-rate|nesterov|momentum"
    "|decoupled-decay|decay-mask|eps-inside-root|bias-correction"
)
"""Causes of which two are tried together."""


def _shown(optimizer: Any) -> str:
    keys = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "dampening", "alpha")
    return ", ".join(f"{k}={v}" for k, v in optimizer.param_groups[0].items() if k in keys)
