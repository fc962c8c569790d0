"""A loop on two ranks: what each rank hands its step, and how ranks that fail or hang are reported."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from gradcheck_suite import Plan, UsageError
from gradcheck_suite.core.case import PARAMETER, Case, Input, Layer, Loss, ProblemSpec, probe_case
from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.judge.naming import diagnose
from gradcheck_suite.judge.weights import Weights
from gradcheck_suite.loops.ranks import RANK_LOOPS, RANK_MODES
from gradcheck_suite.loops.reset_modes import MODES
from gradcheck_suite.run import ranks
from gradcheck_suite.run.instance import generated_instance
from gradcheck_suite.run.processes import source_of
from gradcheck_suite.run.ranks import Pool, Request, forget_ahead, run_ranks, run_ranks_ahead
from gradcheck_suite.verification.check import check
from gradcheck_suite.verification.verify import verify
from studies.zoo import BUGS
from tests.verification import rank_loops, reductions

pytestmark = pytest.mark.usefixtures("ranks")
EVEN = Plan((1, 3, 3, 9), 2, 2, ranks=(2, 2))
UNEVEN = Plan((1, 3, 2, 2, 4), 2, 2, ranks=(3, 2))
"""In the second window rank 1 has no micro-batch."""


def violation(loop, plan=EVEN, **options):
    return check(loop, probe_case(plan), **options).violation


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("all_reduce/zero_", EVEN),
        ("all_reduce/zero_", UNEVEN),
        ("all_reduce/flat_buffer", EVEN),
        ("all_reduce/flat_buffer", UNEVEN),
        ("ddp/set_to_none", EVEN),
        ("ddp_bucket_view/zero_grad", EVEN),
    ],
)
def test_a_right_loop_holds(name, plan):
    verdict = check(RANK_LOOPS[name], probe_case(plan))
    assert verdict.holds, verdict.violation
    assert not verdict.skipped


def test_every_rank_of_a_right_loop_has_the_gradient_of_all_ranks_items():
    outcomes = run_ranks(rank_loops.right, generated_instance(probe_case(UNEVEN)))
    gradients = [
        [o.gradients[PARAMETER].tolist() for o in outcome.observations] for outcome in outcomes
    ]
    assert gradients[0] == gradients[1] == [[1 / 8] * 8 + [0] * 4, [0] * 8 + [1 / 4] * 4] * 2


ENDED = "on rank 1 of 2: the loop failed: its process ended "
BLAMED = {
    # the loop: kind, diagnosis, rank, and all that is said, as a pattern
    rank_loops.not_reduced: ("gradient", "not-reduced", 0, "on rank 0 of 2: .*"),
    rank_loops.wrong_on_rank_1: ("gradient", "wrong-scale", 1, "on rank 1 of 2: .*"),
    rank_loops.exits: ("raised", "raised", 1, f"{ENDED}with status 7"),
    rank_loops.killed: ("raised", "raised", 1, f"{ENDED}by SIGKILL"),
    # not the rank that waits for it
    rank_loops.raises: ("raised", "raised", 1, r".*ValueError: no data \(rank_loops.py, line .*"),
    rank_loops.out_of_step: (
        "raised",
        "deadlock",
        None,
        ".*another rank was in another collective.*",
    ),
    rank_loops.never_ends: ("raised", "timed-out", None, ".*rank 1 is in rank_loops.py, line .*"),
}
LONG_TO_END = (rank_loops.killed,)


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(
            loop,
            marks=[pytest.mark.full] if loop in LONG_TO_END else [],
            id=loop.__name__,
        )
        for loop in BLAMED
    ],
)
def test_the_rank_that_is_to_blame_is_named_and_the_next_case_runs(loop):
    kind, diagnosis, rank, said = BLAMED[loop]
    found = violation(loop, time_limit_s=0.5 if loop is rank_loops.never_ends else None)
    assert (found.kind, found.diagnosis) == (kind, diagnosis), found
    assert rank in (None, found.rank)
    assert found.to_json().get("rank") == found.rank
    assert re.fullmatch(said, found.explanation, re.DOTALL), found.explanation
    assert check(rank_loops.right, probe_case(EVEN)).holds


@pytest.mark.full
@pytest.mark.parametrize("how", ["SIGKILL", "SIGABRT"])
def test_a_rank_that_is_killed_from_outside_runs_again(tmp_path, monkeypatch, how):
    monkeypatch.setenv("GRADCHECK_SUITE_TEST_KILLED", str(tmp_path / f"done.{how}"))
    monkeypatch.setattr(ranks, "_pools", {})  # the ranks that are running do not have that variable
    try:
        assert violation(rank_loops.killed_once) is None
        assert (tmp_path / f"done.{how}").exists()
    finally:
        ranks._pools.popitem()[1].close()


@pytest.mark.share(4)
def test_ranks_that_wait_for_each_other_are_a_deadlock_with_the_stack_of_each():
    began = time.monotonic()
    found = violation(rank_loops.waits_alone, time_limit_s=600)
    assert time.monotonic() - began < 300
    assert (found.kind, found.diagnosis) == ("raised", "deadlock")
    assert "rank 0 waits in all_reduce (" in found.explanation
    stacks = "\n".join(found.details)
    assert "rank 0, innermost call first:" in stacks
    assert "in waits_alone" in stacks


@pytest.mark.share(4)
def test_cases_that_ranks_run_ahead_are_judged_as_without():
    cases = [probe_case(plan) for plan in (EVEN, UNEVEN)]
    alone = [check(rank_loops.wrong_on_rank_1, case).violation for case in cases]
    for asked in (cases, cases[::-1], cases[1:]):
        for case in cases:
            run_ranks_ahead(rank_loops.wrong_on_rank_1, case, None)
        assert [check(rank_loops.wrong_on_rank_1, case).violation for case in asked] == [
            alone[cases.index(case)] for case in asked
        ]
        # ahead of this the ranks run a case that is not asked for
        assert check(rank_loops.right, cases[0]).holds
        forget_ahead()


@pytest.mark.full
def test_a_rank_begins_no_case_before_all_ranks_have_finished_the_one_before():
    cases = [probe_case(plan) for plan in (EVEN, UNEVEN)]
    assert check(rank_loops.right, cases[0]).holds
    for case in cases:
        run_ranks_ahead(rank_loops.waits_alone, case, None)
    found = violation(rank_loops.waits_alone, cases[0].plan, time_limit_s=60)
    assert found.diagnosis == "deadlock", found.explanation
    assert "rank 1 has returned" in found.explanation


@pytest.mark.full
def test_ranks_that_wait_for_one_that_sleeps_are_no_deadlock():
    assert violation(rank_loops.sleeps_first) is None


def _right_in_new_ranks():
    case = probe_case(EVEN)
    request = Request(
        source_of(rank_loops.right, "the loop"), case, None, quiet=True, path=tuple(sys.path)
    )
    pool = Pool(2, "gloo")
    try:
        return pool.run(request, 30.0)
    finally:
        pool.close()
        assert pool._template.process.poll() is not None
        assert not pool._template.folder.exists()


@pytest.mark.full
def test_ranks_need_no_port_that_another_program_may_have(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        assert [outcome.raised for outcome in _right_in_new_ranks()] == [None, None]


@pytest.mark.full
def test_ranks_that_find_no_way_to_each_other_are_one_line(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(
        CannotRunHere,
        match=r"2 ranks cannot start: the ranks cannot form a group of gloo: .*no-such",
    ):
        _right_in_new_ranks()


def test_a_loop_that_no_module_has_under_a_name_is_refused():
    with pytest.raises(
        UsageError, match="cannot be imported in another process, as each rank must: define it at"
    ):
        violation(lambda run: None)


PROGRAM = """
import sys
from gradcheck_suite import Plan, check
from gradcheck_suite.run.ranks import kept_ranks, pool_of
from gradcheck_suite.core.case import probe_case
from tests.verification import rank_loops
with kept_ranks():
    check(rank_loops.right, probe_case(Plan((1, 1), 1, ranks=(1, 1))))
    pool = pool_of(2, "cpu")
    print(pool._template.folder, pool._template.process.pid, *pool._pids, flush=True)
    check(rank_loops.never_ends, probe_case(Plan((1, 1), 1, ranks=(1, 1))))
