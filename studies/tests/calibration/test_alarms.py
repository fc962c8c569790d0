"""Sound loops are judged by the check itself, and whatever blames one is counted with its case."""

from __future__ import annotations

import numpy as np
import pytest

from gradcheck_suite.catalogue.tables import LAYERS, LOSSES
from gradcheck_suite.core.case import Case, Input, Layer, Loss, Plan, ProblemSpec, case_from_json
from gradcheck_suite.core.contract import assumptions_of
from gradcheck_suite.reference import large_batch, rounding
from gradcheck_suite.verification import judge_run
from gradcheck_suite.verification.check import check
from studies.calibration import LOOPS, CaseJudge, Drawn, draw_cases, drawn_layers, drawn_losses
from studies.tests.calibration.conftest import linear
from tests.one_problem import OVERFLOWING_SUM

CASE = Case(linear("mean"), Plan((1, 3, 2, 4, 1), 3), dtype="float32", seed=5)
STEPS_FREE = {name for name, loop in LOOPS.items() if not assumptions_of(loop)}


@pytest.fixture(autouse=True)
def _no_reference_is_kept(monkeypatch):
    monkeypatch.setattr(large_batch.REFERENCES, "_kept", type(large_batch.REFERENCES._kept)())


def _run(case: Case, **settings):
    return CaseJudge(Drawn(case, frozenset()), **settings).run(1000, lambda: None)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_sound_loops_are_counted_and_none_is_blamed(dtype):
    tally = _run(CASE.replace(dtype=dtype))
    assert tally.alarms == []
    assert (
        tally.checks
        == tally.judged
        == len(STEPS_FREE)
        == tally.layers["linear"]
        == tally.losses["mse"]
    )
    assert set(tally.loops) == STEPS_FREE
    # two elements, two windows
    assert tally.elements == 4 * tally.checks
    assert sum(tally.over["linear"].counts) == tally.checks
    assert tally.autocast == 2


def test_a_window_out_of_range_leaves_the_others_of_its_case():
    """The sum of five gradients of 32000 overflows float16; the second window has one."""
    case = Case(OVERFLOWING_SUM, Plan((1, 1, 1, 1, 1, 1), 5), dtype="float16")
    last = {"rescale_at_the_end": LOOPS["rescale_at_the_end"]}
    assert check(last["rescale_at_the_end"], case).windows_skipped
    tally = _run(case, loops=last)
    assert (tally.alarms, tally.judged) == ([], 1)


@pytest.mark.full
def test_a_bound_that_is_too_tight_gives_false_alarms_with_their_cases(monkeypatch):
    # where torch's own gradient is beyond the bound, torch is blamed
    tally = _too_tight(monkeypatch)
    assert tally.findings
    assert not tally.alarms
    monkeypatch.setattr(judge_run, "precision_fault", lambda window: None)
    tally = _run(CASE)
    assert len(tally.alarms) > len(STEPS_FREE) / 2
    alarm = tally.alarms[0]
    assert case_from_json(alarm["case"]) == CASE
    assert alarm["kind"] == "gradient"
    assert alarm["error"] > 0 == alarm["allowed"]


def _too_tight(monkeypatch):
    for name in ("accumulation_bound", "coarse_bound"):
        monkeypatch.setattr(large_batch, name, lambda vector, *_, **__: np.zeros_like(vector))
    for name in ("likely_bound", "noise_bound"):
        monkeypatch.setattr(rounding, name, lambda vector, *_: np.zeros_like(vector))
    return _run(CASE)


def test_a_loop_that_is_not_sound_is_blamed():
    def dropping(run):
        """Forget every window's last micro-batch."""
        kept, run_loader = [], run.loader
        for batch in run_loader:
            kept.append(batch)
        for start in range(0, len(kept), run.accumulation_steps):
            window = kept[start : start + run.accumulation_steps]
            total = sum(run.count(batch) for batch in window)
            for batch in window[:-1]:
                (run.loss(run.model, batch) * run.count(batch) / total).backward()
            run.optimizer.step()
            run.optimizer.zero_grad()

    tally = _run(CASE, loops={"dropping": dropping})
    assert [(a["loop"], a["diagnosis"]) for a in tally.alarms] == [
        ("dropping", "dropped-micro-batch")
    ]


def test_what_cannot_be_judged_is_counted_with_its_reason():
    spec = ProblemSpec(Input("vector", size=3), (Layer("linear", features=3, bias=True),),
                       Loss("multi_margin", p=1, margin=1.0, class_weights=False, reduction="mean"))  # fmt: skip
    case = Case(spec, Plan((2, 2), 2), dtype="bfloat16")
    if check(LOOPS["plain"], case).skipped is None:
        pytest.skip("this torch has multi_margin_loss in bfloat16")
    tally = _run(case)
    # autocast computes the losses of two loops in a dtype that has the operation
    assert tally.judged == tally.autocast == 2 == tally.losses["multi_margin"]
    assert tally.skipped.total() == tally.checks - 2 == len(STEPS_FREE) - 2
    assert all("bfloat16" in why for why in tally.skipped)


@pytest.mark.parametrize("name", ["closure", "plain"])
def test_other_rules_are_given_the_gradient_of_the_step(name):
    # before the step of `closure`, the parameters have the gradient of the window before
    tally = _run(CASE.replace(dtype="float64"), loops={name: LOOPS[name]})
    assert tally.judged == 1
    assert "torch.testing.assert_close" not in tally.rivals
    assert not any(tally.drawn_on.counts)


# What is drawn


@pytest.mark.usefixtures("only_linear")
def test_chunks_are_the_same_again_and_no_two_alike():
    first, again, other, seed = (
        draw_cases("float32", *c) for c in ((0, 12, 1), (0, 12, 1), (1, 12, 1), (0, 12, 2))
    )
    assert first == again
    assert len(first) == 12
    digests = [{drawn.case.digest for drawn in chunk} for chunk in (first, other, seed)]
    assert digests[0].isdisjoint(digests[1] | digests[2])


@pytest.mark.usefixtures("only_linear")
def test_a_chunk_has_cases_for_every_loop_and_nothing_a_loop_may_not_rely_on():
    fitting = set()
    for drawn in draw_cases("float64", 0, 24, 3):
        plan, window_counts = drawn.case.plan, []
        for window in drawn.case.plan.windows:
            window_counts.append({plan.micro_batches[j] for j in window})
        assert len(plan.windows) <= 2
        assert plan.epochs == 1
        fitting |= {name for name, loop in LOOPS.items() if assumptions_of(loop) <= drawn.within}
        if "equal-micro-batches" in drawn.within:
            assert all(len(counts) == 1 for counts in window_counts)
        if "whole-windows" in drawn.within:
            assert not plan.has_short_window
        if "sum-reduction" in drawn.within:
            assert drawn.case.problem.loss.reduction == "sum"
    assert fitting == set(LOOPS)


def test_what_the_strategies_draw_is_all_but_the_probes_own():
    assert set(LAYERS) - drawn_layers() == {"readout"}
    assert set(LOSSES) - drawn_losses() == {"identity"}
