"""A fault is read off the case that showed it: gradients known in closed form, combined with the weights of a fault.

An item's loss is the product of its row with the parameters, so a micro-batch's summed gradient is the sum of its rows.
Of the eight items, micro-batches 0 to 2 hold 1, 2 and 3 and make the window under test; the fourth, with 2, is the
epoch's short last window.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradcheck_suite import Case, Plan, Problem
from gradcheck_suite.core.comparison import Comparison
from gradcheck_suite.judge.fitted_weights import diagnose_case, fit_weights, is_explained, of_one_sign
from gradcheck_suite.judge.weights import Diagnosis
from gradcheck_suite.reference.large_batch import Reference
from gradcheck_suite.run.instance import user_instance

ROWS = np.random.default_rng(0).integers(1, 10, (8, 15)).astype(float)
PLAN = Plan((1, 2, 3, 2), 3)
RIGHT = (1 / 6, 1 / 6, 1 / 6, 0)
PARAMETERS = {"a": slice(0, 5), "b": slice(5, 10), "c": slice(10, 15)}
ALLOWED = 2.0**-40


class _Linear(torch.nn.Module):
    def __init__(self, sizes):
        super().__init__()
        for name, size in sizes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.ones(size)))

    def forward(self, x):
        return x @ torch.cat(list(self.parameters()))


def _sums(rows, plan):
    """Return (B, P): each micro-batch's summed gradient."""
    return np.stack(
        [rows[plan.items(j).start : plan.items(j).stop].sum(axis=0) for j in range(len(plan.micro_batches))]
    )


def _instance(rows, plan, *, sizes, reduction="mean"):
    def loss(model, batch):
        return getattr(model(batch["x"]), reduction)()

    problem = Problem(
        lambda seed: _Linear(sizes), lambda items, seed: {"x": torch.from_numpy(rows)}, loss, reduction=reduction
    )
    return user_instance(Case("rows.py:ROWS", plan), problem)


def _read(observed, *, rows=ROWS, plan=PLAN, sizes=None, window=0, epoch=0, allowed=ALLOWED, **instance):
    reference = Reference(_instance(rows, plan, sizes=sizes or dict.fromkeys(PARAMETERS, 5), **instance))
    members = plan.windows[window]
    count = 1 if instance.get("reduction") == "sum" else sum(plan.micro_batches[j] for j in members)
    expected = _sums(rows, plan)[list(members)].sum(axis=0) / count
    comparison = Comparison(reference.layout, expected, observed, np.full(rows.shape[1], allowed))
    return diagnose_case(reference.window(window), comparison, epoch, alike=False)


def _gradient(*weights, rows=ROWS, plan=PLAN):
    return np.array(weights) @ _sums(rows, plan)


# All elements


@pytest.mark.parametrize(
    ("weights", "name", "says"),
    [
        ((1 / 3, 1 / 6, 1 / 9, 0), "mean-of-means", "each micro-batch's mean has weight 1/3"),
        ((2 / 6, 2 / 6, 2 / 6, 0), "wrong-scale", "weighs 2 times"),
        ((1 / 6, 0, 1 / 6, 0), "dropped-micro-batch", "micro-batches [1] of the window"),
        ((0, 0, 1 / 6, 0), "reset-inside-window", "only the window's last micro-batch"),
        ((0, 0, 0, 0), "no-gradient", "nothing of the window"),
        ((1 / 6, 1 / 6, 1 / 6, 1 / 2), "other-window", "micro-batches [3] of other windows are in"),
    ],
)
def test_weights_of_the_micro_batches_are_found_and_named(weights, name, says):
    diagnosis = _read(_gradient(*weights))
    assert diagnosis.name == name
    assert says in diagnosis.sentence


def test_a_trace_of_another_window_is_no_rounding():
    assert _read(_gradient(1 / 6, 1 / 6, 1 / 6, 1e-9)).name == "other-window"
    assert _read(_gradient(1 / 6, 1 / 6, 1 / 6, 1e-9), epoch=1).name == "stale-window"


def test_the_last_window_has_its_own_micro_batches():
    assert _read(_gradient(0, 0, 0, 1), window=1).name == "wrong-scale"
    assert _read(_gradient(1 / 6, 0, 0, 1 / 2), window=1).name == "stale-window"


