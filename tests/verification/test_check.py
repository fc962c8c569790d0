"""Judging one loop on one case: what divergence, drift and a broken large batch are, and are not."""

from __future__ import annotations

import pytest
import torch

from gradcheck_suite import Case, Input, Layer, Loss, Plan, Problem, ProblemSpec, check
from gradcheck_suite.execution.ranks.run import run_ranks
from gradcheck_suite.loops import MODES
from gradcheck_suite.references.reference import Reference
from gradcheck_suite.schema.weight_probe import probe_case
from gradcheck_suite.verification.check import Terms, check_run, terms_of

CHAIN = (*(Layer("prelu", per_feature=False),) * 3, Layer("linear", features=2, bias=False))
DIVERGES = Case(
    ProblemSpec(Input("vector", size=4), CHAIN, Loss("mse", reduction="sum")),
    Plan((8,) * 24, 1, 3),
    seed=6,
)
"""Four factors in a row and a summed loss: with a learning rate of 0.1 the parameters run away within a few steps."""


def _last_parameters(optimizer: str) -> list[torch.Tensor]:
    kept: list[torch.Tensor] = []

    def loop(run):
        MODES["zero_"](run)
        kept.extend(p.detach() for p in run.model.parameters())

    check(loop, DIVERGES.replace(optimizer=optimizer))
    return kept


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov"])
def test_a_sound_loop_that_diverges_is_not_blamed(optimizer):
    assert not all(bool(p.isfinite().all()) for p in _last_parameters(optimizer)), "the case no longer diverges"
    verdict = check(MODES["set_to_none"], DIVERGES.replace(optimizer=optimizer))
    assert verdict.violation is None
    assert verdict.ratio > 0


def test_a_fault_before_the_divergence_is_still_found():
    def no_divide(run):
        for batch in run.loader:
            run.optimizer.zero_grad()
            (2 * run.loss(run.model, batch)).backward()
            run.optimizer.step()

    verdict = check(no_divide, DIVERGES.replace(optimizer="sgd", plan=Plan((8,) * 24, 1, 1)))
    assert verdict.violation is not None
    assert verdict.violation.diagnosis == "wrong-scale"
    assert verdict.violation.window == 0


CASE = Case(
    ProblemSpec(Input("vector", size=3), (Layer("linear", bias=True, features=2),), Loss("mse", reduction="mean")),
    Plan((1, 2), 2),
)


@pytest.mark.parametrize("loop", ["zero_", "wrong"])
@pytest.mark.parametrize("case", [CASE, probe_case(Plan((1, 2), 2))])
def test_where_torch_and_jax_differ_no_loop_is_blamed_and_the_probe_needs_no_jax(monkeypatch, loop, case):
    def wrong(run):
        for batch in run.loader:
            run.loss(run.model, batch).backward()
        run.optimizer.step()

    subject, is_probe = MODES.get(loop, wrong), case is not CASE
    started = []
    monkeypatch.setattr(Reference, "start", lambda self: started.append(self))
    monkeypatch.setattr(Reference, "finding", property(lambda self: "they differ"))
    verdict = check(subject, case)
    assert (verdict.finding is None) is is_probe
    assert (verdict.violation is not None) is (is_probe and loop == "wrong")
    assert bool(started) is not is_probe
    started.clear()
    # while shrinking JAX is asked about a violation alone
    verdict = check(subject, case, shrinking=True)
    assert (verdict.finding is not None) is (not is_probe and loop == "wrong")
    assert not started


def test_by_default_a_run_is_judged_as_outside_of_shrinking(monkeypatch):
    monkeypatch.setattr(Reference, "finding", property(lambda self: "they differ"))
    terms = terms_of(MODES["zero_"])
    verdict = check_run(lambda instance: run_ranks(MODES["zero_"], instance), CASE, terms, lambda rank, alike: None)
    assert verdict.finding == "they differ"


def test_terms_are_what_is_assumed_and_what_the_loop_declares():
    terms = terms_of(MODES["zero_"], ["plain-counts"], "bfloat16")
    assert terms == Terms(frozenset({"plain-counts"}), "bfloat16")
    assert len({terms, Terms(frozenset({"plain-counts"}), "bfloat16")}) == 1


def _refused_by_autocast(model, batch):
    if torch.is_autocast_enabled("cpu"):
        raise RuntimeError("unsafe to autocast")  # as `binary_cross_entropy` on CUDA
    return torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])


def _weight_of_one(seed):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return model


REFUSED_BY_AUTOCAST = Problem(
    model=_weight_of_one,
    batch=lambda items, seed: {"x": torch.ones(items, 1), "y": torch.zeros(items, 1)},
    loss=_refused_by_autocast,
)


@pytest.mark.parametrize(("autocast", "blamed"), [("bfloat16", False), (None, True)])
def test_a_loop_that_declares_autocast_is_not_blamed_for_a_loss_that_autocast_refuses(autocast, blamed):
    verdict = check(_under_autocast, Case("REFUSED", Plan((1, 2), 2)), problem=REFUSED_BY_AUTOCAST, autocast=autocast)
    assert (verdict.violation is not None) == blamed
    if not blamed:
        assert verdict.skipped == "the plain large batch fails under autocast bfloat16: unsafe to autocast"


def _under_autocast(run):
    for batch in run.loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            run.loss(run.model, batch).backward()


SATURATED = Case(
    ProblemSpec(
        Input("sequence", length=3, padded=True, size=4),
        (
            Layer("residual", Layer("attention", causal=True, heads=1)),
            Layer("max_over_time", shared=False),
            Layer("unused", features=1),
        ),
        Loss("l1", reduction="sum"),
    ),
    Plan((5, 5, 8, 4, 8, 2, 1, 1, 4, 8, 8), accumulation_steps=3, epochs=2),
    seed=9592350,
    optimizer="nesterov",
)
"""The last step finds parameters near 1,000: torch's softmax gradient is exactly 0 there, JAX's a rounding of 1e6."""


def test_rounding_of_a_saturated_softmax_is_not_blamed():
    assert check(MODES["zero_"], SATURATED).violation is None


def test_a_dropped_micro_batch_at_saturation_is_still_found():
    def drops_the_last(run):
        for step in range(len(run.loader) // 3 * 2 + 2):
            run.optimizer.zero_grad()
            batches = list(run.loader)
            first = step % 4 * 3
            window = batches[first : first + 3]
            for batch in window[:-1] if step == 7 else window:
                run.loss(run.model, batch).backward()
            run.optimizer.step()

    # while shrinking, the fault is not named
    verdict = check(drops_the_last, SATURATED, shrinking=True)
    assert verdict.violation is not None
    assert (verdict.violation.epoch, verdict.violation.window) == (1, 3)
