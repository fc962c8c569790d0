"""Faults of parameters and of the optimizer's state are found in every dtype.

Loops that leave both alone hold.
"""

from __future__ import annotations

import copy
import dataclasses
from itertools import chain, repeat

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradcheck_suite import (
    Case,
    Input,
    Layer,
    Loss,
    Plan,
    Problem,
    ProblemSpec,
    check,
    training_loop,
    verify,
)
from gradcheck_suite.core.options import VerifyOptions
from gradcheck_suite.core.results import result_lines
from gradcheck_suite.loops.reset_modes import (
    BUILT_IN,
    backward_window,
    part_of_window,
    window_count,
    windows,
)
from gradcheck_suite.verification.judge_run import DIVERGED
from studies.zoo.bug import window_losses
from tests.training import at, each_gradient, each_parameter, trains

SPEC = ProblemSpec(
    Input("vector", size=2),
    (Layer("linear", bias=True, features=2), Layer("tanh"), Layer("linear", bias=True, features=2)),
    Loss("mse", reduction="mean"),
)
CASE = Case(SPEC, Plan((1, 3, 2, 2, 1), 2, epochs=2), seed=3)
DTYPES = ("float64", "float32", "bfloat16")
EACH_DTYPE = pytest.mark.parametrize(
    "dtype", ["float64", pytest.param("bfloat16", marks=pytest.mark.full)]
)


def _last_bit(p):
    p.copy_(
        torch.nextafter(p.float(), torch.tensor(9.0))
        if p.dtype == torch.float32
        else p * (1 + 2.0**-7)
    )


def _decayed_again(run, step):
    (group,) = run.optimizer.param_groups
    each_parameter(lambda p: p.mul_(1 - group.get("lr", 0.0) * 0.5))(run)


def _reset_each_epoch(run):
    start = copy.deepcopy(run.model.state_dict())
    for window in windows(run):
        run.optimizer.zero_grad()
        backward_window(run, window)
        run.optimizer.step()
        if len(window) == 1:  # the last window of an epoch
            run.model.load_state_dict(start)


def _undone(run):
    kept = []
    trains(
        before=lambda *_: kept.append(copy.deepcopy(run.model.state_dict())),
        after=lambda *_: run.model.load_state_dict(kept.pop()),
    )(run)


def _swapped(run, step):
    first, second = run.model.get_parameter("0.bias"), run.model.get_parameter("2.bias")
    state = run.optimizer.state
    state[first], state[second] = state[second], state[first]


def _zeroed(run, step):
    for kept in run.optimizer.state.values():
        kept["momentum_buffer"].zero_()


def _left_out(run, step):
    (group,) = run.optimizer.param_groups
    group["params"] = group["params"][1:]


def _edited_by_a_later_post_hook(run):
    run.optimizer.register_step_post_hook(
        lambda optimizer, args, kwargs: each_parameter(lambda p: p.mul_(0.8))(run)
    )


def _edited_after_the_closure(run):
    def hook(optimizer, args, kwargs):
        def closure(inner=kwargs["closure"]):
            inner()
            for p in run.model.parameters():
                p.grad.mul_(2)

        return args, {**kwargs, "closure": closure}

    run.optimizer.register_step_pre_hook(hook)


FAULTS = {
    "all weights times 0.8": (
        trains(after=each_parameter(lambda p: p.mul_(0.8))),
        "parameter-drift",
        "",
    ),
    "a unit in the last place": (
        trains(after=at({3}, each_parameter(_last_bit))),
        "parameter-drift",
        "",
    ),
    "after the last step": (
        trains(after=at({5}, each_parameter(_last_bit))),
        "parameter-drift",
        "after the last",
    ),
    "before the first step": (
        trains(begin=each_parameter(_last_bit)),
        "parameter-drift",
        "before the first step",
    ),
    "NaN": (
        trains(after=at({1}, each_parameter(lambda p: p.fill_(torch.nan)))),
        "parameter-drift",
        "",
    ),
    "noise": (
        trains(after=each_parameter(lambda p: p.add_(0.1 * torch.randn_like(p)))),
        "parameter-drift",
        "",
    ),
    "weight decay by hand": (trains(after=_decayed_again), "parameter-drift", "between two steps"),
    "initial values": (_reset_each_epoch, "parameter-drift", "its initial value again"),
    "undone": (_undone, "parameter-drift", "the value from before the step again"),
    "later post hook": (trains(begin=_edited_by_a_later_post_hook), "parameter-drift", ""),
    "state cleared": (
        trains(after=at({2}, lambda run, step: run.optimizer.state.clear())),
        "optimizer-state-changed",
        "momentum_buffer",
    ),
    "state zeroed": (trains(after=at({2}, _zeroed)), "optimizer-state-changed", "momentum_buffer"),
    "state swapped": (
        trains(after=at({2}, _swapped)),
        "optimizer-state-changed",
        "momentum_buffer",
    ),
    "left out": (trains(after=at({1}, _left_out)), "parameter-not-updated", "0.weight is in no"),
}


