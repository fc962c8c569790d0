"""What counts as evidence: numbers that the port alone has, and no coincidences."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradcheck_suite.core.causes import CAUSES
from gradcheck_suite.port import judge as judging
from gradcheck_suite.port import search as searching
from gradcheck_suite.port.budget import Budget
from gradcheck_suite.port.changes import Hypothesis, of_result
from gradcheck_suite.port.compare import judge_function
from gradcheck_suite.port.jax_program import JaxProgram
from gradcheck_suite.port.judgement import Judgement
from gradcheck_suite.port.matching import Matching, Side, only_moves
from gradcheck_suite.port.mistakes import FORMULAS
from gradcheck_suite.port.number_sets import Numbers, error
from gradcheck_suite.port.running_statistics import STATISTICS
from gradcheck_suite.port.search import CauseSearch, Repairs, Witness, in_every_layer
from gradcheck_suite.port.torch_program import Ref, TorchProgram, TorchRun
from gradcheck_suite.port.updates import FORMS, VALUES
from tests.port.pairs import rotary

WHOLE = Budget(until=1e12)
X = np.random.default_rng(0).normal(size=(3, 4))


class Small(nn.Module):
    """A linear map, an activation and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 5).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.map(x).relu().mean(0)


def matched(*values: Any) -> Matching:
    """Return a run of `Small` beside a port that has some values."""
    torch.manual_seed(0)
    program = TorchProgram(Small(), (X,), (), {}, lambda out: (out, out.sum()))
    run = Repairs().run(program)
    arrays = [np.asarray(v, np.float64) for v in (X, *values)]
    return Matching(program, run, Side(arrays, [None] * len(arrays), [], 0.0))


def call(matching: Matching, name: str) -> int:
    return next(i for i, c in enumerate(matching.program.calls) if c.name == name)


@pytest.mark.parametrize(
    ("name", "moves"), [("t", True), ("relu", True), ("addmm", False), ("mean", False)]
)
def test_a_call_moves_numbers_where_its_result_has_no_others(name, moves):
    matching = matched()
    index = call(matching, name)
    assert (
        only_moves(matching.program.calls[index], matching.run.seen[index], matching.run) is moves
    )


def test_a_result_in_another_layout_is_matched():
    right = matched().run.seen[call(matched(), "addmm")][0].numpy()
    assert matched(right.T[::-1]).status[call(matched(), "addmm")] is True
    assert matched(right + 1e-6).status[call(matched(), "addmm")] is False


def test_numbers_that_torch_has_too_explain_nothing():
    """A change that returns the operand is no explanation: both sides have it."""
    plain = matched()
    index = call(plain, "addmm")
    old, other = (
        plain.run.seen[index],
        torch.as_tensor(np.random.default_rng(1).normal(size=(3, 5))),
    )
    both = matched(old[0].numpy(), other.numpy())
    assert both.is_new([other], old)
    assert not both.is_new(old, old)
    assert not both.is_new([torch.as_tensor(X)], old)


def test_numbers_with_little_variety_explain_nothing():
    plain = matched()
    index = call(plain, "addmm")
    constant = torch.full((3, 5), 0.3)
    assert not matched(constant.numpy()).is_new([constant], plain.run.seen[index])


@pytest.mark.parametrize(
    ("observed", "expected", "off"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([-1e38, 1.0], [-1e31, 1.0], 0.0),  # masks
        ([-np.inf, 1.0], [-1e31, 1.0], np.inf),
        ([-np.inf, 1.0], [-np.inf, 1.0], 0.0),
        ([np.nan, 1.0], [0.0, 1.0], np.inf),
        ([5.0, 1.0], [np.nan, 1.0], np.inf),
        ([np.nan, 1.0], [np.nan, 1.0], 0.0),
        ([1.0], [1.0, 2.0], np.inf),
    ],
)
def test_the_error_of_an_array(observed, expected, off):
    assert error(np.array(observed), np.array(expected)) == off


def test_masks_and_counts_tell_nothing():
    assert Numbers([X]).holds(np.array([0.0, 1.0, 0.5, -3.25, np.inf])) is None
    assert Numbers([X]).holds(X[1]) is True


def test_a_change_of_one_layer_is_that_of_all():
    names = ["h.0.q.weight", "h.0.k.weight", "h.1.q.weight", "h.1.k.weight", "head.weight"]
    exchanged = {("state", "h.0.q.weight"): Ref("state", "h.0.k.weight")}
    assert in_every_layer(names, exchanged) == exchanged | {
        ("state", "h.1.q.weight"): Ref("state", "h.1.k.weight"),
    }


def test_every_cause_that_is_tried_is_in_the_table():
    tried = {row.cause for row in (*FORMULAS, *VALUES, *FORMS, *STATISTICS)}
    assert {part for cause in tried for part in cause.split(" and ")} <= CAUSES.keys()
    assert all(cause.meaning and cause.remedy for cause in CAUSES.values())