"""


@pytest.mark.full
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_behind(how):
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    folder, *shown = program.stdout.readline().decode().split()
    pids = [int(pid) for pid in shown]
    assert len(pids) == 3
    time.sleep(1)
    program.send_signal(how)
    program.communicate(timeout=120)
    deadline = time.monotonic() + 60
    while (left := [pid for pid in pids if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    assert not Path(folder).exists()


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


# How ranks make one gradient of theirs: sound ways hold, and faulty ones are named.


SQUARE = ProblemSpec(
    Input("vector", size=4),
    (Layer("linear", bias=True, features=4),),
    Loss("mse", reduction="mean"),
)


@pytest.mark.full
@pytest.mark.parametrize(
    "loop",
    [
        reductions.reduce_scatter,
        reductions.waited_for,
        reductions.functional_all_reduce,
        reductions.point_to_point,
    ],
)
def test_a_sound_way_to_add_up_gradients_holds(loop):
    verdict = check(loop, probe_case(UNEVEN))
    assert verdict.holds, verdict.violation


@pytest.mark.parametrize(
    ("loop", "case", "diagnosis", "text"),
    [
        (reductions.by_max, Case(SQUARE, EVEN), "not-summed", "is called with ReduceOp.MAX"),
        (
            reductions.to_rank_0_alone,
            probe_case(EVEN),
            "not-reduced",
            "as after a reduce in place of an all_reduce",
        ),
        (
            reductions.negated_on_rank_1,
            probe_case(EVEN),
            "wrong-scale",
            "those of rank 1 weigh -1 times what they",
        ),
        (
            reductions.in_other_order,
            Case(SQUARE, EVEN),
            "misplaced-gradient",
            "go through the parameters in the same",
        ),
        (
            reductions.moved_on_rank_1,
            Case(SQUARE, EVEN),
            "parameter-drift",
            "on rank 1 of 2: something other than",
        ),
        (
            reductions.sharded_behind_the_optimizer,
            probe_case(EVEN),
            "changed-model",
            "run.optimizer.param_groups",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_faulty_way_is_named(loop, case, diagnosis, text):
    found = check(loop, case).violation
    assert found.diagnosis == diagnosis, found.explanation
    assert text in found.explanation


def test_no_reduce_is_guessed_where_some_of_the_other_rank_arrived():
    found = check(
        BUGS["first-micro-batch-only-reduced"].loop, probe_case(Plan((1, 1, 3), 2, ranks=(2, 1)))
    ).violation
    assert found.diagnosis == "not-reduced"
    assert "in place of an all_reduce" not in found.explanation


@pytest.mark.parametrize(
    ("observed", "window", "alike", "name"),
    [
        ((1, 1, 1, 1, 0, 0), 6, False, "not-reduced"),
        ((1, 1, 1, 1, 0, 0), 6, True, "not-reduced"),
        ((1, 1, 0, 0, 0, 0), 6, True, "not-reduced"),
        ((1, 1, 0, 0, 0, 0), 6, False, "not-reduced"),
        ((1, 1, 1, 0, 1, 0), 6, False, "not-reduced"),
        ((1, 1, 1, 0, 1, 0), 6, True, "dropped-micro-batch"),
        ((1, 3, 1, 0, 1, 0), 6, False, "not-reduced"),
        ((1, 1, 1, 1, 0.5, 0.5), 6, True, "wrong-scale"),
        # rank 2 has none of the window's micro-batches
        ((0, 0, 0, 0, 0, 0), 4, False, "not-reduced"),
        ((0, 0, 0, 0, 0, 0), 4, True, "no-gradient"),
        ((0, 0, 0, 0, 0, 0), 6, False, "no-gradient"),
    ],
)
def test_the_weights_of_three_ranks_are_told_apart_by_whether_all_ranks_have_them(
    observed, window, alike, name
):
    weights = Weights(
        observed=np.array(observed, float),
        counts=(1.0, 2.0, 3.0, 1.0, 2.0, 2.0),
        window=tuple(range(window)),
        accumulation_steps=2,
        epoch=0,
        reduction="sum",
        owners=(0, 0, 1, 1, 2, 2),
        alike=alike,
    )
    assert diagnose(weights).name == name


# Wrappers of torch over ranks: FSDP2, variants of DistributedDataParallel, hooks, and
# ZeroRedundancyOptimizer.


LONG = Plan((1, 3) * 8, 2, ranks=(8, 8))
"""Four windows."""
ROUTED = ProblemSpec(
    Input("vector", size=2),
    (Layer("mixture", experts=2, features=2),),
    Loss("mse", reduction="sum"),
)
SPLIT = ProblemSpec(
    Input("vector", size=4),
    (Layer("linear", bias=True, features=3), Layer("linear", bias=True, features=1)),
    Loss("mse", reduction="mean"),
)
"""Two ranks split the first layer by columns; neither number of features of the second is even, so it stays whole."""
VARIANTS = [name for name in RANK_LOOPS if name not in RANK_MODES]
PAGE = Path(__file__).parents[2] / "docs" / "ranks-loops.md"


def outcome(loop, case):
    """Return `"holds"`, or the diagnosis."""
    verdict = check(loop, case)
    assert not verdict.skipped
    return "holds" if verdict.violation is None else verdict.violation.diagnosis


WITHOUT_ONE = probe_case(Plan((2, 1, 1), 1, ranks=(2, 1)))
SHARED_STEPS = Case(SQUARE, EVEN, optimizer="adam")
OWN_SCHEDULES = Case(SQUARE, Plan((1, 3, 3, 9, 1), 2, ranks=(3, 2)))
IN_FLOAT32 = Case(SQUARE, EVEN, dtype="float32")
THIRDS = Plan((1, 2), 1, ranks=(1, 1))
TWO = Plan((1, 3), 1, ranks=(1, 1))
ONE_WEIGHT = ProblemSpec(
    Input("vector", size=1),
    (Layer("linear", bias=False, features=1),),
    Loss("mse", reduction="mean"),
)
OUTCOMES = [
    # the loop, the case, and the diagnosis; in the second window one rank has no micro-batch
    *((RANK_LOOPS[f"all_reduce/{mode}"], WITHOUT_ONE, "holds") for mode in MODES),
    # steps that ranks share out are judged as one step
    (RANK_LOOPS["zero_redundancy/zero_grad"], SHARED_STEPS, "holds"),
    (rank_loops.parts_not_sent, SHARED_STEPS, "parameter-drift"),
    # a scheduler of a rank is held to its own micro-batches
    (rank_loops.scheduler_per_micro_batch, OWN_SCHEDULES, "step-per-micro-batch"),
    (rank_loops.scheduler_per_window, OWN_SCHEDULES, "holds"),
    (rank_loops.scheduler_as_accelerate, OWN_SCHEDULES, "holds"),
    # a hook that sends bfloat16 is no fault of a model in bfloat16
    (rank_loops.bfloat16_hook, Case(SQUARE, EVEN), "low-precision"),
    (rank_loops.bfloat16_hook, IN_FLOAT32, "low-precision"),
    (rank_loops.bfloat16_hook, Case(SQUARE, EVEN, dtype="bfloat16"), "holds"),
    # a policy that adds up in bfloat16; the bound of one that computes in it is not that of a loop
    # that declares none
    (rank_loops.fsdp2_reduced_in_bfloat16, Case(SQUARE, EVEN), "low-precision"),
    (rank_loops.fsdp2_reduced_in_bfloat16, IN_FLOAT32, "low-precision"),
    (
        rank_loops.fsdp2_computed_in_bfloat16,
        Case(SQUARE, THIRDS, dtype="float32"),
        "low-precision",
    ),
    # ranks that share a model, and get different items: each computes its part of the layers from
    # others, so that no weights of items give the gradient
    (
        rank_loops.own_items_in_split_layers,
        Case(SPLIT, Plan((2,) * 4, 2, ranks=(2, 2))),
        "not-linear",
    ),
    # PowerSGD is exact until it starts
    (rank_loops.power_sgd_not_yet, Case(SQUARE, LONG), "holds"),
    (rank_loops.power_sgd, Case(SQUARE, LONG), "not-linear"),
    # a rank that steps alone on sharded parameters waits for the others
    (rank_loops.steps_on_one_rank, probe_case(EVEN), "deadlock"),
]
SHORT_OUTCOMES = [
    (RANK_LOOPS["tensor_parallel/set_to_none"], Case(SPLIT, TWO), "holds"),
    # an optimizer that needs a whole gradient steps where a rank has none of it
    (
        RANK_LOOPS["fsdp2/zero_"],
        Case(ONE_WEIGHT, Plan((1, 1), 1, 2, ranks=(1, 1)), optimizer="normalized"),
        "holds",
    ),
]


@pytest.mark.parametrize(
    ("loop", "case", "expected"),
    [*SHORT_OUTCOMES, *(pytest.param(*row, marks=pytest.mark.full) for row in OUTCOMES)],
)
def test_what_ranks_do_is_judged_by_the_gradient_of_all(loop, case, expected):
    assert outcome(loop, case) == expected


@pytest.mark.full
@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_holds(name):
    result = verify(RANK_LOOPS[name], examples=4, ranks=2)
    assert result.holds, result.violation


def _table():
    """Return the table of the page: (wrapper, reset mode) -> what the page says."""
    _, title, table = PAGE.read_text().partition("| reset mode ")
    lines = [
        line.strip("| ").split("|")
        for line in f"{title}{table}".splitlines()
        if line.startswith("|")
    ]
    head, _, *rows = [[cell.strip().strip("`") for cell in cells] for cells in lines]
    return {
        f"{wrapper}/{row[0]}": said
        for row in rows
        for wrapper, said in zip(head[1:], row[1:], strict=True)
    }


def test_the_page_has_every_reset_mode_in_every_wrapper():
    assert sorted(_table()) == sorted(rank_loops.IN_MODES)
    assert len(rank_loops.IN_MODES) == len(MODES) * len(rank_loops.WRAPPERS)


@pytest.mark.full
def test_every_row_of_the_page_is_true():
    # the weight probe has no layer to split
    cases = {
        name: Case(SPLIT, EVEN) if "tensor" in name else probe_case(EVEN)
        for name in rank_loops.IN_MODES
    }
    found = {name: outcome(loop, cases[name]) for name, loop in rank_loops.IN_MODES.items()}
    assert found == _table()
    for name, loop in RANK_LOOPS.items():
        assert found.get(name, "holds") == "holds", (name, loop)


@pytest.mark.full
def test_fully_shard_adds_gradients_of_different_parameters_where_ranks_reach_different_ones():
    # pytorch#158719: each item goes to one expert, and here the two ranks' items go to different
    # ones
    verdict = check(
        rank_loops.fsdp2_without_zeros, Case(ROUTED, Plan((1, 1), 1, ranks=(1, 1)), seed=1)
    )
    assert (verdict.violation.kind, verdict.violation.diagnosis) == (
        "gradient",
        "misplaced-gradient",
    )
    assert "or leave out parameters without a gradient" in verdict.violation.explanation
    # and here to the same one
    assert check(
        rank_loops.fsdp2_without_zeros, Case(ROUTED, Plan((1, 1), 1, ranks=(1, 1)), seed=4)
    ).holds


@pytest.mark.full
def test_a_static_graph_under_no_sync_from_the_first_backward_on_is_an_assertion_of_torch():
    # pytorch#143580
    violation = check(rank_loops.static_graph_under_no_sync, probe_case(EVEN)).violation
    assert violation.kind == "raised"
    assert "expect_autograd_hooks_" in violation.explanation
    assert "must not be under no_sync" in violation.explanation


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_mixed_precision_policy_is_declared(dtype):
    result = verify(RANK_LOOPS["fsdp2_bfloat16/zero_grad"], examples=4, ranks=2, dtype=dtype)
    assert result.holds, result.violation


def test_a_whole_parameter_that_is_added_up_over_ranks_is_named():
    found = check(rank_loops.whole_parameters_added_up, Case(SPLIT, TWO)).violation
    assert found.diagnosis == "wrong-scale"
    assert "in 1.weight, 1.bias alone, while 0.weight, 0.bias are right" in found.explanation
