"""Steps of both optimizers on the same gradients, and which setting of torch's gives the steps of
optax's.

The gradients are torch's, mapped to the port, so that a wrong gradient neither hides nor causes a
wrong update. They are scaled so that a limit on their norm binds at some steps and not at others.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, combinations, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from gradcheck_suite.errors import UsageError
from gradcheck_suite.port.alterations import Alteration, AlterationFamily
from gradcheck_suite.port.budget import Budget
from gradcheck_suite.port.changes import is_refusal, of_ours
from gradcheck_suite.port.explanation import Explanation, best_explanation
from gradcheck_suite.port.jax_program import Stored, in_double
from gradcheck_suite.port.mapping import Leaf, StateMap
from gradcheck_suite.port.matching import array
from gradcheck_suite.port.number_sets import Array
from gradcheck_suite.port.pair import JaxModel, call_user_code, is_float, shaped_as
from gradcheck_suite.run.environment import imported

NORMS = (10.0, 0.02, 3.0, 40.0)
"""Norm of all gradients at each step."""
STEP = 1e-8
"""Difference relative to the largest movement that is not looked at. Clipping without torch's 1e-6 makes 1e-7."""
CANDIDATES = 2000
"""Settings, and pairs of settings, that are tried."""
Steps = list[dict[str, Array]]
Gradients = Sequence[Mapping[str, Array]]


def drawn_gradients(base: Mapping[str, Array], ties: Mapping[str, Any]) -> Steps:
    """Return gradients for each step, near those of the model.

    Args:
        base: parameter -> gradient.
        ties: parameter -> what is the same for tied ones.
    """
    rng = np.random.default_rng(5)
    steps = []
    for norm in NORMS:
        drawn: dict[Any, Array] = {}
        for name, g in base.items():
            size = float(np.abs(g).mean()) if g.size else 0.0
            drawn.setdefault(ties[name], g + (0.3 * size + 1e-3) * rng.normal(size=g.shape))
        whole = math.sqrt(sum(float((g**2).sum()) for g in drawn.values()))
        steps.append({name: drawn[ties[name]] * norm / whole for name in base})
    return steps


def torch_steps(
    module: nn.Module,
    make: Callable[..., Any],
    start: Mapping[str, Array],
    gradients: Gradients,
    rates: Any = None,
) -> tuple[Steps, Recipe]:
    """Return the parameters after each step of torch's optimizer, and what it read.

    Args:
        module: whose parameters are stepped; they are restored.
        make: parameters -> optimizer.
        start: parameters to start at.
        gradients: of each step.
        rates: learning rate of each group at each step, None for the optimizer's own.
    """
    own = dict(module.named_parameters())
    before = {n: p.detach().clone() for n, p in own.items()}
    found: Steps = []
    try:
        with torch.no_grad():
            for n, p in own.items():
                p.copy_(shaped_as(start[n], p))
        optimizer = make(module.parameters())
        recipe = Recipe(
            _class_of(optimizer),
            [dict(g) for g in optimizer.param_groups],
            [],
            [],
        )

        def note_gradients(o: Any, *_: Any) -> None:
            recipe.gradients[len(found) :] = [
                {n: array(p.grad).copy() for n, p in own.items() if p.grad is not None}
            ]

        def note_rates(o: Any, *_: Any) -> None:
            if len(recipe.rates) == len(found):
                recipe.rates.append([float(g["lr"]) for g in o.param_groups])

        # the `step` of a subclass and that of its base class may both call the hooks: the inner one
        # is the step itself
        optimizer.register_step_pre_hook(note_gradients)
        handle = optimizer.register_step_post_hook(note_rates)
        # a scheduler sets the next rate there
        optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)
        for i, step in enumerate(gradients):
            for n, p in own.items():
                p.grad = shaped_as(step[n], p).clone() if n in step else None
            for group, rate in zip(optimizer.param_groups, rates[i] if rates else [], strict=False):
                group["lr"] = rate
            optimizer.step()
            found.append({n: array(p).copy() for n, p in own.items()})
    finally:
        with torch.no_grad():
            for n, p in own.items():
                p.copy_(before[n])
                p.grad = None
    return found, recipe