@pytest.mark.parametrize(("factor", "believed"), [(1.0, True), (2.0, False)])
def test_a_change_has_to_explain_another_state_too(factor, believed):
    """A sum with one number has the port's values at one state.

    At another one the port multiplies, or adds, too.
    """
    sides = []
    for seed, scale in ((0, 1.0), (1, factor)):
        torch.manual_seed(seed)
        program = TorchProgram(Small(), (X,), (), {}, lambda out: (out, out.sum()))
        run = Repairs().run(program)
        theirs = (
            scale * run.seen[next(i for i, c in enumerate(program.calls) if c.name == "addmm")][0]
            + 0.3
        ).relu()
        out = theirs.mean(0)
        values = [X, theirs.numpy(), out.numpy()]
        sides.append((program, run, Side(values, [None] * 3, [out.numpy()], float(out.sum()))))
    (program, run, side), (other, _, elsewhere) = sides
    index = next(i for i, c in enumerate(program.calls) if c.name == "addmm")
    search = CauseSearch(
        program,
        Matching(program, run, side),
        Repairs(),
        False,
        1e-9,
        WHOLE,
        [Witness(other, elsewhere, 1e-9)],
    )
    hypothesis = Hypothesis("constant", "", {index: of_result(lambda o: o + 0.3)})
    found = search.test(index, hypothesis)
    assert found is not None
    assert found.error < 1e-9
    assert search.is_confirmed(found) is believed


class Gained(nn.Module):
    """A linear map times a number."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.gain = nn.Linear(4, 5).double(), nn.Parameter(torch.randn(1).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.map(x) * self.gain.exp()


def gained() -> tuple[TorchProgram, TorchRun, int, torch.Tensor]:
    """Return a program and its run, the index of the number in it, and what the number multiplies."""
    torch.manual_seed(0)
    program = TorchProgram(Gained(), (X,), (), {}, lambda out: (out, out.sum()))
    run = Repairs().run(program)
    names = [call.name for call in program.calls]
    return program, run, names.index("exp"), run.seen[names.index("addmm")][0]


@pytest.mark.parametrize("explains", [False, True])
def test_one_number_explains_nothing_where_the_outputs_still_differ(explains):
    """The port may have the number from another layer."""
    program, run, index, before = gained()
    out = before * 0.7123 if explains else before.cos()
    values = [X, before.numpy(), np.array([0.7123]), out.numpy()]
    matching = Matching(program, run, Side(values, [None] * 4, [out.numpy()], float(out.sum())))
    search = CauseSearch(program, matching, Repairs(), False, 1e-9, WHOLE)

    def other_number(search: CauseSearch, place: int) -> Any:
        if place == index:
            yield Hypothesis("constant", "", {index: of_result(lambda o: 0 * o + 0.7123)})

    families = [(other_number, "order"), (lambda search, place: iter(()), "first")]
    found = search.find(families, *matching.region(matching.ends(False, 1e-9)))
    assert (found is not None) is explains


@pytest.mark.parametrize("stopped", [False, True])
def test_a_search_that_the_clock_stops_names_nothing(stopped):
    """What explains most depends on what was tried until then."""
    program, run, index, before = gained()
    middle = before * 0.7123
    values = [X, before.numpy(), np.array([0.7123]), middle.numpy(), middle.numpy() + 1]
    matching = Matching(
        program, run, Side(values, [None] * 5, [values[-1]], float(values[-1].sum()))
    )
    search = CauseSearch(program, matching, Repairs(), False, 1e-9, WHOLE)

    def other_number(search: CauseSearch, place: int) -> Any:
        if place == index:
            yield Hypothesis("constant", "", {index: of_result(lambda o: 0 * o + 0.7123)})
            search.budget.until *= not stopped
            yield Hypothesis("constant", "", {index: of_result(lambda o: 0 * o + 0.5)})

    found = search.find([(other_number, "order")], *matching.region(matching.ends(False, 1e-9)))
    assert (found is None) is stopped
    assert ("stopped after 150 s" in search.budget.words) is stopped


@pytest.mark.share(4)
def test_a_slow_machine_names_what_a_fast_one_does(monkeypatch):
    """The search takes half a second, and half a minute by this clock."""
    clock = time.process_time
    monkeypatch.setattr(time, "process_time", lambda: 100 * clock())
    assert [f.cause for f in judge_function(lambda: rotary("base"), "pair").findings] == [
        "constant"
    ]


def test_a_judgement_that_the_clock_stops_says_what_was_not_judged(monkeypatch):
    def stopped(judgement: Judgement) -> None:
        judgement.budget.until = 0.0

    monkeypatch.setattr(judging, "judge_loading", stopped)
    result = judge_function(rotary, "pair")
    assert (result.verdict, result.judged) == ("unjudged", ())
    assert result.unjudged == "not judged from outputs on: 150 s were over"


def test_a_search_that_has_tried_all_that_it_may_says_so(monkeypatch):
    monkeypatch.setattr(searching, "CANDIDATES", 5)
    (finding,) = judge_function(lambda: rotary("base"), "pair").findings
    assert finding.cause == "unknown"
    assert "before all candidates were tried" in finding.words


def test_a_value_that_nothing_depends_on_is_no_evidence():
    """The port computes torch's value, and returns another one."""

    def port(leaves: list[Any], inputs: list[Any], targets: list[Any]) -> Any:
        _ = inputs[0] * 3.0
        return [inputs[0] * 5.0], [], (inputs[0] * 5.0).sum()

    values = [result.value for result in JaxProgram(port, [], [X], []).forward([], [X], [])[2]]
    assert Numbers(values).holds(5.0 * X)
    assert not Numbers(values).holds(3.0 * X)
