"""Correct loops for several ranks: every reset mode in each way of adding up gradients over the ranks."""

from __future__ import annotations

from gradcheck_suite.loops.modes import MODES
from gradcheck_suite.loops.ranks import fsdp2, tensor_parallel
from gradcheck_suite.loops.ranks.all_reduce import all_reduced
from gradcheck_suite.loops.ranks.ddp import in_ddp
from gradcheck_suite.loops.ranks.fsdp2 import SAME_PARAMETERS, in_fsdp2
from gradcheck_suite.loops.ranks.tensor_parallel import in_tensor_parallel
from gradcheck_suite.loops.ranks.zero_redundancy import in_zero_redundancy
from gradcheck_suite.schema.contract import EVEN_RANKS, NO_LAYER, Loop

WRAPPERS = {"all_reduce": all_reduced, "ddp": in_ddp, "fsdp2": in_fsdp2, "tensor_parallel": in_tensor_parallel}
"""Ways to train on several ranks, each a function that makes one loop of another."""
UNFIT = {"fsdp2": fsdp2.UNFIT, "tensor_parallel": tensor_parallel.UNFIT}
"""The reset modes that a wrapper rules out."""
RANK_MODES: dict[str, Loop] = {
    f"{name}/{mode}": wrap(loop)
    for name, wrap in WRAPPERS.items()
    for mode, loop in MODES.items()
    if mode not in UNFIT.get(name, ())
}
"""What `verify --ranks` runs when it is given no loop: every reset mode in every wrapper, by the names of both."""
_ZEROED, _RELEASED = MODES["zero_grad"], MODES["set_to_none"]
RANK_LOOPS: dict[str, Loop] = {
    **RANK_MODES,
    # one mode that zeroes and one that releases
    "ddp_bucket_view/zero_grad": in_ddp(_ZEROED, gradient_as_bucket_view=True),
    "ddp_bucket_view/set_to_none": in_ddp(_RELEASED, gradient_as_bucket_view=True),
    "ddp_static_graph/zero_grad": in_ddp(
        _ZEROED, assumes=(*SAME_PARAMETERS, EVEN_RANKS), static_graph=True, find_unused_parameters=False
    ),
    "ddp_all_used/zero_grad": in_ddp(
        _ZEROED, assumes=(*SAME_PARAMETERS, f"{NO_LAYER}unused"), find_unused_parameters=False
    ),
    "fsdp2_resharded/zero_grad": in_fsdp2(_ZEROED, reach_all=False, reshard_after_forward=True),
    "fsdp2_bfloat16/zero_grad": in_fsdp2(_ZEROED, compute="bfloat16"),
    "zero_redundancy/zero_grad": in_zero_redundancy(_ZEROED),
    "zero_redundancy/set_to_none": in_zero_redundancy(_RELEASED),
}
"""All built-in loops for several ranks by name."""