@EACH_DTYPE
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_parameters_or_state_is_found_and_named(name, dtype):
    loop, diagnosis, said = FAULTS[name]
    for optimizer in ("normalized", "momentum"):
        violation = check(loop, CASE.replace(dtype=dtype, optimizer=optimizer)).violation
        assert violation is not None, optimizer
        assert (violation.kind, violation.diagnosis) == ("parameters", diagnosis)
        assert said in violation.explanation


def _setting(key, value):
    def change(run, step=0):
        for group in run.optimizer.param_groups:
            group[key] = value

    return change


def _in_the_first_group(run):
    first, *rest = run.optimizer.param_groups
    for group in rest:
        first["params"] = [*first["params"], *group["params"]]
        group["params"] = []


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (
            trains(after=at({2}, _setting("maximize", True))),
            "maximize of 0.weight was False, and is True between",
        ),
        (
            trains(after=at({0}, _setting("weight_decay", 0.0))),
            "weight_decay of 0.weight was 0.01, and is 0.0",
        ),
        (
            trains(after=at({1}, _setting("lr", 0.1))),
            "or assume `edits-settings` where the loop does so on purpose",
        ),
        (
            trains(begin=_in_the_first_group),
            "lr of 0.bias was 0.025, and is 0.05 before the first step",
        ),
    ],
)
def test_settings_that_no_scheduler_changes_stay_what_they_are(loop, said):
    case = CASE.replace(optimizer="momentum", groups=2)
    violation = check(loop, case).violation
    assert violation.diagnosis == "changed-settings"
    assert said in violation.explanation
    assert check(loop, case.replace(optimizer=None)).holds


class _Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    def step(self):
        super().step(1.0)


def _under(make):
    def loop(run):
        scheduler = make(run.optimizer)
        trains(after=lambda *_: scheduler.step())(run)

    return loop


@pytest.mark.full
def test_what_a_scheduler_changes_is_no_fault():
    case = CASE.replace(optimizer="momentum", groups=2)
    schedules = torch.optim.lr_scheduler
    assert check(_under(lambda o: schedules.OneCycleLR(o, 0.1, total_steps=20)), case).holds
    assert check(_under(lambda o: schedules.LambdaLR(o, lambda step: 1 / (1 + step))), case).holds
    assert check(_under(lambda o: _Plateau(o, patience=0, threshold=1.0)), case).holds
    by_hand = training_loop(assumes=("edits-settings",))(trains(after=at({1}, _setting("lr", 0.1))))
    assert verify(by_hand, VerifyOptions(optimizer="momentum", examples=5)).holds


def test_a_loss_of_nan_in_the_state_of_l_bfgs_is_no_change():
    # the loss of a micro-batch without valid targets is NaN, and its gradient is zero
    layers = (Layer("linear", bias=True, features=2),)
    spec = ProblemSpec(
        SPEC.input, layers, Loss("nll", class_weights=False, ignore_index=True, reduction="mean")
    )
    case = Case(spec, Plan((1, 1, 1), 2, masked=(1,)), optimizer="lbfgs")
    assert check(BUILT_IN["closure"], case).holds


def test_a_frozen_parameter_may_not_change_either():
    layers = (Layer("frozen_linear", features=2), Layer("linear", bias=True, features=2))
    case = CASE.replace(problem=ProblemSpec(SPEC.input, layers, SPEC.loss))

    def change_frozen(run, step):
        with torch.no_grad():
            for p in run.model.parameters():
                if not p.requires_grad:
                    p.mul_(1.5)

    for optimizer in (None, "normalized"):
        assert check(trains(), case.replace(optimizer=optimizer)).holds
        violation = check(trains(after=change_frozen), case.replace(optimizer=optimizer)).violation
        assert (violation.kind, violation.diagnosis) == ("parameters", "parameter-drift")


