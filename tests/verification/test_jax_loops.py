"""A loop of JAX is held to the promise of a torch loop: sound ones hold, planted faults are found
and named.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from gradcheck_suite import (
    Case,
    Input,
    Layer,
    Loss,
    Plan,
    Problem,
    ProblemSpec,
    UsageError,
    check,
    jax_training_loop,
)
from gradcheck_suite.core.case import probe_case
from gradcheck_suite.core.faults import FAULTS
from gradcheck_suite.loops.jax_modes import JAX_MODES
from gradcheck_suite.loops.trainers.adapters.optax_loops import train_with_multi_steps
from gradcheck_suite.run.instance import generated_instance
from gradcheck_suite.run.jax_run import ObservedState, run_jax_loop
from gradcheck_suite.script import script_text
from gradcheck_suite.verification.verify import verify
from studies.zoo import BUGS
from tests.script.alone import run_alone
from tests.verification.jax_loops import SOUND, train_state, whole_window, windows

REGRESSION = ProblemSpec(
    Input("vector", size=3),
    (Layer("linear", bias=True, features=2), Layer("tanh")),
    Loss("mse", reduction="mean"),
)
IGNORING = ProblemSpec(
    Input("vector", size=3),
    (Layer("linear", features=3, bias=True),),
    Loss(
        "cross_entropy",
        ignore_index=True,
        label_smoothing=0.0,
        class_weights=False,
        reduction="mean",
    ),
)
CASES = (
    Case(REGRESSION, Plan((1, 3, 3, 1, 3), 2, 2), dtype="float32", seed=1),
    Case(IGNORING, Plan((3, 2, 2), 3, masked=(1,)), dtype="float32", seed=1),
    Case(REGRESSION, Plan((2, 2, 2), 2, 2), dtype="float32", seed=2, optimizer="normalized"),
    probe_case(Plan((1, 3, 2), 2, 2), "sum"),
)


@jax_training_loop
def multi_steps(run):
    train_with_multi_steps(run)


def observed(loop, plan, dtype="float64"):
    """Return the gradients of the steps of a loop on a weight probe, (steps, items)."""
    (outcome,) = run_jax_loop(
        loop, generated_instance(probe_case(plan, dtype=dtype)), time_limit_s=None
    )
    assert outcome.raised is None
    return np.array([seen.gradients["0.weight"].numpy() for seen in outcome.observations])


@pytest.mark.parametrize(
    "loop",
    # a compiled loop takes seconds: without `--full` the first one runs
    [
        pytest.param(loop, id=loop.__name__, marks=[pytest.mark.full] * (place > 0))
        for place, loop in enumerate([*SOUND, *JAX_MODES.values()])
    ],
)
def test_a_sound_loop_holds(loop):
    for case in CASES:
        verdict = check(loop, case)
        assert verdict.holds, verdict.violation and verdict.violation.explanation
        assert not verdict.skipped


@pytest.mark.full
def test_a_model_with_buffers_is_trained_in_bfloat16():
    image = Input("image", channels=2, height=4, width=5)
    options = {
        "bias": False,
        "dilation": 1,
        "features": 2,
        "groups": 1,
        "kernel": 1,
        "padding": 0,
        "stride": 1,
    }
    layers = Layer("batch_norm2d", affine=False), Layer("conv2d", **options)
    case = Case(
        ProblemSpec(image, layers, Loss("mse", reduction="mean")), Plan((1, 2), 2), dtype="bfloat16"
    )
    verdict = check(JAX_MODES["jax_where"], case)
    assert verdict.holds, verdict.violation and verdict.violation.explanation


@pytest.mark.full
def test_multi_steps_averages_means_and_its_weights_say_so():
    result = verify(multi_steps, examples=1)
    assert (result.violation.diagnosis, result.cases) == ("mean-of-means", 0)
    assert [(w.count, w.observed) for w in result.violation.weights] == [
        (2, 1 / 4),
        (6, pytest.approx(1 / 12)),
    ]


@pytest.mark.full
def test_multi_steps_holds_with_what_it_assumes_and_says_what_is_not_judged():
    result = verify(multi_steps, examples=2, assumes=("equal-micro-batches", "whole-windows"))
    assert result.holds
    assert any(
        "resets its accumulator by multiplying it by 0" in reason for reason in result.skipped
    )


@pytest.mark.full
def test_multi_steps_accumulates_in_float32_which_a_run_in_float64_shows():
    case = CASES[2].replace(optimizer=None, plan=Plan((2, 2), 2))
    assert check(multi_steps, case).holds
    violation = check(multi_steps, case.replace(dtype="float64")).violation
    assert violation.kind == "gradient"
    assert 1e-12 < violation.error < 1e-6

    @jax_training_loop
    def wide(run):
        train_with_multi_steps(run, accumulator_dtype=run.dtype)

    assert check(wide, case.replace(dtype="float64")).holds


# The observation: which calls of `update` are steps.


def test_results_that_multi_steps_throws_away_are_no_steps():
    seen = observed(multi_steps, Plan((1, 1, 1, 1, 1), 2))
    assert seen.tolist() == [[0.5, 0.5, 0, 0, 0], [0, 0, 0.5, 0.5, 0]]


def test_the_last_call_counts_where_no_state_leaves_the_compiled_function():
    @jax_training_loop
    def all_at_once(run):
        stacked = jax.tree.map(lambda *a: jnp.stack(a), *run.batches)

        @jax.jit
        def train(params, stacked):
            def body(state, batch):
                _, state = run.optimizer.update(jax.grad(run.loss)(params, batch), state, params)
                return state, None

            jax.lax.scan(body, run.optimizer.init(params), stacked)
            return params

        train(run.params, stacked)

    assert observed(all_at_once, Plan((1, 1, 1), 1)).tolist() == np.eye(3).tolist()


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ("0ps 1p 2ps", "optimizer-state-changed"),  # the second state is lost
        pytest.param("0p 1p 2p", "optimizer-state-changed", marks=pytest.mark.full),
        # compiled by a call, and the last window has no step
        ("0 0ps 1ps", "the optimizer was called 2 times"),
        ("0p 0ps 1ps 2ps", "parameter-drift"),  # an update is applied twice
    ],
)
def test_a_call_whose_result_is_used_is_a_step(calls, said):
    @jax_training_loop
    def loop(run):
        """Call the step for windows.

        Go on with the parameters (p) and the state (s) that it returns.
        """
        step = jax.jit(lambda p, s, b: run.optimizer.update(jax.grad(run.loss)(p, b), s, p))
        params, state = run.params, run.optimizer.init(run.params)
        for window, *kept in calls.split():
            updates, made = step(params, state, [*run.batches][int(window)])
            params = optax.apply_updates(params, updates) if "p" in kept else params
            state = made if "s" in kept else state

    violation = check(loop, CASES[2].replace(plan=Plan((1, 2, 3), 1))).violation
    assert said in f"{violation.diagnosis}: {violation.explanation}"


# Both sides of what is allowed.


def unchanged(tree):
    return tree


def of_windows(*, gradients=unchanged, parameters=unchanged):
    """Return a loop of whole windows that changes gradients before each update, and parameters
    after it.
    """

    @jax_training_loop
    def loop(run):
        params, state = run.params, run.optimizer.init(run.params)
        for _ in range(run.epochs):
            for window in windows(run):
                gradient = jax.grad(run.loss)(
                    params, jax.tree.map(lambda *a: jnp.concatenate(a), *window)
                )
                updates, state = run.optimizer.update(gradients(gradient), state, params)
                params = parameters(optax.apply_updates(params, updates))

    return loop


def times(factor):
    return lambda tree: jax.tree.map(lambda a: (a * factor).astype(a.dtype), tree)


@pytest.mark.parametrize(
    ("factor", "holds"),
    [(1 + 2.0**-24, True), pytest.param(1 + 2.0**-12, False, marks=pytest.mark.full)],
)
def test_a_factor_is_allowed_within_one_rounding_and_found_far_above_it(factor, holds):
    assert (
        check(of_windows(gradients=times(factor)), CASES[0].replace(plan=Plan((2, 2), 2))).holds
        == holds
    )


@pytest.mark.parametrize(("off", "holds"), [(1 + 2.0**-24, True), (1 + 2.0**-10, False)])
def test_parameters_may_differ_by_a_rounding_error_and_no_more(off, holds):
    loop = of_windows(parameters=times(off))
    verdict = check(loop, CASES[2].replace(plan=Plan((2, 2, 2, 2), 2)))
    assert verdict.holds == holds
    assert holds or verdict.violation.diagnosis == "parameter-drift"


@pytest.mark.parametrize("optimizer", ["lion", "adadelta"])
def test_any_optimizer_of_optax_trains_a_loop(optimizer):
    """`adadelta` may be called without a learning rate."""
    case = CASES[2].replace(optimizer=optimizer, plan=Plan((2, 2, 2, 2), 2))
    assert check(whole_window, case).holds
    forgetful = BUGS["jax-closed-over-params"].loop
    assert check(forgetful, case).violation.diagnosis in ("stale-parameters", "parameter-drift")


@pytest.mark.full
def test_a_loop_that_reads_a_counter_of_python_is_not_repeatable():
    """It does so for matrices alone, so that no weight probe shows it."""
    calls = itertools.count()

    def edited(gradient):
        return jax.tree.map(lambda g: g * (1 + next(calls) % 7 / 10) if g.ndim > 1 else g, gradient)

    loop = of_windows(gradients=edited)
    assert (
        check(loop, CASES[0].replace(plan=Plan((2, 2), 1))).violation.diagnosis == "not-repeatable"
    )


# Bad input.


@jax_training_loop
def hands_tensors_to_the_loss(run):
    run.loss(run.params, {"x": torch.zeros(1, 1)})


OF_OPTAX = "from a learning rate alone, such as sgd, adam, .*; got '{}'"
UNDECORATED = r"run\.{}, which a loop of JAX is given: decorate it with"
REFUSED = [
    # the loop, the options, and what is said
    *(
        (train_state, {"optimizer": name}, OF_OPTAX.format(name))
        for name in ("lions", "chain", "apply_updates", "losses")
    ),
    (lambda run: run.params, {}, UNDECORATED.format("params")),
    (lambda run: run.optimizer.init({}), {}, UNDECORATED.format(r"optimizer\.init")),
    (
        jax_training_loop(lambda run: list(run.loader)),
        {},
        r"run\.loader, which a loop of torch is given",
    ),
    (
        hands_tensors_to_the_loss,
        {},
        r"run.loss takes JAX arrays and got a torch.Tensor at \[1\]\['x'\]",
    ),
    (train_state, {"ranks": 2}, "one process: drop --ranks"),
]


@pytest.mark.parametrize(("loop", "options", "said"), REFUSED)
def test_what_a_loop_of_jax_cannot_do_is_one_clear_line(loop, options, said):
    with pytest.raises(UsageError, match=said):
        verify(loop, examples=1, **options)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (
            lambda update: jax.vmap(update, in_axes=(0, None)),
            "called under jax.vmap, which is not supported",
        ),
        (
            lambda update: jax.pmap(update, in_axes=(0, None)),
            "called under jax.pmap, which is not supported",
        ),
    ],
)
def test_an_update_under_vmap_or_pmap_says_what_is_not_supported(wrap, said):
    @jax_training_loop
    def loop(run):
        state = run.optimizer.init(run.params)
        wrap(run.optimizer.update)(jax.tree.map(lambda p: p[None], run.params), state)

    with pytest.raises(UsageError, match=said):
        check(loop, CASES[3])


def test_an_update_that_gets_another_tree_says_so():
    @jax_training_loop
    def loop(run):
        run.optimizer.update({"w": jnp.zeros(7)}, run.optimizer.init(run.params))

    violation = check(loop, CASES[0]).violation
    assert violation.diagnosis == "changed-model"
    assert violation.explanation == (
        "the loop changed the structure of the parameters: run.optimizer.update was handed a gradient of another tree "
        "than run.params: expected 0.bias (2,), 0.weight (2, 3), received w (7,). Fix: train the model unchanged"
    )


OF_TORCH = re.compile(
    r"(?<!jax)\.grad\b|backward|loader|zero_|no_sync|hook|GradScaler|torch|optimizer\.step"
)
OF_TORCHS = (
    *("not-reduced", "ranks", "wrong-mode", "stolen-buffer", "wrong-backward", "deadlock"),
    *("other-optimizer", "handed-over", "between-passes", "zeros", "scaler", "exception"),
    *("same-data", "written", "casts", "module-hook", "sent-again"),
)
"""Faults, and causes, of loops of torch alone."""


def test_remedies_of_jax_loops_speak_of_jax():
    said = []
    for fault in FAULTS.values():
        remedies = {fault.name: fault.remedy, **fault.causes}
        said += [one.jax or one.torch for what, one in remedies.items() if what not in OF_TORCHS]
    assert not [text for text in said if OF_TORCH.search(text)]


# A user's problem.


def params(seed):
    return {
        "dense": {"kernel": jax.random.normal(jax.random.key(seed), (4, 3))},
        "bias": [jnp.zeros(3)],
    }


def items(n, seed):
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((n, 4)), "y": rng.standard_normal((n, 3))}


def squared(params, batch):
    return jnp.mean(
        (jnp.tanh(batch["x"] @ params["dense"]["kernel"] + params["bias"][0]) - batch["y"]) ** 2
    )


PROBLEM = Problem(params, items, squared)


@pytest.mark.full
def test_a_problem_of_jax_is_trained_and_a_fault_on_it_is_named():
    case = Case("problem", Plan((1, 3), 2), dtype="float32")
    assert check(whole_window, case, problem=PROBLEM).holds
    violation = check(multi_steps, case, problem=PROBLEM).violation
    assert violation.diagnosis in ("mean-of-means", "wrong-windows")  # the loop has both faults
    assert violation.parameter in ("dense.kernel", "bias.0")


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (
            Problem(params, items, lambda p, b: squared(p, b) * random.random()),
            "must be pure, and returned",
        ),
        (
            Problem(params, items, lambda p, b: jnp.float32(float(squared(p, b)))),
            "fails with ConcretizationTypeError",
        ),
        (
            Problem(params, items, lambda p, b: b["y"]),
            r"must return a scalar array, got shape \(3, 3\)",
        ),
        (
            Problem(lambda seed: torch.nn.Linear(1, 1), items, squared),
            "must return a pytree of JAX arrays",
        ),
        (
            Problem(lambda seed: {"n": jnp.arange(3)}, items, squared),
            "must return floating-point arrays, got int",
        ),
    ],
)
def test_a_problem_that_breaks_its_contract_has_one_clear_line(problem, said):
    with pytest.raises(UsageError, match=said):
        verify(whole_window, examples=1, problem=problem)


# What is stored.


@pytest.mark.full
def test_a_script_shows_the_fault_without_the_suite_and_without_torch():
    violation = verify(multi_steps, examples=1).violation
    name = f"{__name__}:multi_steps"
    source = "import optax, jax, gradcheck_suite\n" + "\n".join(_source_of_multi_steps())
    text = script_text(multi_steps, name, violation)
    # a module whose source is imported without the suite
    before, rest = (
        text[: text.index("LOOP = ")],
        text[text.index("\n# What reaches the optimizer\n") :],
    )
    text = f"{before}LOOP = {source!r}\n{rest}"
    ended = run_alone(text, missing=("gradcheck_suite", "torch"))
    assert (ended.status, ended.errors) == (1, "")
    assert "expected 0.125, observed 0.25" in ended.output
    assert ended.output.endswith("the fault is there\n")
    equal = text.replace("MICRO_BATCHES = (2, 6)", "MICRO_BATCHES = (4, 4)")
    assert run_alone(equal, missing=("gradcheck_suite", "torch")).status == 0


def _source_of_multi_steps():
    return [
        "@gradcheck_suite.jax_training_loop",
        "def multi_steps(run):",
        "    tx = optax.MultiSteps(run.optimizer, run.accumulation_steps)",
        "    state = tx.init(run.params)",
        "    for batch in run.batches:",
        "        _, state = tx.update(jax.grad(run.loss)(run.params, batch), state, run.params)",
    ]


@pytest.mark.full
def test_the_fixture_verifies_a_loop_of_jax(verify_training_loop):
    result = verify_training_loop(train_state, examples=1)
    assert (result.cases, result.violation) == (1, None)


# Several devices, in a process of its own: their number is fixed when JAX starts.


DEVICES = """
from gradcheck_suite import check
from gradcheck_suite.core.case import Plan, probe_case
from tests.verification import jax_device_loops as loops
plan = Plan((1, 3, 2, 2), 2)
for name in ("sums_and_counts", "sums_and_counts_inside", "mean_of_devices", "local_counts_inside"):
    violation = check(getattr(loops, name), probe_case(plan, dtype="float32")).violation
    print(name, violation and f"{violation.diagnosis}: {violation.explanation}")
"""


@pytest.mark.full
def test_loops_on_two_devices_are_judged():
    flags = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", DEVICES], env=flags, capture_output=True, text=True, check=True
    )
    verdicts = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert verdicts["sums_and_counts"] == verdicts["sums_and_counts_inside"] == "None"
    assert verdicts["mean_of_devices"].startswith("mean-of-means: a window's items are in 2 parts")
    assert verdicts["local_counts_inside"].startswith("wrong-scale: on device 0 of 2: every item")
    assert "devices have different gradients" in verdicts["local_counts_inside"]


def test_a_loop_may_read_the_state_of_its_optimizer():
    own = optax.inject_hyperparams(optax.adam)(0.1).init({"w": jnp.ones(2)})
    state = ObservedState(0, own, None)
    assert state.hyperparams is own.hyperparams
    assert state[0] is own[0]