def test_the_epoch_tells_a_stale_gradient_from_a_scale():
    """The steps before were judged right, so a factor that all steps have is refuted."""
    plan, rows = Plan((1, 2, 3), 3), ROWS[:6]
    twice = _gradient(2 / 6, 2 / 6, 2 / 6, rows=rows, plan=plan)
    assert "from earlier epochs" in _read(twice, epoch=1, rows=rows, plan=plan).sentence
    assert _read(twice, rows=rows, plan=plan).name == "wrong-scale"


def test_a_sum_is_read_as_one():
    diagnosis = _read(_gradient(1 / 6, 1 / 6, 1 / 6, 0), reduction="sum")
    assert diagnosis.name == "wrong-scale"
    assert "one over the window's count, 6" in diagnosis.sentence


def test_weights_without_a_name_are_not_named():
    assert _read(_gradient(0.3, 0.1, 0.2, 0)) is None


def test_a_right_gradient_has_no_name():
    assert _read(_gradient(*RIGHT)) is None


def test_what_is_no_combination_is_not_named():
    assert _read(_gradient(*RIGHT) ** 2) is None


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_not_read(value):
    observed = _gradient(1 / 3, 1 / 6, 1 / 9, 0)
    rows = ROWS.copy()
    rows[7, 14] = value
    assert _read(observed, rows=rows) is None
    observed[0] = value
    assert _read(observed) is None


def test_a_micro_batch_that_reaches_no_parameter_is_not_missed_and_still_counts():
    rows = ROWS.copy()
    rows[1:3] = 0
    # right is 1/6 of each, the second's two items among the six
    diagnosis = _read(_gradient(1 / 2, 0, 1 / 2, 0, rows=rows), rows=rows)
    assert diagnosis.name == "wrong-scale"
    assert "weighs 3 times what it should" in diagnosis.sentence


def test_an_element_that_other_windows_alone_reach_is_left_out():
    rows = ROWS.copy()
    rows[:6, 0] = 0
    assert _read(_gradient(1 / 3, 1 / 6, 1 / 9, 0, rows=rows), rows=rows).name == "mean-of-means"


def test_steps_that_were_right_refute_a_factor_that_they_would_have_had():
    plan = Plan((1, 2, 3, 2), 2)
    third = {"rows": ROWS, "plan": plan, "window": 1}
    assert "accumulation_steps = 2" in _read(_gradient(2 / 3, 2 / 3, 0, 0, plan=plan), rows=ROWS, plan=plan).sentence
    later = _read(_gradient(0, 0, 2 / 5, 2 / 5, plan=plan), **third).sentence
    assert "accumulation_steps" not in later
    assert later.endswith("(only in windows after the first of the run)")


@pytest.mark.parametrize("window", [0, 1])
@pytest.mark.parametrize("epoch", [1, 2])
def test_steps_of_earlier_epochs_were_right(window, epoch):
    plan, count = Plan((1, 2, 3, 2), 2), (3, 5)[window]
    weights = np.zeros(4)
    weights[2 * window : 2 * window + 2] = 0.7 / count
    found = _read(_gradient(*weights, plan=plan), plan=plan, window=window, epoch=epoch)
    assert found.name == "wrong-scale"
    # window 1 was right in earlier epochs, and window 0 in all before
    assert found.sentence.endswith("(only in epochs after the first)") == (window == 0 and epoch == 1)


def test_a_step_of_which_nothing_can_be_read_refutes_no_factor():
    plan, rows = Plan((1, 2, 3, 2), 2), ROWS.copy()
    rows[:3] = 0
    found = _read(_gradient(0, 0, 2 / 5, 2 / 5, rows=rows, plan=plan), rows=rows, plan=plan, window=1)
    assert "accumulation_steps = 2" in found.sentence
    # a later one that can be read does
    plan, rows = Plan((1, 1, 1, 1, 2, 2), 2), ROWS.copy()
    rows[:2] = 0
    found = _read(_gradient(0, 0, 0, 0, 1 / 2, 1 / 2, rows=rows, plan=plan), rows=rows, plan=plan, window=2)
    assert "accumulation_steps" not in found.sentence


# One parameter alone


def _only(names, weights, right=RIGHT):
    observed, wrong = _gradient(*right), _gradient(*weights)
    for name in names:
        observed[PARAMETERS[name]] = wrong[PARAMETERS[name]]
    return observed