def jax_steps(
    optimizer: Any, model: JaxModel, leaves: Sequence[Any], gradients: Sequence[Sequence[Any]]
) -> list[Any]:
    """Return the leaves after each step of optax's optimizer, computed in float64."""
    # the collections of flax linen beside `params` (running statistics) are not trained
    beside = model.library == "linen" and not all(
        path.startswith("params.") for path in model.paths
    )
    pairs = zip(leaves, model.paths, strict=True)
    trained = [
        is_float(leaf) and (not beside or path.startswith("params.")) for leaf, path in pairs
    ]

    def tree(values: Sequence[Any]) -> Any:
        whole = jax.tree.unflatten(
            model.structure, [v if t else None for v, t in zip(values, trained, strict=True)]
        )
        return whole["params"] if beside else whole

    def step(given: Any, state: Any, params: Any) -> Any:
        moves, state = optimizer.update(given, state, params)
        return (
            jax.tree.map(
                lambda p, m: p if m is None else p + m, params, moves, is_leaf=lambda x: x is None
            ),
            state,
        )

    params = tree(leaves)
    try:
        state = Stored(in_double(optimizer.init), params)(params)
    except jax.errors.JAXTypeError:
        # it reads its parameters with numpy: people call `init` outside of jit
        state = optimizer.init(params)
    run = Stored(
        in_double(step),
        tree(gradients[0]),
        state,
        params,
    )
    found = []
    for given in gradients:
        params, state = run(tree(given), state, params)
        moved = iter(jax.tree.leaves(params))
        found.append(
            [
                np.asarray(next(moved)) if t else leaf
                for t, leaf in zip(trained, leaves, strict=True)
            ]
        )
    return found


# Settings of torch's optimizer that people get wrong.


@dataclass(frozen=True)
class Recipe:
    """How an optimizer of torch steps.

    Attributes:
        cls: its class.
        groups: its parameter groups, as they start.
        rates: learning rate of each group at each step.
        gradients: what each step reads, by the names of parameters.
        form: what no class of torch's offers; see `_Written`.
    """

    cls: Any
    groups: list[dict[str, Any]]
    rates: list[list[float]]
    gradients: Steps
    form: Mapping[str, Any] = field(default_factory=dict)

    def put(self, **values: Any) -> Recipe:
        """Return this with other settings."""
        return replace(self, groups=[{**g, **values} for g in self.groups])

    def written(self, **form: Any) -> Recipe:
        """Return this in another form."""
        return replace(self, form={**self.form, **form})

    def made(self) -> Any:
        """Return an optimizer."""
        groups = [dict(g) for g in self.groups]
        return _Written(groups, self.cls.__name__, self.form) if self.form else self.cls(groups)


Setting = Alteration
"""A change of torch's optimizer, as of its `Recipe`."""

_ADAM = "AdamW?"
_RMS = "RMSprop"
_SGD = "SGD"
_ADAGRAD = "Adagrad"


def _value_of(cause: str, key: str, *values: Any) -> AlterationFamily:
    """Return the row of other values of a setting."""

    def others(recipe: Recipe) -> list[Any]:
        mine = recipe.groups[0].get(key)
        # True is 1 to Python: a switch has no numbers, and a number no switches
        alike = [v for v in values if isinstance(v, bool) == isinstance(mine, bool)]
        return [v for v in alike if v != mine] if mine is not None else []

    words = f"{key} {{}} instead of {{given.groups[0][{key}]}}"
    return AlterationFamily(
        cause,
        ".*",
        words,
        lambda r, value: r.put(**{key: value}),
        others,
    )


VALUES: tuple[AlterationFamily, ...] = (
    _value_of(
        "optimizer-eps",
        "eps",
        *(1e-8, 1e-6, 1e-7, 1e-5, 1e-10, 1e-3, 1e-4, 0.0, 1e-12, 1e-16, 1e-15),
    ),
    _value_of("amsgrad", "amsgrad", True, False),
    _value_of("momentum", "momentum", 0.9, 0.0, 0.95, 0.99, 0.8, 0.5),
    _value_of("nesterov", "nesterov", True, False),
    _value_of("centered", "centered", True, False),
    _value_of("decay-of-squares", "alpha", 0.9, 0.99, 0.95, 0.999),
    _value_of("decay-of-squares", "rho", 0.9, 0.95, 0.99, 0.999),
    _value_of("decoupled-decay", "decoupled_weight_decay", True, False),
    _value_of("dampening", "dampening", 0.0, 0.1, 0.5, 0.9),
    _value_of("sign", "maximize", True, False),
)
"""Other values of settings."""


