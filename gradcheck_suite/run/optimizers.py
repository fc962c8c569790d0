"""The optimizers of cases, and the recomputation of their steps."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from gradcheck_suite.errors import UsageError
from gradcheck_suite.run.observer import Observation, copied_tensors, is_same_tensor, same_tree


class NoOpOptimizer(torch.optim.Optimizer):
    """An optimizer whose step changes nothing, so that every window is judged at the same
    parameters.

    Its groups have the settings of SGD and Adam: a loop may read them, and torch's schedulers
    change some.
    """

    def __init__(self, params: Iterable[Any]) -> None:
        common = {"lr": 0.0, "weight_decay": 0.0, "maximize": False, "foreach": None, "fused": None}
        common |= {"capturable": False, "differentiable": False, "decoupled_weight_decay": False}
        sgd = {"momentum": 0.0, "dampening": 0.0, "nesterov": False}
        adam = {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False}
        super().__init__(params, common | sgd | adam)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure, if any, and return what it returns."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()


class NormalizedSGD(torch.optim.Optimizer):
    """Gradient descent with momentum, on each parameter's gradient divided by its largest element.

    No element moves by more than lr / (1 - momentum) in a step, in every dtype: no loop diverges
    under it.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.02, momentum: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "foreach": None, "fused": None})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure, if any, update every parameter that has a gradient, and return what
        the closure returned.
        """
        loss = None
        if closure is not None:
            # `no_grad` above covers the closure's forward as well
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                # max() of no elements raises
                if p.grad is None or not p.numel():
                    continue
                gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
                # a sharded gradient is gathered: max() fails on a rank whose part of it is empty
                whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                largest = float(whole.abs().max())
                direction = gradient / largest if largest else gradient.clone()
                state = self.state[p]
                if "momentum_buffer" in state:
                    direction = state["momentum_buffer"].mul_(group["momentum"]).add_(direction)
                state["momentum_buffer"] = direction
                p.sub_(group["lr"] * direction)
        return loss


_STEP_OF_SGD: Callable[..., Any] = inspect.unwrap(torch.optim.SGD.step)


class _SGD(torch.optim.SGD):
    """torch's SGD, whose step asks nothing of Dynamo.

    The decorator of torch's step imports `torch._dynamo`, to break the graph where a step is
    compiled (torch/optim/optimizer.py), which takes a second. The step itself is torch's own.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do as torch's SGD does."""
        return _STEP_OF_SGD(self, closure)


def _made_optimizer(
    make: MakeOptimizer, parameters: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Return the optimizer of a factory; SGD, which every verification needs, without Dynamo."""
    made = make(parameters)
    return _SGD(parameters, **made.defaults) if type(made) is torch.optim.SGD else made


_Factory = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, _Factory] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "muon": lambda p: torch.optim.Muon(p, lr=0.01),
    "sparseadam": lambda p: torch.optim.SparseAdam(p, lr=0.01),
    "normalized": lambda p: NormalizedSGD(p),
}
TAKES_SPARSE = frozenset({"normalized", "sgd", "nesterov", "adagrad", "lbfgs", "sparseadam"})
"""Names of the optimizers that support sparse gradients. SGD does, but not with weight decay."""
_ONLY_SPARSE = "sparse gradients alone: those of the weights of torch.nn.Embedding(sparse=True)"
NEEDS_CLOSURE = frozenset({"lbfgs"})
"""Names of the optimizers whose step must be given a closure."""
NEEDS = {"muon": "parameters with two dimensions alone: no bias", "sparseadam": _ONLY_SPARSE}
"""What some optimizers train, which the random models are not made of."""
FOR_ANY_LOOP = tuple(name for name in OPTIMIZERS if name not in NEEDS and name not in NEEDS_CLOSURE)
"""Names of the optimizers that train any model, in any loop."""


def checked_optimizer(name: str) -> str:
    """Return the name; raises `UsageError` if no optimizer has it."""
    if name not in OPTIMIZERS:
        raise UsageError(f"optimizer must be one of {', '.join(OPTIMIZERS)}; got {name!r}")
    return name


def in_groups(optimizer: torch.optim.Optimizer, groups: int) -> torch.optim.Optimizer:
    """Deal the parameters out to so many groups, in turn.

    Each group has a learning rate of its own.
    """
    # LBFGS has one direction for all parameters, and refuses several groups
    if isinstance(optimizer, torch.optim.LBFGS):
        return optimizer
    (group,) = optimizer.param_groups
    dealt = [group["params"][g::groups] for g in range(groups)]
    optimizer.param_groups = [
        {**group, "params": parameters, "lr": group["lr"] / (1 + g)}
        for g, parameters in enumerate(dealt)
        if parameters
    ]
    return optimizer