def test_a_fault_of_some_parameters_is_named_with_them():
    diagnosis = _read(_only("b", (1 / 3, 1 / 6, 1 / 9, 0)))
    assert diagnosis.name == "mean-of-means"
    assert diagnosis.sentence.startswith("in b alone, while a, c are right: each micro-batch's mean has weight 1/3")
    diagnosis = _read(_only("ac", (1 / 3, 1 / 6, 1 / 9, 0)))
    assert diagnosis.sentence.startswith("in a, c alone, while b is right: ")


def test_long_lists_of_parameters_are_cut():
    names = "abcdefgh"
    rows = np.random.default_rng(1).integers(1, 10, (8, 40)).astype(float)
    observed = _gradient(*RIGHT, rows=rows)
    observed[:20] = _gradient(2 / 6, 2 / 6, 2 / 6, 0, rows=rows)[:20]
    diagnosis = _read(observed, rows=rows, sizes=dict.fromkeys(names, 5))
    assert diagnosis.sentence.startswith("in a, b, c and 1 more alone, while e, f, g and 1 more are right: ")
    observed[20:30] *= 2
    diagnosis = _read(observed, rows=rows, sizes=dict.fromkeys(names, 5))
    assert diagnosis.sentence.startswith("in a, b, c and 3 more alone, while g, h are right: ")


def test_a_parameter_is_right_up_to_what_rounding_allows():
    observed = _only("b", (2 / 6, 2 / 6, 2 / 6, 0))
    expected = _sums(ROWS, PLAN)[:3].sum(axis=0)[0] / 6
    # 2**-40 is added without rounding to numbers of this size
    for off in (ALLOWED, -ALLOWED):
        observed[0] = expected + off
        assert "while a, c are right" in _read(observed).sentence
    for off in (1.01 * ALLOWED, 1e-9):
        observed[0] = expected + off
        assert _read(observed) is None


def test_every_element_of_all_must_agree():
    for j in (0, 7, 14):
        observed = _gradient(2 / 6, 2 / 6, 2 / 6, 0)
        observed[j] /= 2
        assert _read(observed) is None


@pytest.mark.parametrize(
    ("empty", "name"), [((), "no-gradient"), (slice(1, 3), "dropped-micro-batch"), (7, "no-gradient")]
)
def test_what_a_parameter_lacks_may_be_there_where_a_micro_batch_has_a_gradient_of_zero(empty, name):
    rows = ROWS.copy()
    rows[empty, :] = 0
    observed = _gradient(*RIGHT, rows=rows)
    observed[PARAMETERS["b"]] = 0
    found = _read(observed, rows=rows)
    assert found.name == name
    assert found.sentence.startswith("in b alone, while a, c are right: ")


def test_two_faults_at_once_are_not_called_one():
    observed = _only("b", (2 / 6, 2 / 6, 2 / 6, 0))
    observed[PARAMETERS["c"]] = _gradient(1 / 6, 0, 1 / 6, 0)[PARAMETERS["c"]]
    assert _read(observed) is None


def test_parameters_with_one_fault_in_different_sizes_are_told_apart():
    diagnosis = _read(_only("b", (3 / 6, 3 / 6, 3 / 6, 0), right=(2 / 6, 2 / 6, 2 / 6, 0)))
    assert diagnosis.name == "wrong-scale"
    assert "in every parameter: in a, every item of the window weighs 2 times" in diagnosis.sentence
    assert "; in b, every item of the window weighs 3 times" in diagnosis.sentence


# How much it takes


TWO = np.array([[3.0, 5.0, 7.0], [2.0, 11.0, 4.0], [1.0, 13.0, 6.0]])


def test_any_factor_of_a_single_element_needs_to_be_one_of_the_runs():
    plan, one = Plan((1, 2), 2, 1), np.array([[3.0], [0.0], [0.0]])
    single, rows = Plan((1,), 2), one[:1]
    for factor, named in ((2.0, True), (1.7, False)):
        diagnosis = _read(np.array([3 * factor]), rows=rows, plan=single, sizes={"a": 1})
        assert (diagnosis is not None) == named
        # nor is it said to be left over from the epoch before
        diagnosis = _read(np.array([3 * factor]), rows=rows, plan=single, sizes={"a": 1}, epoch=1)
        assert (diagnosis is not None) == named
    assert _read(np.array([0.0]), rows=rows, plan=single, sizes={"a": 1}).name == "no-gradient"
    assert plan.windows == ((0, 1),)


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (2**0.5, "which is accumulation_steps**0.5, with 2 accumulation steps"),
        (-1.0, "the sign is wrong"),
        (2.0**7, "2**7, such as a loss scale that is never divided out"),
        (2.0**-7, "2**-7, such as a loss scale that is divided out twice"),
        (1.3, None),
    ],
)
def test_the_factors_of_a_run_are_told_off_one_element(factor, said):
    """Two items weigh 1/2 each."""
    rows, plan = np.array([[3.0], [4.0]]), Plan((2,), 2)
    found = _read(np.array([7 / 2 * factor]), rows=rows, plan=plan, sizes={"a": 1})
    assert (said in found.sentence) if said else (found is None)


