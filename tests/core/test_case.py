"""Cases: what is drawn can be stored, pasted, named by its digest, and not be tampered with
unnoticed.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given

import gradcheck_suite
from gradcheck_suite import (
    Case,
    Input,
    Layer,
    Loss,
    Plan,
    ProblemSpec,
    UsageError,
    case_from_json,
    cases,
)
from gradcheck_suite.catalogue.description import describe_plan
from gradcheck_suite.core.case import layer_from_json, plan_from_json, problem_from_json
from gradcheck_suite.core.contract import BUSY_RANKS, EQUAL_MICRO_BATCHES, EVEN_RANKS, WHOLE_WINDOWS
from gradcheck_suite.core.text import split_text
from gradcheck_suite.strategies.plans import plans

CASE = Case(
    ProblemSpec(
        Input("vector", size=2),
        (Layer("linear", features=1, bias=True),),
        Loss("mse", reduction="mean"),
    ),
    Plan((1, 2), 2),
    seed=7,
)
USERS = Case(
    "model.py:PROBLEM", Plan((3, 1, 1), 2, 2), dtype="float32", optimizer="adamw", seed=2**32 - 1
)


@given(cases())
def test_json_round_trip_in_case(case):
    assert case_from_json(json.loads(json.dumps(case.to_json()))) == case


@given(cases())
def test_the_repr_evaluates_to_an_equal_case_with_the_public_names_alone(case):
    public = {
        name: getattr(gradcheck_suite, name)
        for name in ("Case", "Plan", "ProblemSpec", "Input", "Layer", "Loss")
    }
    assert set(public) <= set(gradcheck_suite.__all__)
    again = eval(repr(case), {**public, "__builtins__": {}})
    assert again == case
    assert hash(again) == hash(case)
    assert again.digest == case.digest


@pytest.mark.parametrize(("case", "digest"), [(CASE, "833a72879a75"), (USERS, "31682533d3ea")])
def test_digests_stay_what_they_are(case, digest):
    """A digest names files and appears in reports: the same case has the same one in every version
    of schema 1.
    """
    assert case.digest == digest
    assert case_from_json(json.loads(json.dumps(case.to_json()))).digest == digest


OTHERS = {
    "problem": USERS.problem,
    "plan": Plan((2, 1), 2),
    "dtype": "float32",
    "device": "cuda",
    "seed": 8,
    "optimizer": "sgd",
    "groups": 2,
    "distinct_items": 1,
}
"""Another value of every field than that of `CASE`."""


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(CASE)])
def test_every_field_has_a_part_in_the_digest(field):
    assert dataclasses.replace(CASE, **{field: OTHERS[field]}).digest != CASE.digest


def _without(name):
    return {key: value for key, value in CASE.to_json().items() if key != name}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "not a gradcheck-suite case: expected an object with 'problem' and 'plan'"),
        ([1, 2], "not a gradcheck-suite case"),
        ({"name": "something else"}, "not a gradcheck-suite case"),
        (_without("plan"), "not a gradcheck-suite case"),
        (_without("problem"), "not a gradcheck-suite case"),
        (_without("schema"), "case schema must be 1, got None: it comes from another version"),
        (
            {**CASE.to_json(), "schema": 2},
            "case schema must be 1, got 2: it comes from another version",
        ),
        ({**CASE.to_json(), "colour": "red"}, "case has unknown fields ['colour']"),
        (
            {**CASE.to_json(), "seed": 8},
            f"case was edited: its digest is {CASE.digest!r} but its content has",
        ),
        (_without("seed"), "case was edited"),
        ({**CASE.to_json(), "digest": None}, "case was edited"),
        ({**CASE.to_json(), "seed": "8"}, "seed must be an integer from 0 to 4294967295, got '8'"),
        (
            {**CASE.to_json(), "problem": 3},
            "problem: expected an object with 'input', 'layers' and 'loss'",
        ),
        ({**CASE.to_json(), "plan": []}, "plan: expected an object, got []"),
    ],
)
def test_edited_foreign_and_truncated_data_is_refused(data, message):
    with pytest.raises(UsageError) as error:
        case_from_json(data)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_edit_is_accepted_once_its_digest_is_removed():
    assert case_from_json({**_without("digest"), "seed": 8}) == CASE.replace(seed=8)


@pytest.mark.parametrize("field", ["groups", "distinct_items"])
def test_a_field_that_came_later_is_written_and_read_where_it_has_no_default(field):
    other = CASE.replace(**{field: 3})
    assert case_from_json(json.loads(json.dumps(other.to_json()))) == other
    assert eval(repr(other)) == other
    assert field not in CASE.to_json()
    assert field not in repr(CASE)


# Plans: how micro-batches make windows, and which plans are none.


def test_windows_are_consecutive_and_the_last_may_be_short():
    plan = Plan((1, 2, 3, 4, 5), 2, 3)
    assert plan.windows == ((0, 1), (2, 3), (4,))
    assert plan.starts == (0, 1, 3, 6, 10)
    assert [list(plan.items(j)) for j in (0, 1, 4)] == [[0], [1, 2], [10, 11, 12, 13, 14]]
    assert [plan.window_items(w) for w in range(3)] == [range(3), range(3, 10), range(10, 15)]
    assert plan.total_items == 15
    assert plan.steps == 9
    assert plan.has_short_window


def test_an_epoch_shorter_than_the_accumulation_steps_is_one_short_window():
    plan = Plan((2, 1), 5)
    assert plan.windows == ((0, 1),)
    assert plan.steps == 1
    assert plan.has_short_window


@pytest.mark.parametrize(
    ("plan", "limit"),
    [(Plan((1,), 1), 10), (Plan((1, 2, 1), 2, 2), 20), (Plan((1,) * 5, 3, 4), 48)],
)
def test_a_loop_may_step_twice_for_each_micro_batch_and_eight_times_more(plan, limit):
    assert plan.step_limit == limit


def test_masked_indices_are_sorted_and_told_once():
    assert Plan((1, 1, 1), 3, masked=(2, 0, 2)).masked == (0, 2)


def test_selected_micro_batches_keep_their_masks_and_all_other_fields():
    plan = Plan((1, 2, 3, 4), 2, 3, masked=(1, 2))
    assert plan.select((3, 1)) == Plan((4, 2), 2, 3, masked=(1,))


def test_json_without_epochs_and_masks_is_one_epoch_without_masks():
    assert plan_from_json({"micro_batches": [2, 1], "accumulation_steps": 2}) == Plan(
        (2, 1), 2, 1, ()
    )


# Plans of several ranks: what each rank gets, and that a plan of one rank is what it was.


def test_a_window_has_the_micro_batches_of_all_ranks():
    plan = Plan((1, 2, 3, 4, 5), 2, ranks=(3, 2))
    assert plan.windows == ((0, 1, 2, 3), (4,))
    assert plan.owners == (0, 0, 1, 1, 0)
    assert (plan.of_rank(0), plan.of_rank(1)) == ((0, 1, 4), (2, 3))
    assert (plan.world_size, plan.steps, plan.has_short_window, plan.has_idle_rank) == (
        2,
        2,
        True,
        True,
    )
    assert split_text(plan) == "[1 2 / 3 4 | 5 / -]"
    assert describe_plan(plan)[0].endswith("; 1 epoch; 2 ranks, between which / stands")


def test_one_rank_is_the_plan_without_ranks():
    plan = Plan((1, 2), 1, ranks=(2,))
    assert plan == Plan((1, 2), 1)
    assert "ranks" not in plan.to_json()
    assert repr(plan) == "Plan(micro_batches=(1, 2), accumulation_steps=1, epochs=1, masked=())"


def test_select_keeps_micro_batches_at_their_ranks():
    plan = Plan((1, 2, 3, 4, 5), 2, masked=(3,), ranks=(3, 2))
    assert plan.select((0, 3, 4)) == Plan((1, 5, 4), 2, masked=(2,), ranks=(2, 1))
    assert plan.select((2, 3)) == Plan((3, 4), 2, masked=(1,))


def test_select_finds_the_ranks_of_many():
    assert Plan((1,) * 300, 1, ranks=(1,) * 300).select((0, 299)) == Plan((1, 1), 1, ranks=(1, 1))


@given(plans(ranks=4, maskable=True))
def test_every_micro_batch_is_in_one_window_of_one_rank(plan):
    assert 2 <= plan.world_size <= 4
    assert [j for window in plan.windows for j in window] == list(range(len(plan.micro_batches)))
    for rank, count in enumerate(plan.ranks):
        own = plan.of_rank(rank)
        assert len(own) == count
        assert sorted(own) == list(own)
        k = plan.accumulation_steps
        assert [j for w in plan.windows for j in w if plan.owners[j] == rank] == list(own)
        assert all(
            [j for j in w if plan.owners[j] == rank] == list(own[i * k : (i + 1) * k])
            for i, w in enumerate(plan.windows)
        )
    assert plan_from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert eval(repr(plan)) == plan


@given(
    plans(ranks=3, assumes=(BUSY_RANKS,)), plans(ranks=3, assumes=(EVEN_RANKS, EQUAL_MICRO_BATCHES))
)
def test_plans_are_within_what_a_loop_assumes_of_ranks(busy, even):
    assert not busy.has_idle_rank
    assert len(set(even.ranks)) == 1
    assert all(len({even.micro_batches[j] for j in window}) == 1 for window in even.windows)


@given(plans(ranks=2, assumes=(WHOLE_WINDOWS,)))
def test_whole_windows_are_whole_on_every_rank(plan):
    assert not plan.has_short_window


# Specs: frozen data that prints and travels, and says what is wrong with it.


SPEC = ProblemSpec(
    Input("tokens", length=3, vocabulary=5, padded=True),
    (
        Layer("embedding", features=2, sparse=False, padding_idx=True),
        Layer("residual", Layer("tanh"), Layer("linear", features=2, bias=True)),
    ),
    Loss("mse", reduction="sum"),
)


def test_options_are_kept_by_name_whatever_their_order():
    assert Layer("linear", features=2, bias=True) == Layer("linear", bias=True, features=2)
    assert hash(Layer("linear", features=2, bias=True)) == hash(
        Layer("linear", bias=True, features=2)
    )
    assert Layer("linear", features=2, bias=True) != Layer("linear", features=3, bias=True)
    assert Layer("tanh") != Input("tanh")


def test_layers_inside_others_count():
    layers = (Layer("residual", Layer("shared", Layer("linear", features=2))), Layer("tanh"))
    assert ProblemSpec(SPEC.input, layers, SPEC.loss).layer_kinds == [
        "residual",
        "shared",
        "linear",
        "tanh",
    ]


def test_the_reduction_of_a_loss_is_mean_unless_stated():
    assert Loss("mse").reduction == "mean"
    assert Loss("mse", reduction="sum").reduction == "sum"


LINEAR_2 = Layer("linear", features=2, bias=True)
TIED = ProblemSpec(
    Input("vector", size=2), (LINEAR_2, LINEAR_2), Loss("mse"), ties=(("1.weight", "0.weight"),)
)


# What is refused, and what is said.


def _plan_json(**changes):
    return lambda: plan_from_json({"micro_batches": [1], "accumulation_steps": 1} | changes)


def _problem_json(**changes):
    return lambda: problem_from_json({**SPEC.to_json(), **changes})


RANKS = "ranks must be positive integers that add up to the 3 micro-batches"
TIES = "ties must be pairs of a name and one of an earlier layer"
SEED = "seed must be an integer from 0 to 4294967295, got "


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CASE.replace(problem=3), "Case: problem must be a ProblemSpec or 'FILE.py:NAME', got 3"),
        (lambda: CASE.replace(plan=(1, 2)), "Case: plan must be a Plan, got (1, 2)"),
        (lambda: CASE.replace(dtype="int8"), "dtype must be one of float64, float32, bfloat16, float16; got 'int8'"),
        (lambda: CASE.replace(device="tpu"), "device must be one of cpu, cuda; got 'tpu'"),
        *((lambda seed=seed: CASE.replace(seed=seed), f"{SEED}{seed}") for seed in (-1, 2**32, True)),
        (lambda: CASE.replace(optimizer=3), "optimizer must be a name or None, got 3"),
        *((lambda n=n: CASE.replace(groups=n), "groups must be a positive integer") for n in (0, -1, 1.5, True, "2")),
        (lambda: CASE.replace(distinct_items=-1), "distinct_items must be an integer from 0 on, got -1"),
        (lambda: CASE.replace(plan=Plan((1, 1), 2, masked=(0,)), distinct_items=1), "drop plan.masked"),
        (lambda: Plan((), 1), "micro_batches must be positive integers, at least one, got ()"),
        (lambda: Plan((1, 0), 1), "micro_batches must be positive integers, at least one, got (1, 0)"),
        *((lambda n=n: Plan((1, n), 1), "micro_batches must be positive integers") for n in (True, 2.0)),
        (lambda: Plan((1,), 0), "accumulation_steps must be a positive integer, got 0"),
        (lambda: Plan((1,), True), "accumulation_steps must be a positive integer, got True"),
        (lambda: Plan((1,), 1, 0), "epochs must be a positive integer, got 0"),
        (lambda: Plan((1,), 1, "2"), "epochs must be a positive integer, got '2'"),
        *((lambda j=j: Plan((1, 1), 2, 1, (j,)), f"masked must be indices of micro-batches below 2, got ({j},)")
          for j in (2, 5, -1)),
        (lambda: Plan((1, 1, 1), 2, 1, (2,)), "window 1 has no valid targets: all its micro-batches (2,) are masked"),
        (lambda: Plan((1,) * 4, 2, masked=(0, 1, 2)), "window 0 has no valid targets: all its micro-batches (0, 1)"),
        *((lambda ranks=ranks: Plan((1, 1, 1), 2, ranks=ranks), RANKS)
          for ranks in ((1, 1), (2, 2), (3, 0), (2, True), (4, -1))),
        (lambda: plan_from_json(None), "plan: expected an object, got None"),
        (lambda: plan_from_json({"micro_batches": [1]}), "plan: missing ['accumulation_steps'], unknown []"),
        (_plan_json(epoch=2), "plan: missing [], unknown ['epoch']"),
        (_plan_json(micro_batches=3), "plan: micro_batches must be a list, got 3"),
        (_plan_json(masked=0), "plan: masked must be a list, got 0"),
        (_plan_json(micro_batches=["1"]), "micro_batches must be positive integers"),
        (lambda: Layer(3), "Layer: kind must be a string, got int"),
        (lambda: Layer("linear", features=[2]), "Layer('linear'): option 'features' must be a bool, int, float, str"),
        (lambda: Layer("residual", "tanh"), "Layer('residual'): inner layers must be Layer, got str"),
        (lambda: ProblemSpec(SPEC.input, ("tanh",), SPEC.loss), "ProblemSpec: layers must be Layer, got str"),
        (lambda: ProblemSpec(SPEC.loss, SPEC.layers, SPEC.loss), "ProblemSpec: expected an Input, a sequence of Layer"),
        *((lambda ties=ties: ProblemSpec(TIED.input, TIED.layers, TIED.loss, ties), TIES)
          for ties in ((("0", "1"),), (("1",),), ((1, 0),), (("1", "0", "0"),), (("a", "0"),))),
        (lambda: layer_from_json(None), "layer: expected an object with a string 'kind', got None"),
        *((lambda data=data: problem_from_json(data), "problem: expected an object with 'input', 'layers' and 'loss'")
          for data in ([], {"input": {}, "layers": []})),
        (_problem_json(input={"length": 3}), "input: expected an object with a string 'kind'"),
        (_problem_json(loss="mse"), "loss: expected an object with a string 'kind', got 'mse'"),
        (_problem_json(layers="tanh"), "problem: 'layers' must be a list, got 'tanh'"),
        (_problem_json(layers=[{"kind": "residual", "layers": "tanh"}]), "'layers' must be a list, got 'tanh'"),
        (_problem_json(layers=[{"kind": "linear", "features": [2]}]), "option 'features' must be a bool"),
    ],
)  # fmt: skip
def test_a_bad_case_plan_or_spec_is_one_clear_line(make, message):
    with pytest.raises(UsageError) as error:
        make()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "frozen", [CASE, USERS.plan, SPEC, *SPEC.layers, SPEC.loss], ids=lambda f: type(f).__name__
)
def test_cases_plans_and_specs_are_frozen(frozen):
    for field in dataclasses.fields(frozen):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, field.name, 1)
    with pytest.raises(TypeError):
        SPEC.layers[0].o["features"] = 3
