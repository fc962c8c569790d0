"""A name is held to the case that is shown: its weights or elements must give that gradient."""

from __future__ import annotations

import pytest
import torch

from gradcheck_suite.core.faults import names_of
from gradcheck_suite.verification.verify import verify
from tests.verification import misnamed
from tests.verification.misnamed import NAMES

# torch says so of the first module, whose inputs need no gradient
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")
DEFAULT = (misnamed.refills_before_the_backward, misnamed.keeps_what_is_not_finite)
"""The loops that are verified in every run of the tests."""
OF_RANKS = (misnamed.a_rank_is_late, misnamed.trains_on_the_same_data)
SOUND = (
    misnamed.refills_after_the_backward,
    misnamed.writes_and_restores,
    misnamed.a_module_hook_looks,
)
SAYS = {
    misnamed.swallows_an_exception: "the loss raised once, and the loop went on: KeyError: 'x'",
    misnamed.a_module_hook_halves: "without them the gradient is right",
    misnamed.drops_the_tail_of_the_first_epoch: "the short last window",
    misnamed.shifts_a_flat_buffer: "shifted by 1",
    misnamed.trains_on_the_same_data: "`DistributedSampler`",
    misnamed.writes_before_the_backward: "written between the forward and the backward",
    misnamed.refills_before_the_backward: "the memory of x is written again between the forward",
}
"""What the explanation of a loop must say."""


@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(loop, marks=() if loop in DEFAULT else pytest.mark.full)
        for loop in NAMES
        if loop not in OF_RANKS
    ],
    ids=lambda loop: loop.__name__,
)
def test_a_fault_that_looks_like_another_has_a_right_name_or_a_general_one(loop):
    violation = verify(loop, examples=60).violation
    assert names_of(violation.diagnosis) <= NAMES[loop], violation.explanation
    assert SAYS.get(loop, "") in violation.explanation


@pytest.mark.full
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("loop", OF_RANKS, ids=lambda loop: loop.__name__)
def test_a_fault_of_ranks_that_looks_like_another_has_a_right_name(loop):
    sums = loop is misnamed.trains_on_the_same_data
    assumes = ("sum-reduction", "even-ranks") if sums else ()
    violation = verify(loop, examples=20, ranks=2, assumes=assumes).violation
    assert names_of(violation.diagnosis) <= NAMES[loop], violation.explanation
    assert SAYS.get(loop, "") in violation.explanation


@pytest.mark.full
@pytest.mark.parametrize("loop", SOUND, ids=lambda loop: loop.__name__)
def test_the_sound_loop_beside_it_holds(loop):
    result = verify(loop, examples=60)
    assert result.violation is None, result.violation.explanation


def test_a_sparse_gradient_shares_the_memory_of_the_ids():
    """Ids that are filled again after the backward move the rows of a sparse `.grad`."""
    table = torch.nn.Embedding(5, 2, sparse=True)
    ids = torch.tensor([1])
    table(ids).square().sum().backward()
    of_row = 2 * table.weight[1].detach()
    ids.fill_(3)
    moved = torch.zeros(5, 2)
    moved[3] = of_row
    torch.testing.assert_close(table.weight.grad.to_dense(), moved)