def test_a_rounded_gradient_of_multiples_is_not_told_by_other_windows():
    """-x and 2x round as x does, so all that is known is one number; the other window's elements are no multiples."""
    rows, plan = np.array([[1.2345, -1.2345, 2.469], [2.0, 11.0, 4.0], [1.0, 13.0, 6.0]]), Plan((1, 2), 1)
    rounded = torch.tensor(rows[0]).bfloat16().double().numpy()
    assert "low-precision" in _read(rounded, rows=rows, plan=plan, sizes={"a": 3}).names


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    ("size", "seen", "evident"),
    [(0.9, 0, False), (1, 0, False), (1.1, 0, True), (0.9, 1, False), (0.9, 1.1, True), (0, 1.1, True)],
)
def test_an_element_that_rounding_may_hide_is_no_evidence(size, seen, evident, reduction):
    """Seven elements are 3 times what they should be; the eighth is not, and has some times what is allowed."""
    plan, rows = Plan((1, 3), 2), np.random.default_rng(3).integers(1, 10, (4, 8)).astype(float)
    right = 1.0 if reduction == "sum" else 1 / 4
    rows[:, 7] = 0
    # the larger of the two micro-batches' gradients
    rows[1, 7] = size * ALLOWED / right
    observed = 3 * right * _sums(rows, plan).sum(axis=0)
    observed[7] = seen * ALLOWED
    found = _read(observed, rows=rows, plan=plan, sizes={"a": 8}, reduction=reduction)
    assert found.name == "wrong-scale"
    assert found.sentence.startswith("every element is 3 times" if evident else "every item of the window weighs 3")


MANY = np.random.default_rng(5).integers(1, 10, (80, 15)).astype(float)
OF_MANY = Plan((10, 20, 30, 20), 3)


def test_weights_agree_up_to_what_rounding_may_move_them():
    """Rounding moves one weight as far as it can: much further than 1e-12, and than its share of the gradient."""
    sums, allowed = _sums(MANY, OF_MANY), 2.0**-20
    push = np.sign(np.linalg.pinv(sums[:3].T)[0])
    found = _read(2 / 60 * sums[:3].sum(axis=0) + 0.9 * allowed * push, rows=MANY, plan=OF_MANY, allowed=allowed)
    assert found.name == "wrong-scale"
    assert "weighs 2 times" in found.sentence
    moved = _gradient(2.002 / 60, 2 / 60, 2 / 60, 0, rows=MANY, plan=OF_MANY)
    assert _read(moved, rows=MANY, plan=OF_MANY, allowed=allowed) is None


@pytest.mark.parametrize(("share", "name"), [(0.9, "wrong-scale"), (1.1, "other-window")])
def test_a_weight_within_rounding_is_none(share, name):
    sums, allowed = _sums(MANY, OF_MANY), 2.0**-20
    error = 4 * np.abs(np.linalg.pinv(sums.T)).sum(axis=1)[3] * allowed
    observed = 2 / 60 * sums[:3].sum(axis=0) + share * error * sums[3]
    assert _read(observed, rows=MANY, plan=OF_MANY, allowed=allowed).name == name


def test_a_micro_batch_that_reaches_nothing_is_no_evidence():
    """Of a window of two, the second has no gradient: one weight is read, off one element or off two."""
    plan = Plan((1, 2), 2)
    for size, factor, named in ((1, 1.7, False), (1, 2.0, True), (2, 1.7, True)):
        rows = np.array([[3.0, 5.0], [0.0, 0.0], [0.0, 0.0]])[:, :size]
        diagnosis = _read(factor / 3 * rows[0], rows=rows, plan=plan, sizes={"a": size})
        assert (diagnosis is not None) == named


