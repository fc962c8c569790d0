"""Wrappers of torch over ranks: FSDP2, variants of DistributedDataParallel, hooks, and ZeroRedundancyOptimizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradcheck_suite import Plan
from gradcheck_suite.core.case import PARAMETER, Case, Input, Layer, Loss, ProblemSpec, probe_case
from gradcheck_suite.loops.ranks import RANK_LOOPS, RANK_MODES
from gradcheck_suite.loops.reset_modes import MODES
from gradcheck_suite.run.instance import generated_instance
from gradcheck_suite.run.ranks import run_ranks
from gradcheck_suite.verification.check import check
from gradcheck_suite.verification.verify import verify
from tests.verification import rank_loops

pytestmark = pytest.mark.usefixtures("ranks")
EVEN = Plan((1, 3, 3, 9), 2, 2, ranks=(2, 2))
LONG = Plan((1, 3) * 8, 2, ranks=(8, 8))
"""Four windows."""
SQUARE = ProblemSpec(Input("vector", size=4), (Layer("linear", bias=True, features=4),), Loss("mse", reduction="mean"))
ROUTED = ProblemSpec(Input("vector", size=2), (Layer("mixture", experts=2, features=2),), Loss("mse", reduction="sum"))
SPLIT = ProblemSpec(
    Input("vector", size=4),
    (Layer("linear", bias=True, features=3), Layer("linear", bias=True, features=1)),
    Loss("mse", reduction="mean"),
)
"""Two ranks split the first layer by columns; neither number of features of the second is even, so it stays whole."""
VARIANTS = [name for name in RANK_LOOPS if name not in RANK_MODES]
PAGE = Path(__file__).parents[2] / "docs" / "ranks.md"


def outcome(loop, case):
    """Return `"holds"`, or the diagnosis."""
    verdict = check(loop, case)
    assert not verdict.skipped
    return "holds" if verdict.violation is None else verdict.violation.diagnosis


@pytest.mark.full
def test_gradients_that_ranks_share_out_are_gathered():
    for name in ("fsdp2/zero_grad", "fsdp2/set_to_none", "fsdp2_resharded/zero_grad"):
        assert outcome(RANK_LOOPS[name], probe_case(EVEN)) == "holds", name
    (first, second) = run_ranks(RANK_LOOPS["fsdp2/zero_"], generated_instance(probe_case(EVEN)))
    for observed in (first.observations, second.observations):
        assert [o.gradients[PARAMETER].tolist() for o in observed] == [[1 / 16] * 16] * 2


@pytest.mark.full
def test_a_rank_without_a_micro_batch_resets_its_gradients_too():
    uneven = Plan((2, 1, 1), 1, ranks=(2, 1))
    for mode in MODES:
        assert outcome(RANK_LOOPS[f"all_reduce/{mode}"], probe_case(uneven)) == "holds", mode


@pytest.mark.full
def test_steps_that_ranks_share_out_are_judged_as_one_step():
    case = Case(SQUARE, EVEN, optimizer="adam")
    assert outcome(RANK_LOOPS["zero_redundancy/zero_grad"], case) == "holds"
    assert outcome(rank_loops.parts_not_sent, case) == "parameter-drift"


@pytest.mark.full
def test_a_scheduler_of_a_rank_is_held_to_its_own_micro_batches():
    case = Case(SQUARE, Plan((1, 3, 3, 9, 1), 2, ranks=(3, 2)))
    assert outcome(rank_loops.scheduler_per_micro_batch, case) == "scheduler-per-micro-batch"
    for loop in (rank_loops.scheduler_per_window, rank_loops.scheduler_as_accelerate):
        assert outcome(loop, case) == "holds"


@pytest.mark.full
@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_holds(name):
    result = verify(RANK_LOOPS[name], examples=4, ranks=2)
    assert result.holds, result.violation


def _table():
    """Return the table of the page: (wrapper, reset mode) -> what the page says."""
    lines = [line.strip("| ").split("|") for line in PAGE.read_text().splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip().strip("`") for cell in cells] for cells in lines]
    return {f"{wrapper}/{row[0]}": said for row in rows for wrapper, said in zip(head[1:], row[1:], strict=True)}


def test_the_page_has_every_reset_mode_in_every_wrapper():
    assert sorted(_table()) == sorted(rank_loops.IN_MODES)
    assert len(rank_loops.IN_MODES) == len(MODES) * len(rank_loops.WRAPPERS)


@pytest.mark.full
def test_every_row_of_the_page_is_true():
    # the weight probe has no layer to split
    cases = {name: Case(SPLIT, EVEN) if "tensor" in name else probe_case(EVEN) for name in rank_loops.IN_MODES}
    found = {name: outcome(loop, cases[name]) for name, loop in rank_loops.IN_MODES.items()}
    assert found == _table()
    for name, loop in RANK_LOOPS.items():
        assert found.get(name, "holds") == "holds", (name, loop)


@pytest.mark.full
def test_fully_shard_adds_gradients_of_different_parameters_where_ranks_reach_different_ones():
    # pytorch#158719: each item goes to one expert, and here the two ranks' items go to different ones
    verdict = check(rank_loops.fsdp2_without_zeros, Case(ROUTED, Plan((1, 1), 1, ranks=(1, 1)), seed=1))
    assert (verdict.violation.kind, verdict.violation.diagnosis) == ("gradient", "permuted-gradient")
    assert "or leave out parameters without a gradient" in verdict.violation.explanation
    # and here to the same one
    assert check(rank_loops.fsdp2_without_zeros, Case(ROUTED, Plan((1, 1), 1, ranks=(1, 1)), seed=4)).holds


@pytest.mark.full
def test_a_rank_that_steps_alone_on_sharded_parameters_is_a_deadlock():
    violation = check(rank_loops.steps_on_one_rank, probe_case(EVEN)).violation
    assert violation.diagnosis in ("deadlock", "mismatched-collectives"), violation.explanation


@pytest.mark.full
def test_a_static_graph_under_no_sync_from_the_first_backward_on_is_an_assertion_of_torch():
    # pytorch#143580
    violation = check(rank_loops.static_graph_under_no_sync, probe_case(EVEN)).violation
    assert violation.kind == "raised"
    assert "expect_autograd_hooks_" in violation.explanation
    assert "must not be under no_sync" in violation.explanation


@pytest.mark.full
def test_a_hook_that_sends_bfloat16_is_named_unless_the_model_is_in_bfloat16():
    for dtype, expected in (("float64", "rounded-gradient"), ("float32", "rounded-gradient"), ("bfloat16", "holds")):
        assert outcome(rank_loops.bfloat16_hook, Case(SQUARE, EVEN, dtype=dtype)) == expected, dtype


@pytest.mark.full
def test_a_mixed_precision_policy_is_declared_and_one_that_adds_up_in_bfloat16_is_named():
    for dtype in ("float64", "float32"):
        result = verify(RANK_LOOPS["fsdp2_bfloat16/zero_grad"], examples=4, ranks=2, dtype=dtype)
        assert result.holds, result.violation
        assert outcome(rank_loops.fsdp2_reduced_in_bfloat16, Case(SQUARE, EVEN, dtype=dtype)) == "rounded-gradient"
    # the bound that a policy needs is not the one of a loop that declares none
    thirds = Plan((1, 2), 1, ranks=(1, 1))
    assert outcome(rank_loops.fsdp2_computed_in_bfloat16, Case(SQUARE, thirds, dtype="float32")) == "rounded-weights"


def test_split_layers_hold_and_a_whole_parameter_that_is_added_up_over_ranks_is_named():
    two = Plan((1, 3), 1, ranks=(1, 1))
    assert outcome(RANK_LOOPS["tensor_parallel/set_to_none"], Case(SPLIT, two)) == "holds"
    found = check(rank_loops.whole_parameters_added_up, Case(SPLIT, two)).violation
    assert found.diagnosis == "wrong-scale"
    assert "in 1.weight, 1.bias alone, while 0.weight, 0.bias are right" in found.explanation


def test_an_optimizer_that_needs_a_whole_gradient_steps_where_a_rank_has_none_of_it():
    one = ProblemSpec(
        Input("vector", size=1), (Layer("linear", bias=False, features=1),), Loss("mse", reduction="mean")
    )
    case = Case(one, Plan((1, 1), 1, 2, ranks=(1, 1)), optimizer="normalized")
    assert outcome(RANK_LOOPS["fsdp2/zero_"], case) == "holds"


@pytest.mark.full
def test_ranks_that_share_a_model_and_get_different_items_are_named():
    equal = Case(SPLIT, Plan((2,) * 4, 2, ranks=(2, 2)))
    assert outcome(rank_loops.own_items_in_split_layers, equal) == "not-reduced"


@pytest.mark.full
def test_power_sgd_is_exact_until_it_starts_and_then_not_linear():
    case = Case(SQUARE, LONG)
    assert outcome(rank_loops.power_sgd_not_yet, case) == "holds"
    assert outcome(rank_loops.power_sgd, case) == "not-linear"


@pytest.mark.full
@pytest.mark.parametrize("name", RANK_MODES)
def test_every_reset_mode_in_every_wrapper_holds(name):
    result = verify(RANK_LOOPS[name], examples=2, ranks=2, seed=1)
    assert result.holds, result.violation
