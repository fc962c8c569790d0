"""Every claim about gradient zeroing and every printed loop comes to the verdict that the report
gives it.

A check that cannot refute is no check: each is also run in a planted world in which its claim is
false, or true where it is not, and there it comes to another verdict.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gradcheck_suite.run.functions import ancestors
from properties.assertions import assert_equal
from studies import claims, step_times
from studies.claims import CLAIMS, PRINTED, SOURCES, Finding, judged, verify_printed
from studies.reset_modes import RESET_MODES
from tests.one_problem import draw_only_linear

FEW = 8
"""Cases for each verified loop, on one small model; `tox -e full` runs as many as the records, on drawn models."""
VERDICTS = {
    "C1.1": "confirmed",
    "C1.2": "confirmed",
    "C1.3": "conditional",
    "C1.4": "conditional",
    "C1.5": "conditional",
    "C1.6": "conditional",
    "C1.7": "conditional",
    "C1.9": "confirmed",
    "C2.1": "conditional",
    "C2.2": "conditional",
    "C2.3": "refuted",
    "C2.4": "confirmed",
    "C2.5": "refuted",
    "C2.6": "sometimes",
    "C3.1": "confirmed",
    "C3.2": "conditional",
    "C3.3": "conditional",
    "C3.4": "confirmed",
    "C3.5": "confirmed",
}
"""That of C1.8 rests on times: see `test_the_claim_about_small_models_can_have_each_verdict`."""


@pytest.fixture(autouse=True)
def few_and_small(monkeypatch, request):
    """Draw few cases, of one small model, and time small steps, except in tests marked `full`."""
    if request.node.get_closest_marker("full"):
        return
    draw_only_linear(monkeypatch)
    for name, value in {
        "CASES": FEW,
        "PROBLEMS": 5,
        "STEPS": 300,
        "LAYER": 1024,
        "CONFIGURATIONS": 8,
    }.items():
        monkeypatch.setattr(claims, name, value)


SLOW = ("C3.2", "C3.3", "C3.5")
"""Claims that take seconds."""


def test_every_claim_is_tested():
    assert VERDICTS.keys() | {"C1.8"} == CLAIMS.keys()
    assert {int(number[1]) for number in CLAIMS} == SOURCES.keys()


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=[pytest.mark.full] * (number in SLOW)) for number in VERDICTS],
)
def test_a_claim_comes_to_its_verdict(number):
    """It has figures, its own sentence, and where refuted a counterexample."""
    finding = CLAIMS[number].check()
    assert_equal(what="verdict", observed=finding.verdict, expected=VERDICTS[number], case=number)
    assert finding.figures, f"{number}: a claim needs figures"
    assert finding.sentence.endswith(".")
    assert not finding.sentence.startswith("Other cases fail"), finding.sentence
    if finding.verdict == "refuted":
        assert finding.counterexample, f"{number}: a refuted claim needs a counterexample"


# Planted worlds. Each takes a `monkeypatch` and changes torch, a reset mode, a clock or a loop.


def _forgets(monkeypatch):
    """Every backward first drops the gradients of the parameters that it reaches."""
    backward = torch.Tensor.backward

    def forgetful(loss, *args, **kwargs):
        for node in ancestors([loss]):
            if hasattr(node, "variable"):
                node.variable.grad = None
        return backward(loss, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "backward", forgetful)


def _resets(**modes):
    """The reset of one mode does something else: what another mode does, or a function."""

    def world(monkeypatch):
        resets = {
            name: RESET_MODES[to].reset if isinstance(to, str) else to for name, to in modes.items()
        }
        planted = {
            name: dataclasses.replace(RESET_MODES[name], reset=reset)
            for name, reset in resets.items()
        }
        monkeypatch.setattr(claims, "RESET_MODES", {**RESET_MODES, **planted})

    return world


def _allocates_anew(parameters, optimizer):
    for p in parameters:
        p.grad = torch.zeros_like(p)


def _zero_grad_zeroes(monkeypatch):
    """Before torch 2.0 `zero_grad()` called `zero_()` on each gradient."""

    def zero_grad(optimizer, set_to_none=False):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    with torch.no_grad():
                        p.grad.zero_()

    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", zero_grad)


def _constant(**seconds):
    """Some times do not depend on sizes."""

    def world(monkeypatch):
        for name, value in seconds.items():
            monkeypatch.setattr(claims, name, lambda size, value=value: value)

    return world


def _modes_swapped_and_calls_dear(monkeypatch):
    _resets(zero_="set_to_none", set_to_none="zero_")(monkeypatch)
    _constant(pass_seconds=1e-6)(monkeypatch)


def _parameters_start_with_gradients(monkeypatch):
    def parameter(*values):
        p = torch.nn.Parameter(torch.tensor(values, dtype=torch.float64))
        p.grad = torch.zeros_like(p)
        return p

    monkeypatch.setattr(claims, "_parameter", parameter)


def _always_tracked(monkeypatch):
    monkeypatch.setattr(torch, "set_grad_enabled", lambda _: torch.enable_grad())


def _no_reset_after_the_step(monkeypatch):
    loop_with = claims._reset
    monkeypatch.setattr(
        claims, "_reset", lambda where: loop_with(where if where != "after the step" else "nowhere")
    )


def _sound_accumulation(monkeypatch):
    monkeypatch.setattr(claims, "accumulate_and_divide", RESET_MODES["set_to_none"].loop)


def _activations_are_kept(monkeypatch):
    train = claims.train
    monkeypatch.setattr(claims, "train", lambda mode, *, width, items, micro_batches: train(
        mode, width=width, items=items * micro_batches, micro_batches=1))  # fmt: skip


WORLDS = {
    "C1.1": (_resets(zero_="set_to_none"), "refuted"),
    "C1.2": (_resets(zero_="set_to_none"), "refuted"),
    "C1.3": (_zero_grad_zeroes, "refuted"),
    "C1.4": (_resets(set_to_none="zero_"), "refuted"),
    "C1.5": (_resets(set_to_none=_allocates_anew), "confirmed"),
    "C1.6": (_modes_swapped_and_calls_dear, "refuted"),
    "C1.7": (_constant(pass_seconds=1.0, layer_seconds=1.0), "confirmed"),
    "C1.9": (_forgets, "refuted"),
    "C2.1": (_forgets, "refuted"),
    "C2.2": (_forgets, "refuted"),
    "C2.3": (_zero_grad_zeroes, "confirmed"),
    "C2.4": (_parameters_start_with_gradients, "refuted"),
    "C2.5": (_zero_grad_zeroes, "conditional"),
    "C2.6": (_always_tracked, "never"),
    "C3.1": (_forgets, "refuted"),
    "C3.2": (_no_reset_after_the_step, "confirmed"),
    "C3.3": (_sound_accumulation, "confirmed"),
    "C3.4": (_activations_are_kept, "refuted"),
    "C3.5": (_forgets, "refuted"),
}
"""Claim -> a world in which it comes to another verdict, and that verdict."""


def test_every_claim_has_a_world_in_which_it_turns():
    assert WORLDS.keys() == VERDICTS.keys()
    assert all(verdict != VERDICTS[number] for number, (_, verdict) in WORLDS.items())


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=[pytest.mark.full] * (number in SLOW)) for number in WORLDS],
)
def test_a_claim_turns_in_a_planted_world(number, monkeypatch):
    plant, verdict = WORLDS[number]
    plant(monkeypatch)
    finding = CLAIMS[number].check()
    assert_equal(what="verdict", observed=finding.verdict, expected=verdict, case=number)
    assert finding.sentence.startswith("Other cases fail")  # nothing that is false there is said


@pytest.mark.parametrize(
    ("faster", "verdict"), [((0, 0), "confirmed"), ((21, 0), "conditional"), ((21, 21), "refuted")]
)
def test_the_claim_about_small_models_can_have_each_verdict(faster, verdict, monkeypatch):
    """A release is faster in all pairs of steps, or in none, of two sizes."""
    of_size = dict(zip((10**4, 10**5), faster, strict=True))

    def timed(size, items, k, *, pairs):
        n = of_size[size.parameters]
        saved = (0.001, 0.001) if n else (-0.001, -0.001)
        return step_times.PairedSteps(
            size.parameters, items, k, 0.004, 0.003, saved[0], saved, n, pairs, 4
        )

    monkeypatch.setattr(step_times, "PARAMETERS", {"cpu": tuple(of_size)})
    monkeypatch.setattr(claims, "time_paired_steps", timed)
    finding = CLAIMS["C1.8"].check()
    assert finding.verdict == verdict
    assert len(finding.rows) == 8


def test_the_claim_about_small_models_is_timed(monkeypatch):
    monkeypatch.setattr(step_times, "PARAMETERS", {"cpu": (10**4,)})
    monkeypatch.setattr(step_times, "PAIRS", 5)
    monkeypatch.setattr(step_times, "flush", lambda device: lambda: None)
    finding = CLAIMS["C1.8"].check()
    assert len(finding.rows) == 4
    assert all(row["zero"] > 0 and row["none"] > 0 for row in finding.rows)


@pytest.mark.parametrize("examples", [FEW, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize("printed", PRINTED, ids=lambda printed: printed.number)
def test_a_printed_loop_holds_only_under_what_it_relies_on(printed, examples):
    result = verify_printed(printed, examples=examples)
    assert result.within.holds, result.within.violation
    assert not result.bare.holds
    assert result.bare.violation.diagnosis


def test_a_condition_goes_with_a_conditional_verdict_alone():
    with pytest.raises(AssertionError):
        Finding("conditional", "s.")
    with pytest.raises(AssertionError):
        Finding("confirmed", "s.", condition="sometimes")


@pytest.mark.parametrize(
    ("cases", "verdict", "condition", "sentence"),
    [
        (
            (True, True),
            "confirmed",
            "",
            "Other cases fail than were known to. The claim holds for: a; b.",
        ),
        ((True, False), "conditional", "c", "s."),
        (
            (False, True),
            "conditional",
            "b",
            "Other cases fail than were known to. The claim holds for: b, and fails for: a.",
        ),
        (
            (False, False),
            "refuted",
            "",
            "Other cases fail than were known to. The claim fails for: a; b.",
        ),
    ],
)
def test_a_finding_says_what_was_written_only_where_it_fits(cases, verdict, condition, sentence):
    tried = dict(zip("ab", cases, strict=True))
    finding = judged(tried, "s.", fails=["b"], condition="c", counterexample="x", figures={})
    assert (finding.verdict, finding.condition, finding.sentence) == (verdict, condition, sentence)