@pytest.mark.full
@pytest.mark.usefixtures("only_linear")
def test_steps_that_were_not_judged_are_counted_over_all_cases():
    @training_loop(assumes=("edits-settings",))
    def leap(run):
        for group in run.optimizer.param_groups:
            group["lr"] = 1e300
        trains()(run)

    result = verify(leap, examples=40, optimizer="normalized")
    assert result.holds
    assert result.windows_skipped[DIVERGED] > 20
    assert result.windows >= result.judged == 40
    line = next(line for line in result_lines(result) if DIVERGED in line)
    total = result.windows + sum(result.windows_skipped.values())
    assert (
        line.strip()
        == f"{result.windows_skipped[DIVERGED]} of {total} steps could not be judged: {DIVERGED}"
    )


@pytest.mark.parametrize(
    ("name", "step"), [("all weights times 0.8", 1), ("a unit in the last place", 4)]
)
def test_the_window_after_the_change_is_named(name, step):
    violation = check(FAULTS[name][0], CASE.replace(optimizer="normalized")).violation
    assert (violation.epoch, violation.window) == divmod(step, 3)
    assert violation.parameter == "0.weight"
    assert violation.error > violation.allowed == 0


_double = each_gradient(lambda g: g.mul_(2))


def _edited_by_a_later_pre_hook(run):
    run.optimizer.register_step_pre_hook(lambda *_: _double(run) and None)


def _edited_by_a_global_hook(run):
    handle = register_optimizer_step_pre_hook(lambda *_: _double(run) and None)
    trains()(run)
    handle.remove()


def _edited_in_a_hook_that_drops_the_closure(run):
    def hook(optimizer, args, kwargs):
        _double(run)
        return args, {}

    run.optimizer.register_step_pre_hook(hook)


@pytest.mark.parametrize(
    "loop",
    [
        trains(begin=_edited_by_a_later_pre_hook),
        trains(begin=_edited_after_the_closure),
        trains(begin=_edited_in_a_hook_that_drops_the_closure),
        _edited_by_a_global_hook,
    ],
)
@EACH_DTYPE
def test_gradients_that_hooks_edit_after_the_observers_are_found(loop, dtype):
    for optimizer in (None, "normalized", "momentum"):
        violation = check(loop, CASE.replace(dtype=dtype, optimizer=optimizer)).violation
        assert (violation.kind, violation.diagnosis) == ("gradient", "wrong-scale")


def _by_closure(*, resets=True, factors=lambda: repeat(1)):
    """Return a loop with a closure, which multiplies its losses by the next of the factors of a
    step.
    """

    def loop(run):
        for window in windows(run):
            run.optimizer.zero_grad()
            each = factors()

            def closure(window=window, each=each):
                if resets:
                    run.optimizer.zero_grad()
                factor = next(each)
                for loss in window_losses(run, window):
                    (factor * loss).backward()
                return torch.zeros(())

            run.optimizer.step(closure)

    return loop


# L-BFGS calls its closure several times a step
_closure_without_reset = _by_closure(resets=False)
_closure_of_doubled_losses = _by_closure(factors=lambda: repeat(2))
_doubled_from_the_second_call_on = _by_closure(factors=lambda: chain([1], repeat(2)))


@EACH_DTYPE
def test_every_call_of_a_closure_is_judged(dtype):
    case = CASE.replace(dtype=dtype, optimizer="lbfgs")
    verdict = check(BUILT_IN["closure"], case)
    assert verdict.holds
    assert verdict.windows > 2 * CASE.plan.steps
    # the first call is right, later ones add to it
    violation = check(_closure_without_reset, case).violation
    assert (violation.kind, violation.epoch, violation.window) == ("gradient", 0, 0)
    if dtype == "float64":
        assert violation.diagnosis == "stale-window"
        assert "in a closure, reset at its start" in violation.explanation


def _closure_over_a_spent_iterator(run):
    """The planted fault: from its second call on, the closure has no micro-batch left."""
    for window in windows(run):
        left, total = iter(window), window_count(run, window)

        def closure(left=left, total=total):
            for p in run.model.parameters():
                p.grad = torch.zeros_like(p)
            for batch in left:
                part_of_window(run, batch, total).backward()
            return torch.zeros(())

        run.optimizer.step(closure)


def test_a_later_call_of_a_closure_is_told_from_the_first():
    violation = check(_closure_over_a_spent_iterator, CASE.replace(optimizer="lbfgs")).violation
    assert "this is call 2 of the closure in one step" in violation.explanation
    violation = check(_closure_of_doubled_losses, CASE.replace(optimizer="lbfgs")).violation
    assert "call" not in violation.explanation
    assert (violation.kind, violation.diagnosis) == ("gradient", "wrong-scale")


