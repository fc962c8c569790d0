"""Correct loops for several ranks: every reset mode in each way of adding up gradients over the ranks."""

from __future__ import annotations

from gradcheck_suite.loops.modes import MODES
from gradcheck_suite.loops.ranks.all_reduce import all_reduced
from gradcheck_suite.loops.ranks.ddp import in_ddp
from gradcheck_suite.schema.contract import Loop

WRAPPERS = {"all_reduce": all_reduced, "ddp": in_ddp}
"""Ways to add up gradients over ranks, each a function that makes one loop of another."""
RANK_MODES: dict[str, Loop] = {
    f"{name}/{mode}": wrap(loop) for name, wrap in WRAPPERS.items() for mode, loop in MODES.items()
}
"""What `verify --ranks` runs when it is given no loop: every reset mode in every wrapper, by the names of both."""
RANK_LOOPS: dict[str, Loop] = {
    **RANK_MODES,
    # a gradient that is a view of a bucket refuses detach_(), so no mode that zeroes by hand
    "ddp_bucket_view/zero_grad": in_ddp(MODES["zero_grad"], gradient_as_bucket_view=True),
    "ddp_bucket_view/set_to_none": in_ddp(MODES["set_to_none"], gradient_as_bucket_view=True),
}
"""All built-in loops for several ranks by name."""