def _expect_trainable(name: str, model: torch.nn.Module) -> None:
    """Raise `UsageError` where an optimizer cannot train some parameter of a model."""
    if name not in NEEDS:
        return
    sparse = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, sparse) and m.sparse}
    fits = {
        "muon": lambda p: p.ndim == 2 and id(p) not in embeddings,
        "sparseadam": lambda p: id(p) in embeddings,
    }
    for parameter, p in model.named_parameters():
        if p.requires_grad and not fits[name](p):
            raise UsageError(
                f"optimizer {name} trains {NEEDS[name]}; the model's {parameter} of shape"
                f" {tuple(p.shape)} is none of them: choose another optimizer, or a --problem that"
                " it can train"
            )


def optimizer_of(
    name: str | None, model: torch.nn.Module, groups: int = 1
) -> torch.optim.Optimizer:
    """Return the named optimizer over a model's trainable parameters, or `NoOpOptimizer` for None."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise UsageError(
            "the model has no parameter with requires_grad=True: there is no gradient to check"
        )
    if name is None:
        return in_groups(NoOpOptimizer(parameters), groups)
    _expect_trainable(checked_optimizer(name), model)
    return in_groups(_made_optimizer(OPTIMIZERS[name], parameters), groups)


# Stand-alone scripts copy the functions from here on, which therefore need torch alone. A step that
# is computed again by the same code on the same values has the same bits. Compiled code may round
# otherwise: see `rounding`.


MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
ParameterValues = Mapping[str, torch.Tensor]
ROUNDINGS = 32
"""Rounded operations by which an optimizer computes one element; Adam with weight decay has fewer than 20."""
NUDGE = 2.0**-20
"""Relative change of an input by which `rounding` measures, in float64, how the result depends on this input."""


@dataclass(frozen=True)
class ParameterFault:
    """A parameter or its optimizer state that changed otherwise than by the optimizer's steps.

    Attributes:
        diagnosis: the name of the fault.
        parameter: name of the parameter.
        sentence: what was observed.
        error: largest |observed - expected| of an element, NaN where one of them is NaN; None for a
            fault of the state.
        allowed: the largest error that rounding explains; 0 where the same code computes the same
            step.
    """

    diagnosis: str
    parameter: str
    sentence: str
    error: float | None = None
    allowed: float = 0.0


SCHEDULED = {"lr": "initial_lr", "momentum": "base_momentum", "betas": "base_momentum"}
"""Settings that a scheduler changes, and what torch's schedulers leave in the group as they do."""


def _settings_by_parameter(observation: Observation) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for group, names in zip(observation.settings, observation.groups, strict=True):
        found |= dict.fromkeys(names, group)
    return found


def _changed_settings(
    previous: Observation, observation: Observation, *, scheduled: bool
) -> ParameterFault | None:
    """Return the fault of settings that something other than a scheduler changed since the previous
    step, or None.
    """
    before = _settings_by_parameter(previous)
    now = _settings_by_parameter(observation)
    when = "between two steps" if previous.evaluations else "before the first step"
    for name, own in before.items():
        found = now.get(name, own)
        # a scheduler leaves its mark in the group (`initial_lr`), except for ReduceLROnPlateau;
        # torch's compiler sets `capturable` (torch/_dynamo/variables/optimizer.py), which changes
        # no value
        free = {key for key, mark in SCHEDULED.items() if scheduled or mark in found} | {
            "capturable"
        }
        for key in sorted(map(str, own.keys() - free - {"initial_lr"})):
            if key not in found or not same_tree(own[key], found[key]):
                sentence = (
                    f"the optimizer's {key} of {name} was {own[key]!r}, and is {found.get(key)!r}"
                    f" {when}"
                )
                return ParameterFault("changed-settings", name, sentence)
    return None


def fault_between(
    previous: Observation,
    found: ParameterValues,
    start: ParameterValues,
    state: Mapping[str, Any] | None = None,
) -> ParameterFault | None:
    """Return how parameters or state differ from those that the previous step left, or None.

    Args:
        previous: the previous step.
        found: the parameters before the next step, or after the run.
        start: the parameters before the run.
        state: the optimizer's state before the next step; None after the run.
    """
    when = "after the last step" if state is None else "between two steps"
    if not previous.evaluations:
        when = "before the first step"
    for name, value in found.items():
        left = previous.after[name]
        if is_same_tensor(left, value):
            continue
        sentence = f"something other than the optimizer's steps changed {name} {when}"
        undone = previous.evaluations and is_same_tensor(
            previous.evaluations[0].parameters[name], value
        )
        if undone:
            sentence += ": it has the value from before the step again"
        elif is_same_tensor(start[name], value):
            sentence += ": it has its initial value again"
        return ParameterFault(
            "parameter-drift",
            name,
            sentence,
            largest_error(value, left),
        )
    for name, kept in ({} if state is None else previous.state_after).items():
        assert state is not None
        # keys of a state may be of any type, and are sorted as texts
        if lost := sorted(map(str, kept.keys() - state.get(name, {}).keys())):
            sentence = f"the optimizer's state of {name} was lost {when}: {', '.join(lost)}"
            return ParameterFault("optimizer-state-changed", name, sentence)
        if changed := sorted(
            str(key) for key, value in kept.items() if not same_tree(value, state[name][key])
        ):
            names = ", ".join(changed)
            sentence = (
                f"something other than the optimizer's steps changed the state of {name} {when}:"
                f" {names}"
            )
            return ParameterFault("optimizer-state-changed", name, sentence)
    return None


