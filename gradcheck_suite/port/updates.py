"""Steps of both optimizers on the same gradients, and which setting of torch's gives the steps of optax's.

The gradients are torch's, mapped to the port, so that a wrong gradient neither hides nor causes a wrong update. They
are scaled so that a limit on their norm binds at some steps and not at others.
"""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from gradcheck_suite.errors import UsageError
from gradcheck_suite.port.jax_program import Interpreter
from gradcheck_suite.port.mapping import Leaf, StateMap
from gradcheck_suite.port.number_sets import Array
from gradcheck_suite.port.pair import JaxModel, is_float, raised

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
                p.copy_(torch.as_tensor(start[n]))
        optimizer = make(module.parameters())
        optimizer = (change(optimizer) or optimizer) if change is not None else optimizer
        for step in gradients:
            for n, p in own.items():
                p.grad = torch.as_tensor(step[n]).clone() if n in step else None
            optimizer.step()
            found.append({n: p.detach().numpy().copy() for n, p in own.items()})
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
    structure = jax.tree.structure(shape)

    @jax.jit
    def update(*given: Any) -> Any:
        outs, _ = Interpreter(custom=False).run(closed.jaxpr, closed.consts, jax.tree.leaves(given))
        return jax.tree.unflatten(structure, outs)

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
)