def _form(cause: str, optimizers: str, words: str, **form: Any) -> AlterationFamily:
    """Return the row of a form that no class of torch's offers; see `_Written`."""
    return AlterationFamily(
        cause,
        optimizers,
        words,
        lambda r, _: r.written(**form),
    )


FORMS: tuple[AlterationFamily, ...] = (
    _form("momentum-convention", _SGD, "momentum as an average", average=True),
    _form(
        *("momentum-convention", _SGD, "momentum as an average without bias"),
        average=True,
        unbiased=True,
    ),
    _form(
        *("momentum-convention", f"{_SGD}|{_RMS}", "the learning rate inside of the momentum"),
        rate_inside=True,
    ),
    _form("decoupled-decay", _SGD, "decoupled weight decay", late=True),
    _form("eps-inside-root", f"{_ADAM}|{_RMS}|{_ADAGRAD}", "eps inside of the root", inside=True),
    _form("bias-correction", _ADAM, "no bias correction", correct=(False, False)),
    _form(
        *("bias-correction", _ADAM, "bias correction of the first moment alone"),
        correct=(True, False),
    ),
    _form(
        *("bias-correction", _ADAM, "bias correction of the second moment alone"),
        correct=(False, True),
    ),
    _form("eps-before-correction", _ADAM, "eps added before the bias correction", eps_first=True),
    _form("decay-place", _ADAM, "weight decay after the step", late=True, after=True),
    _form("bias-correction", _RMS, "an average of squares without bias", correct=(False, True)),
    _form("initial-accumulator", _RMS, "an average of squares that starts at 1", start=1.0),
    _form(
        *("initial-accumulator", _RMS, "an average from 1, eps inside of the root"),
        start=1.0,
        inside=True,
    ),
    AlterationFamily(
        "initial-accumulator",
        _ADAGRAD,
        "an accumulator from {:g}, eps outside",
        lambda r, start: r.written(start=start),
        (0.1, 1.0, 0.0),
    ),
    AlterationFamily(
        "initial-accumulator",
        _ADAGRAD,
        "an accumulator from {:g}, eps inside",
        lambda r, start: r.written(start=start, inside=True),
        (0.1, 1.0, 0.0),
    ),
)
"""Other forms of optimizers."""


def _class_of(optimizer: Any) -> Any:
    """Return torch's class that an optimizer is of, or its own: a subclass may set its learning
    rate in `step`.
    """
    own = [c for c in type(optimizer).__mro__ if c.__module__.startswith("torch.optim.")]
    return own[0] if own and own[0] is not torch.optim.Optimizer else type(optimizer)


def _settings(mine: Recipe, raw: Steps, wrong: Mapping[Any, str]) -> Iterator[Setting]:
    """Yield changes of an optimizer, the most usual first.

    Args:
        mine: the optimizer.
        raw: gradients before its hooks.
        wrong: parameters that step otherwise, with their names.
    """
    name = mine.cls.__name__
    fitting = (row.alterations(mine) for row in FORMS if row.is_of(name))
    forms = list(chain.from_iterable(fitting))
    yield from _unclipped(mine, raw)
    # with a momentum, the first two forms are the most usual mistakes of all
    if mine.groups[0].get("momentum"):
        yield from forms[:2]
    yield from _decay_masks(mine, wrong)
    for row in VALUES:
        yield from row.alterations(mine)
    yield from _other_betas(mine.groups[0].get("betas"))
    yield from _other_decays(mine)
    yield from _other_rates(mine.rates, [g["lr"] for g in mine.groups])
    yield from forms
    yield from _decays_whatever_the_rate(mine)
    yield from _clippings(raw)


def _decays(recipe: Recipe) -> set[float]:
    return {g.get("weight_decay", 0.0) for g in recipe.groups}


def _unclipped(mine: Recipe, raw: Steps) -> Iterator[Setting]:
    """Yield what is left out of clipping, where torch's hooks change the gradients."""
    pairs = list(zip(raw, mine.gradients, strict=True))
    if any(_norm(before) != _norm(after) for before, after in pairs):
        yield Setting("missing-clipping", "no clipping", lambda r: replace(r, gradients=raw))
        exact = [_exactly_clipped(before, after) for before, after in pairs]
        words = "clipping to the norm without 1e-6"
        yield Setting("clip-epsilon", words, lambda r: replace(r, gradients=exact))