def fault_before(
    previous: Observation,
    observation: Observation,
    start: ParameterValues,
    *,
    settings: bool = True,
    scheduled: bool = False,
) -> ParameterFault | None:
    """Return what keeps a step from continuing where the previous one ended, or None.

    Args:
        previous: the previous step.
        observation: the step.
        start: the parameters before the run.
        settings: whether the optimizer's settings are judged.
        scheduled: whether a scheduler of torch has stepped.
    """
    # what was changed before the step comes first: after it, the step itself looks wrong
    if fault := fault_between(
        previous, observation.evaluations[0].parameters, start, observation.state
    ):
        return fault
    if settings and (fault := _changed_settings(previous, observation, scheduled=scheduled)):
        return fault
    held = set(chain.from_iterable(observation.groups))
    for name in observation.gradients:
        if name not in held:
            sentence = (
                f"{name} is in no parameter group of the optimizer, which neither changes it nor"
                " resets it"
            )
            return ParameterFault("parameter-not-updated", name, sentence)
    return None


def fault_of_step(
    make_optimizer: MakeOptimizer | None, previous: Observation, observation: Observation
) -> ParameterFault | None:
    """Return how a step changed parameters otherwise than the optimizer does on its gradients, or
    None.

    Args:
        make_optimizer: parameters -> the optimizer; None for one whose step changes nothing.
        previous: the previous step, whose state this one continues.
        observation: the step.
    """
    # what a step left was computed from the updates, as in JAX, and so cannot contradict them
    if observation.is_computed:
        return None
    before = observation.evaluations[0].parameters
    after = observation.after
    expected = before
    who = "the optimizer of this case"
    if make_optimizer is not None:
        expected = {**before, **stepped(make_optimizer, observation, previous.state_after)}
        who = "the same optimizer, computed again,"
    differing = [name for name, value in after.items() if not is_same_tensor(expected[name], value)]
    if not differing:
        return None
    allowed = dict.fromkeys(differing, 0.0)
    # the same code on the same values has the same bits: only a step that was not repeatable, such
    # as a compiled one, is allowed rounding
    if make_optimizer is not None and not observation.repeatable:
        allowed = rounding(make_optimizer, observation, previous.state_after)
    for name in differing:
        error = largest_error(after[name], expected[name])
        if error <= allowed[name]:
            continue
        if is_same_tensor(before[name], after[name]):
            sentence = f"the step left {name} as it was, and {who} changes it on the same gradients"
            return ParameterFault(
                "parameter-not-updated",
                name,
                sentence,
                error,
                allowed[name],
            )
        sentence = (
            f"the step changed {name} otherwise than {who} does on the same gradients, settings and"
            " state"
        )
        return ParameterFault(
            "wrong-update",
            name,
            sentence,
            error,
            allowed[name],
        )
    return None