def _put(**values: Any) -> Callable[[Any], None]:
    def change(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group.update(values)

    return change


def _settings(optimizer: Any) -> Iterator[Setting]:
    """Yield changes of an optimizer, the most usual first."""
    group, name = optimizer.param_groups[0], type(optimizer).__name__
    decays = {g.get("weight_decay", 0.0) for g in optimizer.param_groups}
    if optimizer._optimizer_step_pre_hooks:
        yield Setting("missing-clipping", "no clipping", lambda o: o._optimizer_step_pre_hooks.clear())
        yield Setting("clip-epsilon", "clipping to the norm without 1e-6", _clipped_exactly)
    if name == "SGD" and group["momentum"]:
        for debias in (False, True):
            words = "momentum as an average" + (" without bias" if debias else "")
            yield Setting("momentum-convention", words, lambda o, d=debias: _Sgd(o, average=True, debias=d))
    for decay in sorted(decays, reverse=True) if len(decays) > 1 else ():
        yield Setting("decay-mask", f"weight decay {decay:g} on all parameters", _put(weight_decay=decay))
    if len(decays) == 1 and max(decays):
        yield Setting("decay-mask", "weight decay on matrices alone", _decayed_matrices)
    for cause, key, values in _VALUES:
        if key in group and not isinstance(group[key], tuple):
            for value in values:
                if value != group[key] and isinstance(value, bool) == isinstance(group[key], bool):
                    yield Setting(cause, f"{key} {value} instead of {group[key]}", _put(**{key: value}))
    if "betas" in group:
        yield from _betas(group["betas"])
    for decay in (0.0, 1e-2, 1e-4, 0.1, 5e-4, 1e-3, 0.05, 0.2):
        if decays != {decay} and "weight_decay" in group:
            cause = "missing-weight-decay" if decay == 0 else "weight-decay"
            yield Setting(cause, f"weight decay {decay:g}", _put(weight_decay=decay))
    yield from _rates(group)
    yield from _forms(name, group)
    yield from _clippings()


def _clippings() -> Iterator[Setting]:
    for limit in (1.0, 0.5, 0.1, 5.0, 10.0, 2.0):
        for cause, kind, words in (
            ("clipping", "norm", "gradients clipped to a global norm of"),
            ("clipping", "value", "gradients clipped, each element to"),
            ("clipping", "each", "gradients clipped to a norm for each parameter of"),
            ("clip-order", "update", "updates clipped to a global norm of"),
        ):
            yield Setting(cause, f"{words} {limit:g}", lambda o, c=limit, k=kind: _Clipped(o, c, k))


def _betas(mine: tuple[float, float]) -> Iterator[Setting]:
    b1, b2 = mine
    for one in (b1, 0.9, 0.95, 0.8, 0.0, 0.5, 0.99, b2):
        for two in (b2, 0.999, 0.99, 0.95, 0.98, 0.9, b1):
            if (one, two) != mine:
                yield Setting("betas", f"betas {(one, two)} instead of {mine}", _put(betas=(one, two)))


_KINDS = {
    "decoupled-decay": ("Adam", "AdamW"),
    "optimizer-kind": ("NAdam", "RAdam", "Adamax", "RMSprop", "SGD", "Adagrad"),
}


def _forms(name: str, group: Mapping[str, Any]) -> Iterator[Setting]:
    """Yield optimizers that compute otherwise than torch's."""
    decoupled = name == "AdamW" or bool(group.get("decoupled_weight_decay"))
    if name in ("Adam", "AdamW"):
        for cause, words, how in (
            ("eps-inside-root", "eps inside of the root", {"inside": True}),
            ("bias-correction", "no bias correction", {"correct": (False, False)}),
            ("bias-correction", "bias correction of the first moment alone", {"correct": (True, False)}),
            ("bias-correction", "bias correction of the second moment alone", {"correct": (False, True)}),
            ("eps-before-correction", "eps added before the bias correction", {"raw_eps": True}),
            ("decay-place", "weight decay not multiplied by the learning rate", {"unscaled_decay": True}),
            ("decay-place", "weight decay after the step", {"late_decay": True}),
        ):
            yield Setting(cause, words, lambda o, h=how: _Adam(o, decoupled, **h))
    if name == "SGD":
        yield Setting("decoupled-decay", "decoupled weight decay", lambda o: _Sgd(o, late=True))
        yield Setting("momentum-convention", "the learning rate inside of the momentum", lambda o: _Sgd(o))
    if name == "RMSprop":
        forms: tuple[tuple[str, str, dict[str, Any]], ...] = (
            ("eps-inside-root", "eps added inside of the root", {"inside": True}),
            ("initial-accumulator", "an average of squares that starts at 1", {"start": 1.0}),
            ("bias-correction", "an average of squares without bias", {"correct": True}),
            ("eps-inside-root", "eps inside of the root, the average starting at 1", {"start": 1.0, "inside": True}),
            ("momentum-convention", "the learning rate inside of the momentum", {"outer_rate": True}),
        )
        for cause, words, how in forms:
            yield Setting(cause, words, lambda o, h=how: _Rms(o, **h))
    if name == "Adagrad":
        for start in (0.1, 1.0, 0.0):
            for inside in (False, True):
                cause = "eps-inside-root" if inside else "initial-accumulator"
                words = f"an accumulator from {start:g}, eps {'inside' if inside else 'outside'} of the root"
                yield Setting(cause, words, lambda o, s=start, i=inside: _Adagrad(o, s, i))
    for cause, names in _KINDS.items():
        for other in names:
            if other != name:
                yield Setting(
                    cause, f"{other} instead of {name}", lambda o, n=other: _remade(o, getattr(torch.optim, n))
                )


def _rates(group: Mapping[str, Any]) -> Iterator[Setting]:
    for factor in (0.1, 10.0, 0.5, 2.0, 0.01, 100.0):
        yield Setting("learning-rate", f"{factor:g} times the learning rate", _faster(factor))
    yield Setting("sign", "steps up the gradient", _put(maximize=not group.get("maximize", False)))
    yield Setting("learning-rate", "a schedule one step ahead", lambda o: _Shifted(o, 1))
    yield Setting("learning-rate", "a schedule one step behind", lambda o: _Shifted(o, -1))
    yield Setting("learning-rate", "no schedule", lambda o: _Shifted(o, 0))


def _faster(factor: float) -> Callable[[Any], None]:
    def change(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= factor

    return change


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


class _Own:
    """An optimizer written out, for what torch does not have."""

    def __init__(self, optimizer: Any) -> None:
        self.param_groups, self.n = optimizer.param_groups, 0
        self._kept: dict[int, dict[str, Any]] = {}
        self._before = list(optimizer._optimizer_step_pre_hooks.values())
        self._after = list(optimizer._optimizer_step_post_hooks.values())

    def step(self) -> None:
        self.n += 1
        for hook in self._before:
            hook(self, (), {})
        with torch.no_grad():
            for g in self.param_groups:
                for p in g["params"]:
                    if p.grad is not None:
                        self._one(p, p.grad, g, self._kept.setdefault(id(p), {}))
        for hook in self._after:
            hook(self, (), {})

    def _one(self, p: Any, grad: Any, g: Any, kept: dict[str, Any]) -> None:
        raise NotImplementedError


class _Adam(_Own):
    def __init__(self, optimizer: Any, decoupled: bool, **how: Any) -> None:
        super().__init__(optimizer)
        self._decoupled, self._how = decoupled, how

    def _one(self, p: Any, grad: Any, g: Any, kept: dict[str, Any]) -> None:
        (b1, b2), decay, rate, eps, how = g["betas"], g["weight_decay"], g["lr"], g["eps"], self._how
        grad = grad if self._decoupled or not decay else grad + decay * p
        m = kept["m"] = kept.get("m", 0) * b1 + (1 - b1) * grad
        v = kept["v"] = kept.get("v", 0) * b2 + (1 - b2) * grad**2
        first, second = how.get("correct", (True, True))
        c1, c2 = 1 - b1**self.n if first else 1.0, 1 - b2**self.n if second else 1.0
        root = (v / c2).sqrt() + eps
        if how.get("inside"):
            root = (v / c2 + eps).sqrt()
        elif how.get("raw_eps"):
            root = (v.sqrt() + eps) / c2**0.5
        old = p.clone()
        p -= rate * (m / c1) / root
        if decay and self._decoupled:
            p -= (1.0 if how.get("unscaled_decay") else rate) * decay * (p if how.get("late_decay") else old)


class _Sgd(_Own):
    def __init__(self, optimizer: Any, *, average: bool = False, debias: bool = False, late: bool = False) -> None:
        super().__init__(optimizer)
        self._average, self._debias, self._late = average, debias, late

    def _one(self, p: Any, grad: Any, g: Any, kept: dict[str, Any]) -> None:
        m, decay, rate = g["momentum"], g["weight_decay"], g["lr"]
        grad = grad if self._late else grad + decay * p
        step = rate * grad
        if m:
            part = 1 - m if self._average else 1.0
            buffer = kept["b"] = kept.get("b", 0) * m + part * (grad if self._average else step)
            out = buffer / (1 - m**self.n) if self._debias else buffer
            own = grad if self._average else step
            out = part * own + m * out if g["nesterov"] else out
            step = rate * out if self._average else out
        p -= step + (rate * decay * p if self._late else 0.0)


class _Rms(_Own):
    def __init__(self, optimizer: Any, **how: Any) -> None:
        super().__init__(optimizer)
        self._how = how

    def _one(self, p: Any, grad: Any, g: Any, kept: dict[str, Any]) -> None:
        a, eps, how = g["alpha"], g["eps"], self._how
        grad = grad + g["weight_decay"] * p
        start = torch.full_like(p, how.get("start", 0.0))
        v = kept["v"] = kept.get("v", start) * a + (1 - a) * grad**2
        v = v / (1 - a**self.n) if how.get("correct") else v
        if g["centered"]:
            mean = kept["g"] = kept.get("g", 0) * a + (1 - a) * grad
            v = v - mean**2
        out = grad / ((v + eps).sqrt() if how.get("inside") else v.sqrt() + eps)
        if g["momentum"]:
            own = g["lr"] * out if how.get("outer_rate") else out
            out = kept["b"] = kept.get("b", 0) * g["momentum"] + own
        p -= out if g["momentum"] and how.get("outer_rate") else g["lr"] * out


class _Adagrad(_Own):
    def __init__(self, optimizer: Any, start: float, inside: bool) -> None:
        super().__init__(optimizer)
        self._start, self._inside = start, inside

    def _one(self, p: Any, grad: Any, g: Any, kept: dict[str, Any]) -> None:
        s = kept["s"] = kept.get("s", torch.full_like(p, self._start)) + grad**2
        root = (s + g["eps"]).sqrt() if self._inside else s.sqrt() + g["eps"]
        p -= g["lr"] * grad / root


class _Shifted:
    """Takes the learning rates of a schedule one step earlier or later, or the first one always."""

    def __init__(self, optimizer: Any, by: int) -> None:
        self._o, self._by, self.param_groups = optimizer, by, optimizer.param_groups
        self._rates = [[g["lr"] for g in optimizer.param_groups]]
        probe = [[p.detach().clone() for p in g["params"]] for g in optimizer.param_groups]
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        self._hooks = list(optimizer._optimizer_step_post_hooks.values())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a schedule warns that it is stepped before the optimizer
            for _ in range(len(NORMS) + 1):
                for hook in self._hooks:
                    hook(optimizer, (), {})
                self._rates.append([g["lr"] for g in optimizer.param_groups])
        optimizer._optimizer_step_post_hooks.clear()
        with torch.no_grad():
            for group, kept in zip(optimizer.param_groups, probe, strict=True):
                for p, value in zip(group["params"], kept, strict=True):
                    p.copy_(value)
        self._n = 0

    def step(self) -> None:
        at, rates = (self._n + self._by if self._by else 0), self._rates
        before = [2 * a - b for a, b in zip(rates[0], rates[1], strict=True)]  # a line goes on backwards
        for group, rate in zip(self.param_groups, before if at < 0 else rates[at], strict=True):
            group["lr"] = rate
        self._n += 1
        self._o.step()


class _Clipped:
    """Clips what an optimizer reads, or what it does."""

    def __init__(self, optimizer: Any, limit: float, kind: str) -> None:
        optimizer._optimizer_step_pre_hooks.clear()
        self._o, self._limit, self._kind, self.param_groups = optimizer, limit, kind, optimizer.param_groups

    def step(self) -> None:
        params = [p for g in self._o.param_groups for p in g["params"] if p.grad is not None]
        if self._kind == "norm":
            _scaled_to(params, self._limit)
        elif self._kind == "value":
            nn.utils.clip_grad_value_(params, self._limit)
        elif self._kind == "each":
            for p in params:
                _scaled_to([p], self._limit)
        before = [p.detach().clone() for p in params]
        self._o.step()
        if self._kind == "update":
            with torch.no_grad():
                moves = [p - b for p, b in zip(params, before, strict=True)]
                norm = float(torch.sqrt(torch.stack([(m**2).sum() for m in moves]).sum()))
                norm /= self._o.param_groups[0]["lr"]
                for p, b, m in zip(params, before, moves, strict=True):
                    p.copy_(b + m * min(1.0, self._limit / norm))


def _scaled_to(params: Sequence[Any], limit: float) -> None:
    """Clip gradients as optax does: without 1e-6 beside the norm."""
    norm = float(torch.sqrt(torch.stack([(p.grad**2).sum() for p in params]).sum()))
    if norm > limit:
        for p in params:
            p.grad *= limit / norm


def _clipped_exactly(optimizer: Any) -> None:
    """Undo the 1e-6 of torch's clipping, which its hooks have scaled the gradients with."""
    hooks = list(optimizer._optimizer_step_pre_hooks.values())
    optimizer._optimizer_step_pre_hooks.clear()

    def exactly(o: Any, args: Any, kwargs: Any) -> None:
        params = [p for g in o.param_groups for p in g["params"] if p.grad is not None]

        def norm() -> float:
            return float(torch.sqrt(torch.stack([(p.grad**2).sum() for p in params]).sum()))

        before = norm()
        for hook in hooks:
            hook(o, args, kwargs)
        if before and norm() < before:
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

    def run(self, change: Any = None) -> Steps:
        """Return torch's steps, with a changed optimizer."""
        return torch_steps(self._module, self._make, self._start, self._gradients, change)

    def fault(self) -> UpdateFault | None:
        """Return how updates differ, or None."""
        wrong = self.wrong(raised("torch_optimizer", self.run))
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
        return next((s for s in _settings(self.sample) if self._explains(s.change)), None)

    def _two_settings(self) -> Setting | None:
        simple = [s for s in _settings(self.sample) if s.cause in _SIMPLE][:60]
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


_SIMPLE = frozenset(
    [
        "missing-clipping",
        "clip-epsilon",
        "optimizer-eps",
        "missing-weight-decay",
        "weight-decay",
        "learning-rate",
        "nesterov",
        "momentum",
        "decoupled-decay",
        "decay-mask",
        "eps-inside-root",
        "bias-correction",
    ]
)


def _shown(optimizer: Any) -> str:
    keys = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "dampening", "alpha")
    return ", ".join(f"{k}={v}" for k, v in optimizer.param_groups[0].items() if k in keys)
