"""A fault is read off the case that showed it: gradients known in closed form, combined with the
weights of a fault.

An item's loss is the product of its row with the parameters, so a micro-batch's summed gradient is
the sum of its rows. Of the eight items, micro-batches 0 to 2 hold 1, 2 and 3 and make the window
under test; the fourth, with 2, is the epoch's short last window.
"""

from __future__ import annotations

import numpy as np
import torch

from gradcheck_suite import Case, Plan, Problem
from gradcheck_suite.core.comparison import Comparison
from gradcheck_suite.judge.fitted_weights import diagnose_case
from gradcheck_suite.reference.large_batch import Reference
from gradcheck_suite.run.instance import user_instance
from tests.wording import assert_named

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
        [
            rows[plan.items(j).start : plan.items(j).stop].sum(axis=0)
            for j in range(len(plan.micro_batches))
        ]
    )


def _instance(rows, plan, *, sizes, reduction="mean"):
    def loss(model, batch):
        return getattr(model(batch["x"]), reduction)()

    problem = Problem(
        lambda seed: _Linear(sizes),
        lambda items, seed: {"x": torch.from_numpy(rows)},
        loss,
        reduction=reduction,
    )
    return user_instance(Case("rows.py:ROWS", plan), problem)


def _read(
    observed, *, rows=ROWS, plan=PLAN, sizes=None, window=0, epoch=0, allowed=ALLOWED, **instance
):
    width = rows.shape[1]
    sizes = sizes or (dict.fromkeys(PARAMETERS, 5) if width == 15 else {"a": width})
    reference = Reference(_instance(rows, plan, sizes=sizes, **instance))
    members = plan.windows[window]
    count = 1 if instance.get("reduction") == "sum" else sum(plan.micro_batches[j] for j in members)
    expected = _sums(rows, plan)[list(members)].sum(axis=0) / count
    comparison = Comparison(reference.layout, expected, observed, np.full(width, allowed))
    return diagnose_case(reference.window(window), comparison, epoch, alike=False)


def _gradient(*weights, rows=ROWS, plan=PLAN):
    return np.array(weights) @ _sums(rows, plan)


def _of(*weights, rows=ROWS, plan=PLAN, **options):
    """Return what `_read` takes of a gradient with these weights of the micro-batches."""
    return {
        "observed": _gradient(*weights, rows=rows, plan=plan),
        "rows": rows,
        "plan": plan,
        **options,
    }


def _with(array, at, value):
    """Return a copy with another value somewhere."""
    changed = array.copy()
    changed[at] = value
    return changed


def _but(row, at, value):
    """Return a row of the table whose gradient has another value somewhere."""
    return {**row, "observed": _with(row["observed"], at, value)}


def _only(names, weights, right=RIGHT):
    """Return the gradient with these weights in some parameters alone."""
    observed, wrong = _gradient(*right), _gradient(*weights)
    for name in names:
        observed[PARAMETERS[name]] = wrong[PARAMETERS[name]]
    return observed


def _hidden(size, seen, reduction):
    """Return seven elements that are 3 times what they should be.

    The eighth has some times what is allowed.
    """
    plan, rows = Plan((1, 3), 2), np.random.default_rng(3).integers(1, 10, (4, 8)).astype(float)
    right = 1.0 if reduction == "sum" else 1 / 4
    rows[:, 7] = 0
    # the larger of the two micro-batches' gradients
    rows[1, 7] = size * ALLOWED / right
    tripled = _of(3 * right, 3 * right, rows=rows, plan=plan, reduction=reduction)
    return _but(tripled, 7, seen * ALLOWED)


def _moved(weights, share, at):
    """Return a gradient of 80 items that rounding moves as far from these weights as it can move
    one of them.

    That is much further than 1e-12, and than its share of the gradient.
    """
    sums, allowed = _sums(MANY, OF_MANY), 2.0**-20
    read = sums if at == 3 else sums[:3]
    inverse = np.linalg.pinv(read.T)[at]
    observed = np.array(weights) @ sums
    observed += (
        share * allowed * np.sign(inverse)
        if at == 0
        else 4 * np.abs(inverse).sum() * allowed * share * sums[3]
    )
    return {"observed": observed, "rows": MANY, "plan": OF_MANY, "allowed": allowed}


