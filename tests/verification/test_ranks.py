"""A loop on two ranks: what each rank hands its step, and how ranks that fail or hang are reported."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradcheck_suite import Plan, UsageError
from gradcheck_suite.core.case import PARAMETER, probe_case
from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.loops.ranks import RANK_LOOPS
from gradcheck_suite.run import ranks
from gradcheck_suite.run.instance import generated_instance
from gradcheck_suite.run.processes import source_of
from gradcheck_suite.run.ranks import Pool, Request, forget_ahead, run_ranks, run_ranks_ahead
from gradcheck_suite.verification.check import check
from tests.verification import rank_loops

pytestmark = pytest.mark.usefixtures("ranks")
EVEN = Plan((1, 3, 3, 9), 2, 2, ranks=(2, 2))
UNEVEN = Plan((1, 3, 2, 2, 4), 2, 2, ranks=(3, 2))
"""In the second window rank 1 has no micro-batch."""


def violation(loop, plan=EVEN, **options):
    return check(loop, probe_case(plan), **options).violation


def test_every_rank_of_a_right_loop_has_the_gradient_of_all_ranks_items():
    for name in ("all_reduce/zero_", "all_reduce/flat_buffer", "ddp/set_to_none", "ddp_bucket_view/zero_grad"):
        for plan in (EVEN, UNEVEN) if name.startswith("all_reduce") else (EVEN,):
            verdict = check(RANK_LOOPS[name], probe_case(plan))
            assert verdict.holds, (name, plan, verdict.violation)
            assert not verdict.skipped
    outcomes = run_ranks(rank_loops.right, generated_instance(probe_case(UNEVEN)))
    gradients = [[o.gradients[PARAMETER].tolist() for o in outcome.observations] for outcome in outcomes]
    assert gradients[0] == gradients[1] == [[1 / 8] * 8 + [0] * 4, [0] * 8 + [1 / 4] * 4] * 2


def test_a_rank_sees_its_own_micro_batches_and_counts():
    found = violation(rank_loops.not_reduced)
    assert (found.kind, found.rank) == ("gradient", 0)
    assert found.explanation.startswith("on rank 0 of 2: ")


def test_the_rank_whose_gradient_is_wrong_is_named():
    found = violation(rank_loops.wrong_on_rank_1)
    assert (found.kind, found.diagnosis, found.rank) == ("gradient", "wrong-scale", 1)
    assert found.to_json()["rank"] == 1


def test_a_rank_that_exits_is_named_with_its_status_and_the_next_case_runs():
    found = violation(rank_loops.exits)
    assert (found.kind, found.diagnosis, found.rank) == ("raised", "raised", 1)
    assert found.explanation == "on rank 1 of 2: the loop failed: its process ended with status 7"
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


@pytest.mark.full
def test_a_rank_that_kills_itself_is_named():
    assert violation(rank_loops.killed).explanation == "on rank 1 of 2: the loop failed: its process ended by SIGKILL"


def test_a_rank_that_raises_is_named_and_not_the_one_that_waits_for_it():
    found = violation(rank_loops.raises)
    assert (found.kind, found.diagnosis, found.rank) == ("raised", "raised", 1)
    assert "ValueError: no data (rank_loops.py, line " in found.explanation


def test_ranks_that_wait_for_each_other_are_a_deadlock_with_the_stack_of_each():
    began = time.monotonic()
    found = violation(rank_loops.waits_alone, time_limit_s=600)
    assert time.monotonic() - began < 300
    assert (found.kind, found.diagnosis) == ("raised", "deadlock")
    assert "rank 0 waits in all_reduce (" in found.explanation
    stacks = "\n".join(found.details)
    assert "rank 0, innermost call first:" in stacks
    assert "in waits_alone" in stacks


def test_ranks_at_different_collectives_are_said_to_be():
    found = violation(rank_loops.out_of_step)
    assert (found.kind, found.diagnosis) == ("raised", "mismatched-collectives")
    assert "another rank was in another collective" in found.explanation


def test_a_rank_that_computes_forever_is_stopped_by_the_time_limit():
    found = violation(rank_loops.never_ends, time_limit_s=0.5)
    assert (found.kind, found.diagnosis) == ("raised", "timed-out")
    assert "rank 1 is in rank_loops.py, line " in found.explanation
    assert check(rank_loops.right, probe_case(EVEN)).holds


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
    request = Request(source_of(rank_loops.right, "the loop"), case, None, quiet=True, path=tuple(sys.path))
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
    with pytest.raises(CannotRunHere, match=r"2 ranks cannot start: the ranks cannot form a group of gloo: .*no-such"):
        _right_in_new_ranks()


def test_a_loop_that_no_module_has_under_a_name_is_refused():
    with pytest.raises(UsageError, match="cannot be imported in another process, as each rank must: define it at"):
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
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
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
