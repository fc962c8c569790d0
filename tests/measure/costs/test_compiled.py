"""How many graphs `torch.compile` makes under each mode: what compiled code is specialised on."""

from __future__ import annotations

import pytest

from gradcheck_suite.measure.compiled import EXPERTS, PARTS, VERSIONS, forget, graphs, graphs_needed, training
from gradcheck_suite.measure.models import Size
from gradcheck_suite.measure.resets import MODES


@pytest.fixture(autouse=True)
def _nothing_compiled_before_or_after():
    forget()
    yield
    forget()


# the capturing itself warns of what torch does inside
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["zero_", "set_to_none"])
@pytest.mark.parametrize("part", PARTS)
def test_graphs(part, mode):
    run = training(part, MODES[mode], Size(100, "few"), 2, "cpu", compiled=True, backend="eager")
    made = []
    for _ in range(EXPERTS + 1):
        run()
        made.append(graphs())
    assert made[-1] == made[-2] == graphs_needed(part, MODES[mode])


@pytest.mark.filterwarnings("ignore")
def test_a_released_expert_costs_a_version_each_turn():
    run = training(PARTS[3], MODES["set_to_none"], Size(100, "few"), 1, "cpu", compiled=True, backend="eager")
    for turn in range(EXPERTS):
        run()
        assert graphs() == min(turn + 1, VERSIONS)
