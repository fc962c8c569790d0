"""The number of graphs that `torch.compile` makes under each reset mode."""

from __future__ import annotations

import pytest

from studies.compiled_steps import EXPERTS, PARTS, VERSIONS, forget, graphs, graphs_needed, training
from studies.reset_modes import RESET_MODES
from studies.workload import Size


@pytest.fixture(autouse=True)
def _nothing_compiled_before_or_after():
    forget()
    yield
    forget()


# torch.compile warns about its own internals
@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["zero_", "set_to_none"])
@pytest.mark.parametrize("part", PARTS)
def test_graphs(part, mode):
    run = training(
        part, RESET_MODES[mode], Size(100, "few"), 2, "cpu", compiled=True, backend="eager"
    )
    made = []
    for _ in range(EXPERTS + 1):
        run()
        made.append(graphs())
    assert made[-1] == made[-2] == graphs_needed(part, RESET_MODES[mode])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.full
def test_a_released_expert_costs_a_version_each_turn():
    run = training(
        PARTS[3],
        RESET_MODES["set_to_none"],
        Size(100, "few"),
        1,
        "cpu",
        compiled=True,
        backend="eager",
    )
    for turn in range(EXPERTS):
        run()
        assert graphs() == min(turn + 1, VERSIONS)