def stepped(
    make_optimizer: MakeOptimizer, observation: Observation, state: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the trainable parameters after the step, computed again: gradients, settings and state
    as observed.
    """
    first = observation.evaluations[0].parameters
    parameters = {name: torch.nn.Parameter(first[name].clone()) for name in observation.gradients}
    optimizer = _made_optimizer(make_optimizer, list(parameters.values()))
    optimizer.param_groups = [
        {**copied_tensors(settings), "params": [parameters[name] for name in names]}
        for settings, names in zip(observation.settings, observation.groups, strict=True)
    ]
    for group in optimizer.param_groups:
        # torch's compiler sets it, and uncompiled steps on a CPU refuse it
        if group.get("capturable") and all(p.is_cpu for p in group["params"]):
            group["capturable"] = False
    optimizer.state = defaultdict(
        dict, {parameters[name]: copied_tensors(kept) for name, kept in state.items()}
    )
    evaluations = iter(observation.evaluations)

    def closure() -> Any:
        # an optimizer that evaluates more often than it did finds the last gradients again
        evaluation = next(evaluations, observation.evaluations[-1])
        for name, p in parameters.items():
            # a sparse gradient is handed on as one: optimizers such as SparseAdam skip rows without
            # an entry
            seen = evaluation.sparse.get(name, evaluation.gradients[name])
            p.grad = None if seen is None else seen.clone()
        return evaluation.loss

    step = type(optimizer).step
    # without hooks: a loop may have registered global ones
    getattr(step, "__wrapped__", step)(optimizer, closure)
    return {name: p.detach() for name, p in parameters.items()}


def rounding(
    make_optimizer: MakeOptimizer, observation: Observation, state: Mapping[str, Any]
) -> dict[str, float]:
    """Return by how much two computations of one step may differ in each parameter, if they round
    in other orders.

    Each rounded operation changes an intermediate value by at most one unit roundoff u of its size.
    To first order, the result changes by no more than if an input (parameters, gradients, an entry
    of the state, a setting) changed by u of its size. So the step is computed in float64 with each
    input changed in turn. The bound is `ROUNDINGS` times the sum of these changes, and one rounding
    of each result (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). u is that
    of the coarsest tensor: the step count of torch's Adam is float32, and a compiled Adam computes
    its bias correction in this dtype, whatever that of the parameters.
    """
    exact = _parameters_in_float64(make_optimizer, observation, state, "")
    inputs = _inputs_of_step(observation, state)
    changed = [_parameters_in_float64(make_optimizer, observation, state, what) for what in inputs]
    after = chain.from_iterable(kept.values() for kept in observation.state_after.values())
    coarse = [value.dtype for value in after if isinstance(value, torch.Tensor)]
    allowed = {}
    for name, value in exact.items():
        own = observation.after[name].dtype
        u = max(torch.finfo(dtype).eps / 2 for dtype in (own, *coarse) if dtype.is_floating_point)
        terms = [(other[name] - value).abs() / NUDGE for other in changed]
        bound = ROUNDINGS * u * torch.stack(terms).sum(0) + torch.finfo(own).eps * value.abs()
        allowed[name] = float(bound.max()) if bound.numel() else 0.0
    return allowed


def _inputs_of_step(observation: Observation, state: Mapping[str, Any]) -> list[str]:
    """Return what a step reads, in the words that `_wide` takes."""
    # the number of the step is whole, and has no rounding
    entries = set(chain.from_iterable(state.values())) - {"step"}
    settings = chain.from_iterable(group.items() for group in observation.settings)
    inputs = ["parameters", "gradients", *sorted(f"state {key}" for key in entries)]
    for key in sorted({key for key, value in settings if _is_real(value)}):
        # a pair, as Adam's betas, has two parts
        inputs += [f"setting {key} 0", f"setting {key} 1"]
    return inputs


def _is_real(value: Any) -> bool:
    return isinstance(value, float) or (
        isinstance(value, tuple) and any(isinstance(part, float) for part in value)
    )


def _parameters_in_float64(
    make_optimizer: MakeOptimizer, observation: Observation, state: Mapping[str, Any], larger: str
) -> dict[str, torch.Tensor]:
    """Return the parameters after the step, computed in float64, with one input larger by `NUDGE`
    of its size.
    """

    def scaled(value: Any, what: str) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value = value.to(torch.float64)
            return value * (1 + NUDGE) if what == larger else value
        return value

    def setting(value: Any, key: str) -> Any:
        parts = value if isinstance(value, tuple) else (value,)
        new = [
            (
                part * (1 + NUDGE)
                if isinstance(part, float) and larger == f"setting {key} {i}"
                else part
            )
            for i, part in enumerate(parts)
        ]
        return tuple(new) if isinstance(value, tuple) else new[0]

    evaluations = tuple(
        replace(
            e,
            gradients={name: scaled(g, "gradients") for name, g in e.gradients.items()},
            parameters={name: scaled(p, "parameters") for name, p in e.parameters.items()},
            sparse={name: scaled(g, "gradients") for name, g in e.sparse.items()},
        )
        for e in observation.evaluations
    )
    groups = [
        {key: setting(value, key) for key, value in group.items()} for group in observation.settings
    ]
    kept = {
        name: {key: scaled(v, f"state {key}") for key, v in entries.items()}
        for name, entries in state.items()
    }
    return stepped(
        make_optimizer, replace(observation, evaluations=evaluations, settings=groups), kept
    )


def largest_error(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest |observed - expected|; NaN where an element of either is."""
    if observed.shape != expected.shape or not expected.numel():
        return 0.0 if observed.shape == expected.shape else float("inf")
    # complex parameters stay complex
    wide = torch.promote_types(torch.float64, expected.dtype)
    difference = observed.detach().to("cpu", wide) - expected.to("cpu", wide)
    return float(difference.abs().max())
