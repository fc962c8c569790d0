"""The step of every torch optimizer is that of its counterpart in optax, within a bound derived
through the step.
"""

from __future__ import annotations

import inspect
from dataclasses import replace

import hypothesis
import numpy as np
import optax
import optax.contrib
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from studies.optimizer_steps import draw_steps, in_optax
from studies.optimizers import COUNTERPARTS, Counterpart, framed

DTYPES = (torch.float64, torch.float32)
BY_DEFAULT = ("sgd",)
"""The optimizers that the default tests compile; the others take seconds each."""
NAMES = [
    pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.full)
    for name in COUNTERPARTS
]
EXAMPLES = hypothesis.settings(max_examples=max(2, hypothesis.settings().max_examples // 25))


def assert_follows(
    *, counterpart: Counterpart, settings, dtype, implementation, seed, scale
) -> None:
    """Fail unless every parameter after every step is within the bound of optax's."""
    __tracebackhide__ = True
    steps = draw_steps(
        counterpart, settings, dtype=dtype, implementation=implementation, seed=seed, scale=scale
    )
    found = in_optax(counterpart, steps, dtype, implementation)
    ratio = found.ratio(steps.parameters)
    event(f"{counterpart.name}, undecided elements: {bool(found.undecided.any())}")
    assert ratio <= 1, (
        f"{counterpart.torch}({settings}), {implementation}, {dtype}, seed {seed}, scale {scale:g}: error {ratio:.3g} "
        "of what is allowed"
    )


@pytest.mark.parametrize("name", NAMES)
@EXAMPLES
@given(seed=st.integers(0, 2**31), exponent=st.integers(-9, 3))
def test_every_implementation_takes_the_steps_of_optax(name, seed, exponent):
    counterpart = COUNTERPARTS[name]
    for settings in counterpart.variants:
        for dtype in DTYPES:
            for implementation in counterpart.implementations:
                assert_follows(
                    counterpart=counterpart,
                    settings=settings,
                    dtype=dtype,
                    implementation=implementation,
                    seed=seed,
                    scale=10.0**exponent,
                )


def test_every_optimizer_of_torch_has_a_counterpart():
    classes = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
    }
    assert {counterpart.torch for counterpart in COUNTERPARTS.values()} == classes
    for counterpart in COUNTERPARTS.values():
        assert counterpart.differs, counterpart.name
        assert "; optax/" in counterpart.source, counterpart.name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bound_is_tight_from_both_sides(name, dtype):
    counterpart = COUNTERPARTS[name]
    steps = draw_steps(counterpart, counterpart.variants[0], dtype=dtype)
    found = in_optax(counterpart, steps, dtype)
    assert not found.undecided.any()
    assert np.isfinite(found.allowed).all()
    assert found.ratio(steps.parameters) <= 1
    for sign in (-1, 1):
        assert found.ratio(found.parameters + 0.8 * sign * found.allowed) <= 1
        for place in np.ndindex(found.allowed.shape):
            moved = found.parameters.copy()
            moved[place] += 1.2 * sign * found.allowed[place]
            assert found.ratio(moved) > 1
    # a few roundings of the parameters, however far the step amplifies those of the gradient; Muon
    # computes in bfloat16
    unit = 2.0**-9 if name == "muon" else torch.finfo(dtype).eps / 2
    assert found.allowed.max() <= 2000 * unit * np.abs(found.parameters).max()
    lost = steps.parameters.copy()
    lost[-1, -1] = np.nan
    assert found.ratio(lost) == np.inf


FAULTS = {
    "sgd, dampening from the first step": ("sgd", {"momentum": 0.8, "dampening": 0.3},
        lambda *, lr, momentum, dampening, **_: optax.chain(optax.scale(1 - dampening), optax.sgd(lr, momentum))),
    "sgd, Nesterov missing": ("sgd", {"momentum": 0.9, "nesterov": True},
        lambda *, lr, momentum, nesterov: optax.sgd(lr, momentum)),
    "sgd, decay decoupled": ("sgd", {"momentum": 0.9, "weight_decay": 0.1},
        lambda *, lr, momentum, weight_decay:
            framed(optax.trace(momentum), lr, weight_decay=weight_decay, decoupled=1.0)),
    "sgd, maximize ignored": ("sgd", {"maximize": True}, lambda *, lr: optax.sgd(lr)),
    "asgd, a constant rate": ("asgd", {"lambd": 0.1},
        lambda *, lr, lambd: optax.chain(optax.add_decayed_weights(lambd), optax.sgd(lr))),
    "rprop, the update of the step before": ("rprop", {},
        lambda *, lr, etas, step_sizes:
            optax.rprop(lr, *etas, min_step_size=step_sizes[0], max_step_size=step_sizes[1])),
    "adagrad, epsilon inside the root": ("adagrad", {"eps": 1e-2},
        lambda *, lr, initial_accumulator_value, eps: optax.adagrad(lr, initial_accumulator_value, eps)),
    "adagrad, the accumulator of optax": ("adagrad", {}, lambda *, lr, eps: optax.adagrad(lr, eps=eps)),
    "rmsprop, epsilon inside the root": ("rmsprop", {}, lambda *, lr, alpha, eps: optax.rmsprop(lr, alpha, eps)),
    "rmsprop, centered ignored": ("rmsprop", {"centered": True},
        lambda *, lr, alpha, eps, centered: optax.rmsprop(lr, alpha, eps, eps_in_sqrt=False)),
    "adadelta, the rate inside the average": ("adadelta", {"lr": 0.5},
        lambda *, lr, rho, eps: optax.chain(optax.scale(-lr), optax.scale_by_adadelta(rho, eps))),
    "adam, epsilon inside the root": ("adam", {"eps": 1e-3},
        lambda *, lr, betas, eps, amsgrad: optax.adam(lr, *betas, eps=0.0, eps_root=eps)),
    "adam, no bias correction": ("adam", {},
        lambda *, lr, betas, eps, amsgrad:
            optax.chain(optax.scale_by_amsgrad(*betas, eps=eps, bias_correction_mu=False), optax.scale(-lr))),
    "adam, decay decoupled": ("adam", {"weight_decay": 0.1},
        lambda *, lr, betas, eps, weight_decay, amsgrad: optax.adamw(lr, *betas, eps, weight_decay=weight_decay)),
    "adam, the amsgrad of optax": ("adam", {"amsgrad": True, "betas": (0.8, 0.6)},
        lambda *, lr, betas, eps, amsgrad: optax.amsgrad(lr, *betas, eps)),
    "adamw, decay coupled": ("adamw", {},
        lambda *, lr, betas, eps, weight_decay, amsgrad:
            framed(optax.scale_by_adam(*betas, eps), lr, weight_decay=weight_decay)),
    "adamax, no bias correction": ("adamax", {},
        lambda *, lr, betas, eps:
            optax.chain(optax.scale_by_adamax(*betas, eps),
                        optax.scale_by_schedule(lambda t: 1 - betas[0] ** (t + 1.0)), optax.scale(-lr))),
    "nadam, the momentum of optax": ("nadam", {}, lambda *, lr, betas, eps: optax.nadam(lr, *betas, eps)),
    "radam, epsilon after the bias correction": ("radam", {"betas": (0.8, 0.95), "eps": 1e-2},
        lambda *, lr, betas, eps: optax.radam(lr, *betas, eps)),
    "sparseadam, every row": ("sparseadam", {}, lambda *, lr, betas, eps: optax.adam(lr, *betas, eps)),
    "adafactor, decay without the rate": ("adafactor", {"weight_decay": 0.1},
        lambda *, lr, weight_decay: optax.adafactor(lr, min_dim_size_to_factor=1, weight_decay_rate=weight_decay)),
    "adafactor, a rate above 1 / sqrt(t)": ("adafactor", {"lr": 0.8},
        lambda *, lr: optax.adafactor(lr, min_dim_size_to_factor=1)),
    "muon, decay missing": ("muon", {"weight_decay": 10.0},
        lambda *, lr, momentum, nesterov: optax.contrib.muon(lr, beta=momentum, nesterov=nesterov)),
    "muon, epsilon added to the norm": ("muon", {"eps": 4.0, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
        lambda *, lr, eps: optax.contrib.muon(lr, beta=0.0, nesterov=False, eps=eps)),
    "lbfgs, the first step of optax": ("lbfgs", {"max_iter": 1, "lr": 0.5, "history_size": 3},
        lambda *, lr, history_size: optax.lbfgs(lr, memory_size=history_size, linesearch=None)),
}  # fmt: skip
"""What is wrong -> the optimizer, settings of torch's, and a transformation with the fault."""


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
def test_adafactor_factors_the_last_two_dimensions(dtype):
    counterpart = COUNTERPARTS["adafactor"]
    for implementation in counterpart.implementations:
        steps = draw_steps(
            counterpart,
            {},
            dtype=dtype,
            implementation=implementation,
            shapes=((2, 3, 2), (1, 3), (2, 2, 2, 1)),
        )
        assert in_optax(counterpart, steps, dtype, implementation).ratio(steps.parameters) <= 1


def _by(make, steps):
    """Return the parameters after each step of an optax transformation, flattened."""
    reads = inspect.signature(make).parameters
    optimizer = make(**{name: value for name, value in steps.settings.items() if name in reads})
    parameters, after = list(steps.start), []
    state = optimizer.init(parameters)
    for gradients in steps.gradients:
        updates, state = optimizer.update(gradients, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        after.append(np.concatenate([np.ravel(p) for p in parameters]))
    return np.stack(after)


@pytest.mark.parametrize(
    "what",
    [pytest.param(w, marks=() if w.startswith(BY_DEFAULT) else pytest.mark.full) for w in FAULTS],
)
def test_a_wrong_formula_is_found(what):
    name, settings, make = FAULTS[what]
    counterpart = COUNTERPARTS[name]
    for dtype in DTYPES:
        steps = draw_steps(counterpart, settings, dtype=dtype)
        found = in_optax(counterpart, steps, dtype)
        assert found.ratio(steps.parameters) <= 1
        assert replace(found, parameters=_by(make, steps)).ratio(steps.parameters) > 1, dtype


# what torch and optax surprise with


def _steps_of(optimizer, p, gradients):
    """Return how far each step moves a parameter of one element."""
    moved = []
    for g in gradients:
        before = p.item()
        p.grad = torch.full_like(p, g)
        optimizer.step()
        moved.append(p.item() - before)
    return moved


def test_optax_rprop_is_one_step_behind():
    p = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    by_torch = _steps_of(torch.optim.Rprop([p], lr=0.125, etas=(0.5, 2.0)), p, (1, 1, 1))
    assert by_torch == [-0.125, -0.25, -0.5]
    rprop = optax.rprop(0.125, eta_minus=0.5, eta_plus=2.0)
    state, by_optax = rprop.init(np.ones(1)), []
    for _ in range(3):
        update, state = rprop.update(np.ones(1), state)
        by_optax.append(float(update[0]))
    assert by_optax == [0, -0.125, -0.25]


@pytest.mark.parametrize(("name", "entry"), [("NAdam", "mu_product"), ("ASGD", "eta")])
def test_torch_keeps_a_scalar_of_float64_parameters_in_float32(name, entry):
    # unless the default dtype is float64; torch's `_get_scalar_dtype`
    p = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = getattr(torch.optim, name)([p], lr=0.1)
    _steps_of(optimizer, p, (1,))
    assert optimizer.state[p][entry].dtype == torch.float32


def test_foreach_of_asgd_rounds_the_rate_of_float64_parameters_otherwise_than_single():
    after = []
    for foreach in (False, True):
        p = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
        _steps_of(torch.optim.ASGD([p], lr=0.1, lambd=0.05, foreach=foreach), p, (1, 1, 1, 1))
        after.append(p.item())
    assert 2.0**-40 < abs(after[0] - after[1]) < 2.0**-23


def test_the_epsilon_of_adafactor_is_that_of_the_first_parameter():
    # _adafactor.py assigns eps1 once for all parameters, where it is None
    def moved(dtypes):
        parameters = [torch.nn.Parameter(torch.ones(2, 2, dtype=dtype)) for dtype in dtypes]
        optimizer = torch.optim.Adafactor(parameters, lr=0.5, foreach=False)
        for p in parameters:
            p.grad = torch.full_like(p, 1e-9)
        optimizer.step()
        return {p.dtype: 1 - p.detach()[0, 0].item() for p in parameters}

    alone = moved([torch.float64])[torch.float64]
    assert alone == pytest.approx(0.5)
    assert moved([torch.float64, torch.float32])[torch.float64] == alone
    assert moved([torch.float32, torch.float64])[torch.float64] < 0.1 * alone


def test_a_step_of_muon_is_not_continuous():
    """Orthogonalization in bfloat16 turns a change by 2**-22 of a float64 gradient into one by more
    than 2**-10.
    """

    def after(gradient):
        p = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))
        p.grad = gradient
        torch.optim.Muon([p], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
        return p.detach()

    halfway = torch.tensor([[1.0 + 2.0**-8, 0.5], [0.25, 1.0]], dtype=torch.float64)
    nearby = halfway.clone()
    nearby[0, 0] += 2.0**-22
    assert (after(halfway) - after(nearby)).abs().max() > 2.0**-10


def test_the_decay_of_adafactors_moments_is_float32_in_optax():
    factors = optax.scale_by_factored_rms(factored=False, epsilon=0.0)
    p = np.ones(1)
    state = factors.init(p)
    for g in (1.0, 2.0):
        _, state = factors.update(np.full(1, g), state, p)
    kept = 1 - 2.0**-0.8
    error = abs(float(state.v[0]) - (kept * 1 + (1 - kept) * 4))
    assert 2.0**-40 < error < 2.0**-22