def _decay_masks(mine: Recipe, wrong: Mapping[Any, str]) -> Iterator[Setting]:
    """Yield weight decay on other parameters."""
    decays = _decays(mine)
    if len(decays) > 1:
        for decay in sorted(decays, reverse=True):
            words = f"weight decay {decay:g} on all parameters"
            yield Setting("decay-mask", words, lambda r, d=decay: r.put(weight_decay=d))
    elif max(decays):
        words = "weight decay on matrices alone"
        yield Setting("decay-mask", words, lambda r: _decaying(r, lambda p: p.dim() > 1))
    decaying = (g["params"] for g in mine.groups if g.get("weight_decay"))
    decayed = set(chain.from_iterable(decaying))
    if decayed ^ wrong.keys():
        each = [
            f"{'no weight' if p in decayed else 'weight'} decay on {name}"
            for p, name in wrong.items()
        ]
        words = ", ".join([*each[:3], "..."]) if len(each) > 3 else ", ".join(each)
        exchanged = lambda p: (p in decayed) != (p in wrong)  # noqa: E731 - one use
        yield Setting("decay-mask", words, lambda r: _decaying(r, exchanged))


def _other_decays(mine: Recipe) -> Iterator[Setting]:
    if "weight_decay" not in mine.groups[0]:
        return
    for decay in (0.0, 1e-2, 1e-4, 0.1, 5e-4, 1e-3, 0.05, 0.2):
        if _decays(mine) != {decay}:
            cause = "missing-weight-decay" if decay == 0 else "weight-decay"
            words = f"weight decay {decay:g}"
            yield Setting(cause, words, lambda r, d=decay: r.put(weight_decay=d))


def _decays_whatever_the_rate(mine: Recipe) -> Iterator[Setting]:
    if not max(_decays(mine)) or not re.fullmatch(f"{_ADAM}|{_SGD}", mine.cls.__name__):
        return
    for rate in sorted({1.0, max(max(r) for r in mine.rates)}):
        words = f"decoupled weight decay times {rate:g}, whatever the learning rate"
        yield Setting("decay-place", words, lambda r, d=rate: r.written(late=True, decay_rate=d))


def _decaying(r: Recipe, decayed: Callable[[Any], bool]) -> Recipe:
    decay = max(g["weight_decay"] for g in r.groups)
    groups = []
    for g, d in product(r.groups, (True, False)):
        groups.append(
            {**g, "params": [p for p in g["params"] if decayed(p) == d], "weight_decay": decay * d}
        )
    rates = [np.repeat(step, 2).tolist() for step in r.rates]  # a group became two
    return replace(r, groups=groups, rates=rates)


def _clippings(raw: Steps) -> Iterator[Setting]:
    for limit in (1.0, 0.5, 0.1, 5.0, 10.0, 2.0):
        for words, clipped in (
            ("gradients clipped to a global norm of", [_limited(g, limit) for g in raw]),
            (
                "gradients clipped, each element to",
                [{n: g.clip(-limit, limit) for n, g in s.items()} for s in raw],
            ),
            (
                "gradients clipped to a norm for each parameter of",
                [{n: _limited({n: g}, limit)[n] for n, g in s.items()} for s in raw],
            ),
        ):
            yield Setting(
                "clipping", f"{words} {limit:g}", lambda r, c=clipped: replace(r, gradients=c)
            )
        words = f"updates clipped to a global norm of {limit:g}"
        yield Setting(
            "clip-order", words, lambda r, c=limit: replace(r, gradients=raw).written(limit=c)
        )


def _limited(gradients: Mapping[str, Array], limit: float) -> dict[str, Array]:
    factor = limit / max(_norm(gradients), limit)  # no elements have no norm
    return {n: g * factor for n, g in gradients.items()}


def _exactly_clipped(raw: Mapping[str, Array], clipped: Mapping[str, Array]) -> dict[str, Array]:
    """Undo the 1e-6 of torch's clipping."""
    before = _norm(raw)
    factor = (before + 1e-6) / before if _norm(clipped) < before else 1.0
    return {n: g * factor for n, g in clipped.items()}


def _norm(arrays: Mapping[str, Array]) -> float:
    return math.sqrt(sum(float((a**2).sum()) for a in arrays.values()))