def test_two_weights_of_a_window_that_fit_a_pattern_are_no_coincidence():
    rows, plan = TWO[:, :2], Plan((1, 2), 2)
    # mean of means: 1/2 and 1/4
    assert _read(_gradient(1 / 2, 1 / 4, rows=rows, plan=plan), rows=rows, plan=plan, sizes={"a": 2}).name == (
        "mean-of-means"
    )


def test_other_windows_are_blamed_only_by_more_elements_than_weights():
    plan = Plan((1, 2), 1)
    for size, window, named in ((2, 0, False), (2, 1, False), (3, 0, True), (3, 1, True)):
        rows = TWO[:, :size]
        # a share that no known fault has, of the other window
        observed = _gradient(*((1, 0.3) if window == 0 else (0.3, 1 / 2)), rows=rows, plan=plan)
        diagnosis = _read(observed, rows=rows, plan=plan, sizes={"a": size}, window=window)
        name = "stale-window" if window else "other-window"
        assert (diagnosis is not None and diagnosis.name == name) == named


def test_a_known_fault_is_tried_where_there_are_too_few_elements_to_solve_for_weights():
    """Of one element: the window before, the window and the one before it, its first micro-batch alone."""
    rows = np.array([[3.0], [2.0], [7.0], [1.0], [11.0]])
    plan = Plan((1, 1, 2, 1), 2)
    for window, weights, name in (
        (1, (1 / 2, 1 / 2, 0, 0), "other-window"),
        (1, (1 / 2, 1 / 2, 1 / 3, 1 / 3), "stale-window"),
        (0, (1 / 2, 1 / 2, 1 / 3, 1 / 3), "other-window"),
        (0, (0, 0, 1 / 3, 1 / 3), "other-window"),
        (0, (-1 / 2, -1 / 2, 0, 0), "wrong-scale"),
        (0, (1 / 4, 1 / 4, 0, 0), "wrong-scale"),
        (1, (0, 0, 1 / 2, 0), "dropped-micro-batch"),
        (0, (1 / 2, 0, 0, 0), "dropped-micro-batch"),
        (0, (0, 1 / 2, 0, 0), "dropped-micro-batch"),
        (1, (0, 0, 1 / 4, 1 / 2), "mean-of-means"),
        (1, (0, 0, 0.31, 0.29), None),
    ):
        found = _read(_gradient(*weights, rows=rows, plan=plan), rows=rows, plan=plan, sizes={"a": 1}, window=window)
        assert (found and found.name) == name
    # of three micro-batches' means, two are there in a window of two
    rows, plan = np.vstack([rows, [[5.0]]]), Plan((1, 1, 1, 1, 2), 3)
    observed = _gradient(0, 0, 0, 1 / 3, 1 / 6, rows=rows, plan=plan)
    assert _read(observed, rows=rows, plan=plan, sizes={"a": 1}, window=1).name == "mean-of-means"


def test_elements_that_are_multiples_of_each_other_are_no_evidence_for_weights():
    """Rounding keeps a factor of -2, so weights of other windows' micro-batches can fit a rounded gradient exactly."""
    base = np.random.default_rng(1).standard_normal((8, 8))
    rows, plan = np.hstack([base, -2 * base[:, :7]]), Plan((1,) * 8, 4)
    expected = rows[:4].sum(axis=0) / 4
    rounded = torch.tensor(expected).bfloat16().double().numpy()
    assert _read(rounded, rows=rows, plan=plan).name == "low-precision"
    # as many elements that are no multiples do show a micro-batch of the next window
    rows = np.hstack([base, base[:, :7] ** 2])
    assert _read(rows[:5].sum(axis=0) / 4, rows=rows, plan=plan).name == "other-window"


