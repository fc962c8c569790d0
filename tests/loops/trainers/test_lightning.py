"""Lightning's Trainer divides by K whatever the window; Fabric's primitives are sound, its printed loop is not."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning", reason="needs lightning: pip install '.[lightning]'")

from gradcheck_suite.loops.trainers.trainer import PLANS
from tests.loops.trainers.expecting import at_version, cells, diagnosis

FIRST = frozenset({"first-only", "repeated-micro-batch", "dropped-micro-batch"})
"""A smallest case may fit several names. Which ones depends on how small a case is found in the time for that."""
# equal counts, unequal counts, short last window, epoch shorter than K, several epochs, sum loss
FOUND = {
    "lightning": (None, "mean-of-means", "mean-of-means", "mean-of-means", None, "wrong-scale"),
    "lightning-manual": (None, "mean-of-means", "tail-leak", "tail-leak", None, "wrong-scale"),
    "fabric": (None,) * len(PLANS),
    "fabric-printed": (FIRST,) * len(PLANS),
}


@at_version("lightning", "2.6.6")
@pytest.mark.parametrize(("trainer", "question", "wanted"), cells(FOUND, PLANS))
def test_lightning(trainer, question, wanted):
    found = diagnosis(trainer, question)
    assert set(found.split(" or ")) <= wanted if isinstance(wanted, frozenset) else found == wanted