MEANS = (1 / 3, 1 / 6, 1 / 9, 0)
DOUBLED = (2 / 6, 2 / 6, 2 / 6, 0)
PAIRS = Plan((1, 2, 3, 2), 2)
SHORT = Plan((1, 2, 3), 3)
TWO, OF_TWO = np.array([[3.0, 5.0, 7.0], [2.0, 11.0, 4.0], [1.0, 13.0, 6.0]]), Plan((1, 2), 2)
MANY = np.random.default_rng(5).integers(1, 10, (80, 15)).astype(float)
OF_MANY = Plan((10, 20, 30, 20), 3)
WIDE = np.random.default_rng(1).integers(1, 10, (8, 40)).astype(float)
IN_HALF = _but(
    _of(*RIGHT, rows=WIDE, sizes=dict.fromkeys("abcdefgh", 5)),
    slice(20),
    _gradient(*DOUBLED, rows=WIDE)[:20],
)
FIRST = float(_gradient(*RIGHT)[0])
NONE_IN_B = {"observed": _only("b", (0, 0, 0, 0))}
ONE = np.array([[3.0], [2.0], [7.0], [1.0], [11.0]])
OF_ONE = Plan((1, 1, 2, 1), 2)
BASE = np.random.default_rng(1).standard_normal((8, 8))
EIGHT = Plan((1,) * 8, 4)
MULTIPLES = np.hstack([BASE, -2 * BASE[:, :7]])
REACHED = _with(np.random.default_rng(3).standard_normal((4, 5)), (2, slice(2)), 0)


def _one(*weights, window=0, rows=ONE, plan=OF_ONE):
    return _of(*weights, rows=rows, plan=plan, window=window)


def _in_bfloat16(values):
    return torch.tensor(values).bfloat16().double().numpy()


def _dependent(scale):
    """Return a problem of five elements, of which the fourth is a sum of others, and one with a
    sixth that is, too.
    """
    base = scale * np.random.default_rng(2).standard_normal((4, 4))
    rows = np.column_stack([base[:, :3], base[:, 0] - 3 * base[:, 1], base[:, 3]])
    five = {"rows": rows, "plan": Plan((1,) * 4, 2), "sizes": {"a": 4, "b": 1}}
    return five, {
        **five,
        "rows": np.column_stack([rows, rows[:, 4] + rows[:, 0]]),
        "sizes": {"a": 4, "b": 2},
    }


def _later(problem):
    """Return the gradient that has the next window's first micro-batch too."""
    return {"observed": problem["rows"][:3].sum(axis=0) / 2, **problem}