def test_a_closure_of_a_constant_gradient_is_not_said_to_add_up_its_calls():
    slopes = ProblemSpec(
        SPEC.input, (Layer("linear", bias=True, features=1),), Loss("identity", reduction="mean")
    )
    for problem in (SPEC, slopes):
        case = Case(problem, CASE.plan, seed=3, optimizer="lbfgs")
        assert check(_doubled_from_the_second_call_on, case).violation.diagnosis == "not-linear"


# gradients that are not those of the parameters at the step


def _step_with(run, window, model):
    model.zero_grad()
    backward_window(dataclasses.replace(run, model=model), window)
    for p, old in zip(run.model.parameters(), model.parameters(), strict=True):
        p.grad = old.grad
    run.optimizer.step()


def _on_a_stale_copy(run):
    stale = copy.deepcopy(run.model)
    for window in windows(run):
        _step_with(run, window, stale)


def _forward_before_the_last_step(run):
    """Compute each gradient at the parameters before the previous step, as a pipeline that is
    filled too early does.
    """
    earlier = copy.deepcopy(run.model)
    for window in windows(run):
        now = copy.deepcopy(run.model)
        _step_with(run, window, earlier)
        earlier = now


@pytest.mark.parametrize("loop", [_on_a_stale_copy, _forward_before_the_last_step])
def test_gradients_of_earlier_parameters_are_found_where_parameters_move(loop):
    assert check(loop, CASE).holds
    for dtype in ("float64", "float32"):
        violation = check(loop, CASE.replace(dtype=dtype, optimizer="normalized")).violation
        assert (violation.kind, violation.diagnosis) == ("gradient", "stale-parameters")
        assert ("initial parameters" in violation.explanation) is (
            loop is _on_a_stale_copy or violation.window == 1
        )


# loops that are sound


def _reloaded(run):
    def reload(run, step):
        run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))

    trains(after=reload)(run)


@training_loop(assumes=("edits-settings",))
def _regrouped(run):
    parameters = list(run.model.parameters())
    (group,) = run.optimizer.param_groups
    group["params"] = parameters[:1]
    run.optimizer.add_param_group({"params": parameters[1:], "lr": 0.001})
    trains()(run)


@training_loop(assumes=("edits-settings",))
def _foreach(run):
    for group in run.optimizer.param_groups:
        group["foreach"] = True
    trains()(run)


def _other_layout(run):
    """Store matrices by columns, and hand gradients over by rows."""
    for p in run.model.parameters():
        p.data = p.data.t().contiguous().t() if p.ndim == 2 else p.data
    trains()(run)


SOUND = (_reloaded, _regrouped, _foreach, _other_layout)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler:UserWarning")
@pytest.mark.parametrize("loop", SOUND)
def test_a_loop_that_leaves_parameters_to_the_optimizer_holds(loop):
    for dtype in DTYPES:
        for optimizer in (None, "normalized", "momentum", "adamw"):
            verdict = check(loop, CASE.replace(dtype=dtype, optimizer=optimizer))
            assert verdict.holds, (dtype, optimizer, verdict.violation)
            assert verdict.windows == CASE.plan.steps


# Loops that edit parameters on purpose: sound ones hold where they say so, and wrong gradients in
# them are named.


EDITS = ("edits-parameters",)


def _copies(run):
    return [p.detach().clone() for p in run.model.parameters()]


def _lookahead(run, step, slow):
    if step % 2:
        for p, kept in zip(run.model.parameters(), slow, strict=True):
            p.copy_(kept.lerp_(p, 0.5))


def _clip_weights(run, step, slow):
    for p in run.model.parameters():
        p.clamp_(-0.1, 0.1)


def _shrink(run, step, slow):
    for p in run.model.parameters():
        p.mul_(0.9)


EDITED = {"lookahead": _lookahead, "clipped weights": _clip_weights, "decay by hand": _shrink}


def _loop(edit, wrong=lambda run, step: None, reset=True):
    def loop(run):
        slow = _copies(run)
        for step, window in enumerate(windows(run)):
            if reset or not step:
                run.optimizer.zero_grad()
            backward_window(run, window)
            wrong(run, step)
            run.optimizer.step()
            with torch.no_grad():
                edit(run, step, slow)

    return loop


def _twice_after_the_first(run, step):
    for p in run.model.parameters():
        p.grad.mul_(1 + (step > 0))


