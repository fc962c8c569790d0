"""Whatever a loop is run on, probe or drawn case, is within what the loop assumes."""

from __future__ import annotations

import pytest

from gradcheck_suite import cases, verify
from gradcheck_suite.execution.instance import generated_instance
from gradcheck_suite.generation.drawing import draw_cases
from gradcheck_suite.loops import BUILT_IN


def noted(facts):
    """Return a sound loop that notes what each of its runs has."""

    def loop(run):
        batches = list(run.loader)
        counts = [float(run.count(batch)) for batch in batches]
        items = [len(next(iter(batch.values()))) for batch in batches]
        fact = {"epochs": run.epochs, "reduction": run.reduction, "counts": counts, "items": items}
        facts.append({**fact, "sparse": False, "steps": run.accumulation_steps})

        def note(*_):
            if any(p.grad is not None and p.grad.is_sparse for p in run.model.parameters()):
                facts[-1]["sparse"] = True

        handle = run.optimizer.register_step_pre_hook(note)
        BUILT_IN["plain"](run)
        handle.remove()

    return loop


def within(counts):
    return max(counts) - min(counts) <= 1e-12 * max(counts)


HOLDS = {
    "one-epoch": lambda fact: fact["epochs"] == 1,
    "mean-reduction": lambda fact: fact["reduction"] == "mean",
    "sum-reduction": lambda fact: fact["reduction"] == "sum",
    "equal-batches": lambda fact: len(set(fact["items"])) == 1 and within(fact["counts"]),
    "plain-counts": lambda fact: within([c / n for c, n in zip(fact["counts"], fact["items"], strict=True)]),
    "whole-windows": lambda fact: len(fact["items"]) % fact["steps"] == 0,
    "dense-gradients": lambda fact: not fact["sparse"],
}


@pytest.fixture(scope="module")
def free():
    """The runs of a loop that assumes nothing, on drawn cases."""
    facts = []
    for case in draw_cases(cases(), examples=40, seed_value=0):
        noted(facts)(generated_instance(case).run())
    return facts


@pytest.mark.parametrize("assumed", HOLDS)
def test_runs_are_within_an_assumption_that_others_leave(assumed, free):
    facts = []
    assert verify(noted(facts), examples=8, assumes=(assumed,)).holds
    assert all(map(HOLDS[assumed], facts))
    assert not all(map(HOLDS[assumed], free))