@pytest.mark.parametrize("scale", [1.0, 1e-7])
def test_right_elements_that_are_sums_of_others_are_no_evidence_for_weights(scale):
    """Four weights fit five elements, whatever the last one is: that the fourth is a sum of the others says nothing."""
    base = scale * np.random.default_rng(2).standard_normal((4, 4))
    rows, plan = np.column_stack([base[:, :3], base[:, 0] - 3 * base[:, 1], base[:, 3]]), Plan((1,) * 4, 2)
    doubled = rows[:2].sum(axis=0) / 2 * [1, 1, 1, 1, 2]
    found = _read(doubled, rows=rows, plan=plan, sizes={"a": 4, "b": 1})
    assert found.name == "wrong-scale"
    assert found.sentence.startswith("in b alone, while a is right: ")
    # where it is wrong as well, it says that no other weights are meant
    later = rows[:3].sum(axis=0) / 2
    assert _read(later, rows=rows, plan=plan, sizes={"a": 4, "b": 1}).name == "other-window"
    # and so does a second wrong element that depends on the first
    rows = np.column_stack([rows, rows[:, 4] + rows[:, 0]])
    later = rows[:3].sum(axis=0) / 2
    assert _read(later, rows=rows, plan=plan, sizes={"a": 4, "b": 2}).name == "other-window"


def test_wrong_elements_are_evidence_where_they_are_more_than_they_tell_alone():
    """The third micro-batch does not reach the first two elements: the others need to be three to tell two weights."""
    rows, plan = np.random.default_rng(3).standard_normal((4, 5)), Plan((1,) * 4, 2)
    rows[2, :2] = 0
    later = rows[:3].sum(axis=0) / 2
    assert _read(later, rows=rows, plan=plan, sizes={"a": 5}).name == "other-window"
    fewer = _read(later[:4], rows=rows[:, :4], plan=plan, sizes={"a": 4})
    assert fewer is None or fewer.name != "other-window"


# Whether weights, or the elements of one sign, explain a gradient


def _window(rows=ROWS, *, dtype="float64", moved=False, sizes=None, plan=PLAN, reduction="mean"):
    instance = _instance(rows, plan, sizes=sizes or dict.fromkeys(PARAMETERS, 5), reduction=reduction)
    instance = user_instance(instance.case.replace(dtype=dtype), instance.users_problem)
    parameters = {"a": torch.full((5,), 2.0)} if moved else None
    return Reference(instance).window(0, parameters)


def _compared(window, observed, allowed, expected=None):
    expected = np.zeros_like(observed) if expected is None else expected
    return Comparison(window.reference.layout, expected, observed, np.full(len(observed), allowed))


WEIGHTS = np.array([1 / 4, 1 / 2, 1 / 8, 0.0])


@pytest.mark.parametrize(
    ("off", "explained"), [(0.0, True), (1.5, True), (2.0, True), (-2.0, True), (2.001, False), (-2.001, False)]
)
def test_weights_explain_a_gradient_up_to_twice_what_is_allowed(off, explained):
    window, observed = _window(), _gradient(*WEIGHTS)
    observed[7] += off
    compared = _compared(window, observed, 1.0)
    assert is_explained(window, compared, WEIGHTS) is explained
    # the seventh element is of the second parameter
    assert is_explained(window, compared, WEIGHTS, only=["a", "c"])
    assert is_explained(window, compared, WEIGHTS, only=["b"]) is explained
    assert is_explained(window, compared, WEIGHTS, only=["a", "b"]) is explained


def test_where_weights_cannot_be_told_they_explain_everything():
    wrong = _gradient(*WEIGHTS) + 100.0
    window = _window()
    assert not is_explained(window, _compared(window, wrong, 1.0), WEIGHTS)
    for value in (np.nan, np.inf):
        wrong[3] = value
        assert is_explained(window, _compared(window, wrong, 1.0), WEIGHTS)
        wrong[3] = 100.0
        rows = ROWS.copy()
        rows[0, 3] = value
        window = _window(rows)
        assert is_explained(window, _compared(window, wrong, 1.0), WEIGHTS)
    for options in ({"dtype": "float32"}, {"moved": True}):
        window = _window(**options)
        assert is_explained(window, _compared(window, wrong, 1.0), WEIGHTS)


SIGNED = np.random.default_rng(1).integers(-9, 10, (8, 15)).astype(float)


FOUND = Diagnosis("first-only", "only the first is there")


def _of_sign(sign, rows=SIGNED):
    """Return the right gradient and that of the elements of one sign of each micro-batch."""
    sums = _sums(rows, PLAN)[:3]
    return sums.sum(axis=0) / 6, np.where(np.sign(sums) == sign, sums, 0.0).sum(axis=0) / 6