@pytest.mark.parametrize("edit", EDITED.values(), ids=EDITED)
@pytest.mark.parametrize("optimizer", [None, "momentum"])
def test_an_edit_on_purpose_is_a_drift_unless_the_loop_says_so(edit, optimizer):
    case = CASE.replace(dtype="bfloat16", optimizer=optimizer)
    violation = check(_loop(edit), case).violation
    if optimizer or edit in (_clip_weights, _shrink):
        assert violation.diagnosis == "parameter-drift"
        assert "assumes `edits-parameters`" in violation.explanation
    verdict = check(_loop(edit), case, assumes=EDITS)
    assert verdict.holds
    assert verdict.windows == CASE.plan.steps


@pytest.mark.parametrize("edit", EDITED.values(), ids=EDITED)
@pytest.mark.parametrize("optimizer", [pytest.param(None, marks=pytest.mark.full), "momentum"])
def test_a_wrong_gradient_between_edits_is_found_and_named(edit, optimizer):
    case = CASE.replace(optimizer=optimizer)
    twice = check(_loop(edit, _twice_after_the_first), case, assumes=EDITS).violation
    assert (twice.kind, twice.window) == ("gradient", 1)
    assert twice.diagnosis == "wrong-scale"
    leak = check(_loop(edit, reset=False), case, assumes=EDITS).violation
    assert (leak.kind, leak.diagnosis) == ("gradient", "stale-window")


def test_a_gradient_of_other_parameters_than_the_edited_ones_is_found():
    def loop(run):
        stale = copy.deepcopy(run.model)
        for window in windows(run):
            _step_with(run, window, stale)
            with torch.no_grad():
                _shrink(run, 0, [])

    violation = check(loop, CASE, assumes=EDITS).violation
    assert (violation.kind, violation.diagnosis, violation.window) == (
        "gradient",
        "stale-parameters",
        1,
    )


def test_the_optimizers_step_and_state_are_judged_all_the_same():
    def forget(run, step):
        if step == 2:
            run.optimizer.state.clear()

    case = CASE.replace(optimizer="momentum")
    assert (
        check(_loop(_shrink, forget), case, assumes=EDITS).violation.diagnosis
        == "optimizer-state-changed"
    )


@pytest.mark.usefixtures("only_linear")
def test_the_output_says_that_parameters_were_not_judged():
    result = verify(_loop(_shrink), examples=10, assumes=EDITS)
    assert result.holds
    assert result.windows >= 10
    lines = result_lines(result)
    assert (
        "    assumes edits-parameters: gradients were judged at the parameters that each step found"
        in lines
    )
    assert not any("nothing else was tried" in line for line in lines)


@pytest.mark.usefixtures("without_second_opinion")
@pytest.mark.parametrize(
    ("tie_weights", "both_names"), [(True, False), (False, False), (False, True)]
)
def test_what_functional_call_leaves_behind_is_said_to_be_torchs_doing(tie_weights, both_names):
    """pytorch#164759: each name of a shared module swaps its parameters, and the second one keeps
    what is there.
    """

    def model(seed):
        torch.manual_seed(seed)
        shared = torch.nn.Linear(2, 2)
        return torch.nn.Sequential(shared, torch.nn.Tanh(), shared)

    def by_vjp(run):
        names = {
            name: p.detach()
            for name, p in run.model.named_parameters(remove_duplicate=not both_names)
        }
        parameters = dict(run.model.named_parameters())
        for window in windows(run):
            total = window_count(run, window)
            for p in parameters.values():
                p.grad = torch.zeros_like(p)
            for batch in window:
                loss, pull = torch.func.vjp(
                    lambda values, batch=batch: run.loss(
                        lambda x: torch.func.functional_call(
                            run.model, values, (x,), tie_weights=tie_weights
                        ),
                        batch,
                    ),
                    names,
                )
                (found,) = pull(torch.ones_like(loss) * run.count(batch) / total)
                for name, p in parameters.items():
                    p.grad += found[name]
            run.optimizer.step()

    problem = Problem(
        model,
        lambda items, seed: {
            "x": torch.randn(items, 2, generator=torch.Generator().manual_seed(seed))
        },
        lambda called, batch: called(batch["x"]).square().mean(),
    )
    verdict = check(by_vjp, Case("mine", CASE.plan), problem=problem)
    assert verdict.holds is not (tie_weights or both_names)
    if not verdict.holds:
        assert verdict.violation.diagnosis == "changed-model"
        assert "and a tied parameter once for each module" in verdict.violation.explanation