def _other_betas(mine: tuple[float, float] | None) -> Iterator[Setting]:
    b1, b2 = mine or (0.0, 0.0)
    for betas in product(
        (b1, 0.9, 0.95, 0.8, 0.0, 0.5, 0.99, b2), (b2, 0.999, 0.99, 0.95, 0.98, 0.9, b1)
    ):
        if mine is not None and betas != mine:
            yield Setting(
                "betas", f"betas {betas} instead of {mine}", lambda r, b=betas: r.put(betas=b)
            )


def _other_rates(rates: list[list[float]], start: list[float]) -> Iterator[Setting]:
    # a line goes on backwards
    before = [2 * a - b for a, b in zip(rates[0], rates[1], strict=True)]
    for words, others in (
        *(
            (f"{f:g} times the learning rate", [[f * x for x in r] for r in rates])
            for f in (0.1, 10.0, 0.5, 2.0, 0.01, 100.0)
        ),
        ("a schedule one step ahead", rates[1:]),
        ("a schedule one step behind", [before, *rates]),
        ("no schedule", [rates[0]] * len(rates)),
        ("no schedule", [start] * len(rates)),
    ):
        yield Setting("learning-rate", words, lambda r, o=others: replace(r, rates=o))


class _Written(torch.optim.Optimizer):
    """Adam, RMSprop, Adagrad and SGD written out, for what torch's do not offer."""

    def __init__(self, groups: list[dict[str, Any]], name: str, form: Mapping[str, Any]) -> None:
        super().__init__(groups, {})
        self._n = 0
        self._form = form
        self._late = form.get(
            "late", name == "AdamW" or bool(groups[0].get("decoupled_weight_decay"))
        )
        is_adam = re.fullmatch(_ADAM, name) is not None
        self._correct = form.get("correct", (is_adam, is_adam))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self._n += 1
        every = list[tuple[Any, Any]]()
        for group in self.param_groups:
            every += [(p, group) for p in group["params"] if p.grad is not None]
        moves = [self._move(p, p.grad, g, self.state[p]) for p, g in every]
        whole = math.sqrt(sum(float((m**2).sum()) for m in moves))
        limit = self._form.get("limit", math.inf) * self.param_groups[0]["lr"]
        for (p, _), move in zip(every, moves, strict=True):
            p -= move * min(1.0, limit / max(whole, 1e-300))

    def _move(self, p: Any, grad: Any, g: Mapping[str, Any], kept: dict[str, Any]) -> Any:
        rate = g["lr"]
        decay = g["weight_decay"]
        form = self._form
        out = self._direction(p, grad if self._late else grad + decay * p, g, kept)
        inside, outside = (
            (rate, 1.0) if form.get("rate_inside") and g.get("momentum") else (1.0, rate)
        )
        if m := g.get("momentum"):
            own = (1 - m if form.get("average") else 1.0) * inside * out
            buffer = kept["b"] = m * kept.get("b", 0.0) + own
            out = buffer / (1 - m**self._n) if form.get("unbiased") else buffer
            out = own + m * out if g.get("nesterov") else out
        move = outside * out
        at = p - move if form.get("after") else p
        return move + (form.get("decay_rate", rate) * decay * at if self._late else 0.0)

    def _direction(self, p: Any, grad: Any, g: Mapping[str, Any], kept: dict[str, Any]) -> Any:
        """Return the gradient, for adaptive optimizers its moment over the root of the moment of
        its squares.
        """
        if "eps" not in g:
            return grad
        b1, b2 = g.get("betas", (0.0, g.get("alpha", 1.0)))  # Adagrad adds up the squares
        m = kept["m"] = b1 * kept.get("m", 0.0) + (1 - b1) * grad
        start = torch.full_like(p, self._form.get("start", 0.0))
        v = kept["v"] = b2 * kept.get("v", start) + (1 - b2 or 1.0) * grad**2
        if g.get("centered"):
            mean = kept["mean"] = b2 * kept.get("mean", 0.0) + (1 - b2) * grad
            v = v - mean**2
        first, second = (
            1 - b**self._n if c else 1.0 for b, c in zip((b1, b2), self._correct, strict=True)
        )
        if self._form.get("eps_first"):
            return m / first / ((v.sqrt() + g["eps"]) / second**0.5)
        v = v / second
        return (
            m / first / ((v + g["eps"]).sqrt() if self._form.get("inside") else v.sqrt() + g["eps"])
        )


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
        budget: of the judgement.

    Attributes:
        leaves: those that are judged.
        odd: exceptions of this package, in words: an attempt that raised one was left out.
    """

    def __init__(
        self,
        state_map: StateMap,
        state: Mapping[str, Array],
        leaves: Sequence[Any],
        gradient: Mapping[str, Array],
        budget: Budget,
    ) -> None:
        self._budget = budget.of(CANDIDATES)
        self.odd: list[str] = []
        self._map = state_map
        pair = state_map.pair
        own = dict(pair.module.named_parameters())
        self._start = {n: state[n] for n in own}
        base = {
            n: gradient.get(n, np.zeros(state[n].shape))
            for n, p in own.items()
            if p.requires_grad and p.numel()
        }
        self._gradients = drawn_gradients(base, {n: state_map.offsets.get(n, n) for n in base})
        make = pair.torch_optimizer
        assert make is not None
        self._jax_leaves = leaves
        self._pushed = [state_map.push(self._vector(step)) for step in self._gradients]
        # one step more: of a schedule one step ahead
        longer = [*self._gradients, self._gradients[-1]]
        mine, recipe = call_user_code(
            "torch_optimizer", lambda: torch_steps(pair.module, make, self._start, longer)
        )
        self._mine = mine[:-1]
        self._recipe = replace(recipe, gradients=recipe.gradients[:-1])
        if not hasattr(pair.jax_optimizer, "update"):
            raise UsageError(
                "jax_optimizer: expected an optax.GradientTransformation, got"
                f" {pair.jax_optimizer!r}"
            )
        steps = lambda: jax_steps(pair.jax_optimizer, state_map.model, leaves, self._pushed)  # noqa: E731 - one use
        self._theirs = call_user_code("jax_optimizer", steps)
        self.leaves = [i for i, leaf in enumerate(state_map.leaves) if self._is_judged(leaf, base)]

    def _vector(self, values: Mapping[str, Array]) -> Array:
        out = np.zeros(self._map.size)
        for name, value in values.items():
            if name in self._map.offsets:
                out[self._map.part(name)] = value.reshape(-1)
        return out

    def _is_judged(self, leaf: Leaf | None, trained: Mapping[str, Array]) -> bool:
        """Return whether a leaf steps as torch's parameters do: it has copies of them, or sums of
        two.
        """
        if leaf is None or not leaf.known:
            return False
        parameters = np.zeros(self._map.size, bool)
        for name in trained:
            parameters[self._map.part(name)] = True
        used = leaf.index[leaf.index >= 0]
        return bool(
            len(used) and parameters[used].all() and (leaf.factor[leaf.index >= 0] == 1).all()
        )

    def wrong(self, mine: Steps) -> dict[int, float]:
        """Return the leaves that step otherwise, with the difference relative to the largest
        movement of any.
        """
        m = self._map
        found = dict[int, float]()
        largest = 0.0
        first = self._vector(self._start)
        for step, theirs in zip(mine, self._theirs, strict=True):
            after = self._vector(step)
            for i in self.leaves:
                leaf = m.leaves[i]
                assert leaf is not None
                used = leaf.index >= 0
                expected = m.computed(leaf, after).reshape(-1)[used]
                before = m.computed(leaf, first).reshape(-1)[used]
                off = np.abs(np.asarray(theirs[i]).reshape(-1)[used] - expected)
                off = np.where(np.isnan(off), np.inf, off)
                largest = max(largest, float(np.abs(expected - before).max(initial=0.0)))
                found[i] = max(found.get(i, 0.0), float(off.max(initial=0.0)))
        return {
            i: off / max(largest, 1e-300)
            for i, off in found.items()
            if off > STEP * max(largest, 1e-300)
        }

    def fault(self) -> UpdateFault | None:
        """Return how updates differ, or None."""
        wrong = self.wrong(self._mine)
        if not wrong:
            return None
        at = max(wrong, key=lambda i: wrong[i])
        leaf = self._map.leaves[at]
        assert leaf is not None
        leaves = list(filter(None, map(self._map.leaves.__getitem__, wrong)))
        merged = all((one.second >= 0).any() for one in leaves)
        is_partial = len(wrong) <= len(self.leaves) / 2
        expected = f"{self._recipe.cls.__name__} with {_shown(self._recipe.groups[0])}"
        if merged:
            words = (
                f"{leaf.path}, which is a sum of {' and '.join(self._map.sources(leaf))}, as one"
                " parameter"
            )
            return UpdateFault(
                "merged-biases",
                words,
                wrong[at],
                leaf,
                True,
                expected,
            )
        own = dict(self._map.pair.module.named_parameters())
        sources = chain.from_iterable(map(self._map.sources, leaves))
        names = {own[n]: n for n in sources if n in own}
        settings = list(_settings(self._recipe, self._gradients, names))
        found = best_explanation(self._attempts(settings, at), self._tried, self._budget)
        cause, words = found.value if found else ("unknown", f"other steps{self._budget.words}")
        return UpdateFault(
            cause,
            words,
            wrong[at],
            leaf,
            is_partial and found is None,
            expected,
        )

    def _attempts(self, settings: Sequence[Setting], at: int) -> Iterator[Attempt]:
        """Yield attempts to explain the steps: by one setting, by other learning rates alone or
        beside a setting, by an optimizer of another kind, and by two settings.

        Args:
            settings: the most usual ones first.
            at: the leaf that steps most otherwise.
        """
        for setting in settings:
            yield partial(self._by_settings, setting)
        simple = [s for s in settings if _SIMPLE.fullmatch(s.cause)][:60]
        beside = [s for s in simple if s.cause != "learning-rate"]
        for one in (None, *beside):
            yield partial(self._by_other_rates, one)
        yield from self._other_kinds(at)
        for a, b in combinations(simple, 2):
            if a.cause != b.cause:
                yield partial(self._by_settings, a, b)

    def _tried(self, attempt: Attempt) -> Explanation[tuple[str, str]] | None:
        """Return what an attempt explains, None where an optimizer does not take what it is given."""
        try:
            found = attempt()
        except Exception as error:
            if not is_refusal(error) and (words := of_ours(error)) not in self.odd:
                self.odd.append(words)
            return None
        return None if found is None else Explanation(found)

    def _by_settings(self, *settings: Setting) -> tuple[str, str] | None:
        """Return the causes of settings that explain the steps together, and what they are in
        words.
        """
        if not self._explains(*settings):
            return None
        causes = " and ".join(s.cause for s in settings)
        return causes, " and ".join(s.words for s in settings)

    def _explains(self, *settings: Setting) -> bool:
        r = self._recipe
        for setting in settings:
            r = setting.make(r)
        made = torch_steps(
            self._map.pair.module,
            lambda _: r.made(),
            self._start,
            r.gradients,
            r.rates,
        )
        return not self.wrong(made[0])

    def _by_other_rates(self, setting: Setting | None) -> tuple[str, str] | None:
        """Return learning rates that explain the steps, alone or beside one setting.

        A step is proportional to its learning rate, so that the port's can be read off its steps,
        whatever schedule it has.
        """
        recipe = self._recipe if setting is None else setting.make(self._recipe)
        rates = self._rates_read_off(recipe)
        if rates is None:
            return None
        words = _rates_in_words([r[0] for r in rates], [r[0] for r in recipe.rates])
        if setting is None:
            return "learning-rate", words
        return f"{setting.cause} and learning-rate", f"{setting.words} and {words}"

    def _rates_read_off(self, recipe: Recipe) -> list[list[float]] | None:
        """Return the learning rates with which torch's steps are the port's, None where no rates
        do that.
        """
        module = self._map.pair.module
        count = len(self._mine)
        rates = [list(r) for r in recipe.rates[:count]]
        for number in range(count):
            rates[number] = [rate or 1.0 for rate in rates[number]]
            steps, _ = torch_steps(
                module,
                lambda _: recipe.made(),
                self._start,
                recipe.gradients[: number + 1],
                rates[: number + 1],
            )
            before = self._vector(steps[-2] if number else self._start)
            mine = self._vector(steps[-1]) - before
            theirs = self._moved_in_port(number, before)
            used = np.isfinite(theirs)
            square = float((mine[used] ** 2).sum())
            factor = float((mine[used] * theirs[used]).sum()) / square if square else 0.0
            if abs(factor) < 1e-12:  # a rate of 0, up to rounding
                factor = 0.0
            rates[number] = [factor * rate for rate in rates[number]]
        made = torch_steps(
            module,
            lambda _: recipe.made(),
            self._start,
            recipe.gradients,
            rates,
        )
        return None if self.wrong(made[0]) else rates

    def _moved_in_port(self, number: int, before: Array) -> Array:
        """Return how the port's leaves are away from a flat state after a step, NaN for elements
        that no copied leaf has.
        """
        found = np.full(self._map.size, np.nan)
        for i in self.leaves:
            leaf = self._map.leaves[i]
            if leaf is not None and leaf.is_copy:
                used = leaf.index >= 0
                after = np.asarray(self._theirs[number][i]).reshape(-1)[used]
                found[leaf.index[used]] = after - before[leaf.index[used]]
        return found

    def _other_kinds(self, at: int) -> Iterator[Attempt]:
        """Yield the optimizers of optax, with torch's settings or their own."""
        name = self._recipe.cls.__name__
        for kind in vars(imported("optax")):
            yield partial(self._by_kind, kind, at, True)
            # one of the same kind has torch's settings: with its own it is these that differ
            if kind.rstrip("w") != name.lower().rstrip("w"):
                yield partial(self._by_kind, kind, at, False)

    def _by_kind(self, kind: str, at: int, as_torch: bool) -> tuple[str, str] | None:
        """Return an optimizer of optax by whose steps a leaf moves."""
        make = vars(imported("optax"))[kind]
        # of functions that take a learning rate, one may take no schedule, or need more than
        # gradients: it raises then, and is no answer
        if not callable(make):
            return None
        known = inspect.signature(make).parameters
        if "learning_rate" not in known:
            return None
        given = {k: v for k, v in self._torch_settings().items() if as_torch and k in known}
        optimizer = make(learning_rate=self._rate(), **given)
        if not hasattr(optimizer, "update") or not self._moves_alike(optimizer, at):
            return None
        how = "torch's settings" if as_torch else "its own settings"
        return "optimizer-kind", f"optax.{kind} with {how}"

    def _torch_settings(self) -> dict[str, Any]:
        """Return the settings of torch's optimizer under optax's names, too."""
        group = self._recipe.groups[0]
        betas = dict(zip(("b1", "b2"), group.get("betas", ()), strict=False))
        found = {**group, **betas, "decay": group.get("alpha")}
        return {k: v for k, v in found.items() if v is not None}

    def _rate(self) -> Any:
        """Return torch's learning rate as optax takes it: a number, or a schedule."""
        rates = [r[0] for r in self._recipe.rates]
        return rates[0] if len(set(rates)) == 1 else lambda n: jnp.asarray(rates)[n]

    def _moves_alike(self, optimizer: Any, at: int) -> bool:
        """Return whether an optimizer of optax moves a leaf as the port's does."""
        before = value = jnp.asarray(self._jax_leaves[at])
        state = optimizer.init(value)
        off = [0.0]
        moved = [0.0]
        for step, theirs in zip(self._pushed, self._theirs, strict=True):
            move, state = optimizer.update(jnp.asarray(step[at]), state, value)
            value = value + move
            off.append(float(abs(value - theirs[at]).max()))
            moved.append(float(abs(value - before).max()))
        return bool(np.max(off) <= STEP * np.max(moved))  # not where one is NaN


