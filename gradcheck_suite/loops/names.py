"""The names of the built-in loops, which are known without the import of torch.

A test holds them equal to those of `reset_modes`, `jax_modes` and `ranks`.
"""

from __future__ import annotations

from itertools import product

_MODES = (
    *("zero_", "zero_grad", "zero_grad_foreach", "set_to_none", "grad_none", "flat_buffer"),
    *("zero_before_forward", "zero_between"),
)
_SOUND = ("plain", "rescale_at_the_end", "closure", "summed", "divide_by_steps")
_PRECISION = ("autocast_bfloat16", "grad_scaler", "float32_accumulator")
_JAX = ("jax_zeros_like", "jax_where", "jax_times_zero", "jax_donated", "jax_scan_carry")
_UNFIT = {
    "fsdp2": ("flat_buffer", "zero_between"),
    "tensor_parallel": ("zero_grad_foreach", "flat_buffer"),
}
"""The reset modes that a wrapper rules out."""
_FURTHER = (
    *("ddp_bucket_view/zero_grad", "ddp_bucket_view/set_to_none", "ddp_static_graph/zero_grad"),
    *("ddp_all_used/zero_grad", "fsdp2_resharded/zero_grad", "fsdp2_bfloat16/zero_grad"),
    *("zero_redundancy/zero_grad", "zero_redundancy/set_to_none"),
)
_OF_RANKS = tuple(
    f"{wrapper}/{mode}"
    for wrapper, mode in product(("all_reduce", "ddp", "fsdp2", "tensor_parallel"), _MODES)
    if mode not in _UNFIT.get(wrapper, ())
)
NAMES = (*_MODES, *_SOUND, *_PRECISION, *_JAX, *_OF_RANKS, *_FURTHER)
