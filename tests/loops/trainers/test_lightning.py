"""Lightning's Trainer divides by K whatever the window.

Fabric's primitives are sound, its printed loop is not.
"""

from __future__ import annotations

import pytest

pytest.importorskip("lightning", reason="needs lightning: pip install '.[lightning]'")

from gradcheck_suite.loops.trainers.trainer import PLANS
from tests.loops.trainers.expecting import at_version, cells, diagnosis

# equal counts, unequal counts, short last window, epoch shorter than K, several epochs, sum loss
FOUND = {
    "lightning": (None, "mean-of-means", "mean-of-means", "mean-of-means", None, "wrong-scale"),
    "lightning-manual": (None, "mean-of-means", "tail-leak", "tail-leak", None, "wrong-scale"),
    "fabric": (None,) * len(PLANS),
    "fabric-printed": ("wrong-windows",) * len(PLANS),
}


@at_version("lightning", "2.6.6")
@pytest.mark.parametrize(("trainer", "question", "wanted"), cells(FOUND, PLANS))
def test_lightning(trainer, question, wanted):
    assert diagnosis(trainer, question) == wanted