@pytest.mark.parametrize(("off", "seen"), [(7.5, True), (8, True), (8.5, False), (-8.5, False)])
def test_elements_of_one_sign_are_seen_up_to_eight_times_what_is_allowed(off, seen):
    window = _window(SIGNED, reduction="sum")
    # whole numbers, so that nothing rounds
    right, kept = (np.round(6 * gradient) for gradient in _of_sign(1))
    kept[4] += off * ALLOWED
    assert (of_one_sign(FOUND, window, _compared(window, kept, ALLOWED, right)) is not None) is seen


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"moved": True}])
def test_elements_of_one_sign_are_read_in_float64_at_the_start_alone(options):
    window, (right, kept) = _window(SIGNED, **options), _of_sign(1)
    assert of_one_sign(FOUND, window, _compared(window, kept, ALLOWED, right)) is None


# Weights are recovered where the gradients determine them, and never claimed where they do not.


GRADIENTS = np.array([[1.0, 2.0, 0.0, -1.0], [0.5, 0.0, 3.0, 1.0], [0.0, -1.0, 1.0, 2.0]])
BOUND = np.full(4, 1e-13)


@pytest.mark.parametrize("weights", [(0.25, 0.25, 0.5), (1.0, 0.0, 0.0), (0.0, -2.0, 1e-3)])
def test_weights_are_recovered(weights):
    fit = fit_weights(np.array(weights) @ GRADIENTS, GRADIENTS, BOUND)
    assert fit.weights == pytest.approx(weights, rel=1e-12, abs=1e-13)
    assert fit.determined
    assert fit.exact


def test_sizes_that_differ_by_many_orders_do_not_matter():
    gradients = GRADIENTS * np.array([[1e-9], [1.0], [1e9]])
    fit = fit_weights(np.array((2.0, 3.0, 4.0)) @ gradients, gradients, BOUND)
    assert fit.determined
    # the smallest contribution is 1e-18 of the largest: lost in the observation itself
    assert fit.weights[1:] == pytest.approx((3.0, 4.0), rel=1e-6)


def test_what_is_no_combination_is_not_exact():
    observed = np.array((1.0, 1.0, 1.0)) @ GRADIENTS
    observed[2] += 1e-6
    fit = fit_weights(observed, GRADIENTS, BOUND)
    assert not fit.exact


def test_what_rounding_allows_is_exact():
    observed = np.array((1.0, 1.0, 1.0)) @ GRADIENTS
    observed[2] += 1e-13
    assert fit_weights(observed, GRADIENTS, BOUND).exact


@pytest.mark.parametrize(
    "gradients",
    [np.array([[1.0, 2.0], [2.0, 4.0]]), np.array([[1.0], [3.0]]), np.array([[1.0, 2.0], [1.0, 2.0 + 1e-9]])],
    ids=["proportional", "fewer elements than micro-batches", "proportional but for rounding"],
)
def test_weights_that_the_gradients_do_not_tell_apart_are_not_determined(gradients):
    fit = fit_weights(gradients.sum(axis=0), gradients, np.full(gradients.shape[1], 1e-12))
    assert not fit.determined


def test_a_micro_batch_without_a_gradient_has_no_weight():
    gradients = np.vstack([GRADIENTS[:2], np.zeros(4)])
    fit = fit_weights(np.array((0.5, 2.0, 7.0)) @ gradients, gradients, BOUND)
    assert fit.weights == pytest.approx((0.5, 2.0, 0.0))
    assert fit.determined


@pytest.mark.parametrize(("size", "exact"), [(1e-13, True), (1.1e-13, False)])
def test_gradients_of_0_give_what_rounding_allows(size, exact):
    fit = fit_weights(np.full(4, size), np.zeros((3, 4)), BOUND)
    assert not fit.determined
    assert fit.exact == exact


@pytest.mark.parametrize(("off", "exact"), [(250, True), (300, False)])
def test_what_the_fit_itself_rounds_is_exact(off, exact):
    """Of unit columns at 120 degrees the smaller singular value is sqrt(1/2); sizes of the sum are 3, 5 and 8.

    Rounding of 64 eps / sqrt(1/2) of each is 271, 453 and 724 eps; (-1, 1, 1) is no combination of the gradients.
    """
    gradients = np.array([[1.0, 0.0, 1.0], [0.0, 1.0, -1.0]])
    observed = np.array([3.0, 5.0]) @ gradients + off * 2.0**-52 * np.array([-1.0, 1.0, 1.0])
    fit = fit_weights(observed, gradients, np.zeros(3))
    assert fit.exact == exact