NAMED = {
    "mean-of-means": {
        "all": _of(*MEANS),
        "an element that other windows alone reach": _of(
            *MEANS, rows=_with(ROWS, (slice(6), 0), 0)
        ),
        "in one parameter": {"observed": _only("b", MEANS)},
        "in two parameters": {"observed": _only("ac", MEANS)},
        # two weights that fit a pattern are no coincidence
        "of two elements": _of(1 / 2, 1 / 4, rows=TWO[:, :2], plan=OF_TWO),
        "of one element": _one(0, 0, 1 / 4, 1 / 2, window=1),
        "of one element, over 3 in a window of two": _one(
            0,
            0,
            0,
            1 / 3,
            1 / 6,
            window=1,
            rows=np.vstack([ONE, [[5.0]]]),
            plan=Plan((1, 1, 1, 1, 2), 3),
        ),
    },
    "wrong-scale": {
        "twice": _of(*DOUBLED),
        "the last window": _of(0, 0, 0, 1, window=1),
        "twice in the first epoch": _of(*DOUBLED[:3], rows=ROWS[:6], plan=SHORT),
        "a sum": _of(*RIGHT, reduction="sum"),
        # right is 1/6 of each, the second's two items among the six
        "one that reaches nothing": _of(1 / 2, 0, 1 / 2, 0, rows=_with(ROWS, slice(1, 3), 0)),
        "K": _of(2 / 3, 2 / 3, 0, 0, plan=PAIRS),
        "not K, since the first step was right": _of(0, 0, 2 / 5, 2 / 5, plan=PAIRS, window=1),
        "K where nothing of the first step can be read": _of(
            0, 0, 2 / 5, 2 / 5, rows=_with(ROWS, slice(3), 0), plan=PAIRS, window=1
        ),
        "not K, since the second step was right": _of(
            0,
            0,
            0,
            0,
            1 / 2,
            1 / 2,
            rows=_with(ROWS, slice(2), 0),
            plan=Plan((1, 1, 1, 1, 2, 2), 2),
            window=2,
        ),
        **{
            # window 1 was right in earlier epochs, and window 0 in all before
            f"window {window} of epoch {epoch}": _of(
                *(0.7 / count * (j // 2 == window) for j in range(4)),
                plan=PAIRS,
                window=window,
                epoch=epoch,
            )
            for window, count in enumerate((3, 5))
            for epoch in (1, 2)
        },
        "in four parameters of eight": IN_HALF,
        "in six parameters of eight": _but(IN_HALF, slice(20, 30), 2 * IN_HALF["observed"][20:30]),
        "beside elements that are off by what is allowed": _but(
            {"observed": _only("b", DOUBLED)}, 0, FIRST + ALLOWED
        ),
        "beside some that are less": _but({"observed": _only("b", DOUBLED)}, 0, FIRST - ALLOWED),
        "in two sizes": {"observed": _only("b", (3 / 6, 3 / 6, 3 / 6, 0), right=DOUBLED)},
        "of one element, a factor of the run": _one(2, rows=ONE[:1], plan=Plan((1,), 2)),
        "of one element, the root of K": _one(2**0.5 / 2, rows=ONE[:2], plan=Plan((2,), 2)),
        "of one element, the sign": _one(-1 / 2, rows=ONE[:2], plan=Plan((2,), 2)),
        "of one element, a loss scale": _one(2.0**7 / 2, rows=ONE[:2], plan=Plan((2,), 2)),
        "of one element, a loss scale twice": _one(2.0**-7 / 2, rows=ONE[:2], plan=Plan((2,), 2)),
        "of one element, a sign in a window of two": _one(-1 / 2, -1 / 2, 0, 0),
        "of one element, half": _one(1 / 4, 1 / 4, 0, 0),
        "of one element that one of two reaches": _of(
            2 / 3, 0, rows=_with(TWO, slice(1, 3), 0)[:, :1], plan=OF_TWO
        ),
        "of two elements that one of two reaches": _of(
            1.7 / 3, 0, rows=_with(TWO, slice(1, 3), 0)[:, :2], plan=OF_TWO
        ),
        **{
            f"{reduction}: rounding hides {size} of an element, and leaves {seen}": _hidden(
                size, seen, reduction
            )
            for reduction in ("mean", "sum")
            for size, seen in ((0.9, 0), (1, 0), (1.1, 0), (0.9, 1), (0.9, 1.1), (0, 1.1))
        },
        "moved by rounding": _moved((2 / 60, 2 / 60, 2 / 60, 0), 0.9, 0),
        "another window within rounding": _moved((2 / 60, 2 / 60, 2 / 60, 0), 0.9, 3),
        # whatever the last element is, four weights fit: that the fourth is a sum of the others
        # says nothing
        **{
            f"an element of five that depend, at {scale}": {
                "observed": five["rows"][:2].sum(axis=0) / 2 * [1, 1, 1, 1, 2],
                **five,
            }
            for scale in (1.0, 1e-7)
            for five, _ in (_dependent(scale),)
        },
    },
    "dropped-micro-batch": {
        "middle": _of(1 / 6, 0, 1 / 6, 0),
        "in one parameter, where the second has a gradient of 0": {
            **NONE_IN_B,
            "rows": _with(ROWS, slice(1, 3), 0),
            "observed": _with(
                _gradient(*RIGHT, rows=_with(ROWS, slice(1, 3), 0)), PARAMETERS["b"], 0
            ),
        },
        "of one element, the first": _one(0, 0, 1 / 2, 0, window=1),
        "of one element, the second": _one(1 / 2, 0, 0, 0),
        "of one element, the first of two": _one(0, 1 / 2, 0, 0),
    },
    "reset-inside-window": {"all": _of(0, 0, 1 / 6, 0)},
    "no-gradient": {
        "all": _of(0, 0, 0, 0),
        "in one parameter": NONE_IN_B,
        "in one parameter, where an item of another window has a gradient of 0": {
            **NONE_IN_B,
            "rows": _with(ROWS, 7, 0),
        },
        "of one element": _one(0, rows=ONE[:1], plan=Plan((1,), 2)),
    },
    "other-window": {
        "the next": _of(1 / 6, 1 / 6, 1 / 6, 1 / 2),
        "a trace, which is no rounding": _of(1 / 6, 1 / 6, 1 / 6, 1e-9),
        "beyond rounding": _moved((2 / 60, 2 / 60, 2 / 60, 0), 1.1, 3),
        # a share that no known fault has
        "of three elements": _of(1, 0.3, rows=TWO, plan=Plan((1, 2), 1)),
        "of one element, the window before": _one(1 / 2, 1 / 2, 0, 0, window=1),
        "of one element, the next too": _one(1 / 2, 1 / 2, 1 / 3, 1 / 3),
        "of one element, the next": _one(0, 0, 1 / 3, 1 / 3),
        "of elements that are no multiples": {
            "observed": np.hstack([BASE, BASE[:, :7] ** 2])[:5].sum(axis=0) / 4,
            "rows": np.hstack([BASE, BASE[:, :7] ** 2]),
            "plan": EIGHT,
        },
        # a wrong element that depends on others, or a second one that depends on the first, tells
        **{
            f"of {number} that depend, at {scale}": _later(problem)
            for scale in (1.0, 1e-7)
            for number, problem in zip(("five", "six"), _dependent(scale), strict=True)
        },
        # the third micro-batch does not reach the first two elements: the others are three, and
        # tell two weights
        "where three elements tell two weights": _later(
            {"rows": REACHED, "plan": Plan((1,) * 4, 2)}
        ),
    },
    "stale-window": {
        "a trace in epoch 1": _of(1 / 6, 1 / 6, 1 / 6, 1e-9, epoch=1),
        "in the last window": _of(1 / 6, 0, 0, 1 / 2, window=1),
        # the steps before were judged right, so a factor that all steps have is refuted
        "twice in epoch 1": _of(*DOUBLED[:3], rows=ROWS[:6], plan=SHORT, epoch=1),
        "of one element, a factor of the run in epoch 1": _one(2, rows=ONE[:1], plan=Plan((1,), 2))
        | {"epoch": 1},
        "of three elements": _of(0.3, 1 / 2, rows=TWO, plan=Plan((1, 2), 1), window=1),
        "of one element, the window before too": _one(1 / 2, 1 / 2, 1 / 3, 1 / 3, window=1),
    },
    "low-precision": {
        # rounding keeps a factor of -2, so weights of other windows' micro-batches can fit a
        # rounded gradient exactly
        "of multiples": {
            "observed": _in_bfloat16(MULTIPLES[:4].sum(axis=0) / 4),
            "rows": MULTIPLES,
            "plan": EIGHT,
        },
    },
    "wrong-scale or low-precision": {
        # -x and 2x round as x does: all that is known is one number
        "of three multiples": {
            "observed": _in_bfloat16([1.2345, -1.2345, 2.469]),
            "rows": np.array([[1.2345, -1.2345, 2.469], *TWO[1:]]),
            "plan": Plan((1, 2), 1),
        },
    },
    "partial-gradient": {
        "where two elements tell no two weights": _later(
            {"rows": REACHED[:, :4], "plan": Plan((1,) * 4, 2)}
        ),
    },
    "": {
        "right": _of(*RIGHT),
        "weights of no pattern": _of(0.3, 0.1, 0.2, 0),
        "squares": {"observed": _gradient(*RIGHT) ** 2},
        **{f"{value} in the gradient": _but(_of(*MEANS), 0, value) for value in (np.nan, np.inf)},
        **{
            f"{value} in another window": {**_of(*MEANS), "rows": _with(ROWS, (7, 14), value)}
            for value in (np.nan, np.inf)
        },
        "beside an element that is off by more than is allowed": _but(
            {"observed": _only("b", DOUBLED)}, 0, FIRST + 1.01 * ALLOWED
        ),
        "beside one that is off by 1e-9": _but({"observed": _only("b", DOUBLED)}, 0, FIRST + 1e-9),
        **{
            f"twice but for element {j}": _but(_of(*DOUBLED), j, _gradient(*RIGHT)[j])
            for j in (0, 7, 14)
        },
        "two faults": {
            "observed": _with(
                _only("b", DOUBLED), PARAMETERS["c"], _gradient(1 / 6, 0, 1 / 6, 0)[PARAMETERS["c"]]
            )
        },
        "of one element, no factor of the run": _one(1.7, rows=ONE[:1], plan=Plan((1,), 2)),
        # nor is it said to be left over from the epoch before
        "of one element, in epoch 1": _one(1.7, rows=ONE[:1], plan=Plan((1,), 2)) | {"epoch": 1},
        "of one element, 1.3": _one(1.3 / 2, rows=ONE[:2], plan=Plan((2,), 2)),
        "of one element, no pattern": _one(0, 0, 0.31, 0.29, window=1),
        "of one element that one of two reaches": _of(
            1.7 / 3, 0, rows=_with(TWO, slice(1, 3), 0)[:, :1], plan=OF_TWO
        ),
        "further than rounding": _of(
            2.002 / 60, 2 / 60, 2 / 60, 0, rows=MANY, plan=OF_MANY, allowed=2.0**-20
        ),
        "of two elements, another window": _of(1, 0.3, rows=TWO[:, :2], plan=Plan((1, 2), 1)),
        "of two elements, an earlier window": _of(
            0.3, 1 / 2, rows=TWO[:, :2], plan=Plan((1, 2), 1), window=1
        ),
    },
}
"""Name -> what it is -> what `_read` takes; what has no name is not guessed."""


def test_a_gradient_has_the_name_of_its_weights(golden):
    found = {
        (name, title): _read(**row) for name, rows in NAMED.items() for title, row in rows.items()
    }
    told = {at: (one.name, one.explanation()) if one else (None, "") for at, one in found.items()}
    assert_named(golden, "judge_fitted_weights", told)