Attempt = Callable[[], tuple[str, str] | None]
"""Tries to explain the steps: returns a cause, and what the port does in words."""


def _rates_in_words(theirs: Sequence[float], mine: Sequence[float]) -> str:
    """Return the learning rates of a port in words, and whether its schedule is late or early."""

    def same(a: Sequence[float], b: Sequence[float]) -> bool:
        return len(a) > 0 and bool(np.allclose(a, b, rtol=1e-6, atol=1e-12))

    listed = ", ".join(f"{r:.6g}" for r in theirs)
    words = f"learning rates {listed} instead of {', '.join(f'{r:.6g}' for r in mine[:4])}"
    n = len(theirs)
    if same(theirs[1:], mine[: n - 1]):
        return f"a schedule one step behind: {words}"
    if same(theirs[: len(mine) - 1], mine[1 : n + 1]):
        return f"a schedule one step ahead: {words}"
    if same(theirs[1:2], mine[:1]) and abs(theirs[0]) < abs(mine[0]):
        return f"a schedule that starts one step late: {words}"
    return words


_SIMPLE = re.compile(
    "(missing-)?clipping|clip-epsilon|optimizer-eps|(missing-)?weight-decay|learning-rate|nesterov|momentum"
    "|decoupled-decay|decay-mask|eps-inside-root|bias-correction|betas"
)
"""Causes of which two are tried together."""


def _shown(group: Mapping[str, Any]) -> str:
    keys = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "dampening", "alpha")
    return ", ".join(f"{k}={v}" for k, v in group.items() if k in keys)
