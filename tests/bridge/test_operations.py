"""Every registered operation against torch, in value and gradient, on torch's own samples or on
ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import jax.numpy as jnp
import pytest
import torch
from torch.utils import _pytree as pytree

from gradcheck_suite.bridge import ops  # noqa: F401  (fills the table)
from gradcheck_suite.bridge.op_table import (
    RandomnessError,
    jax_dtype,
    lowering_of,
    register_op,
    table,
    to_array,
)
from tests.bridge.agreeing import assert_exported_agrees
from tests.bridge.comparing import TOLERANCE, Call, compare, compare_all
from tests.bridge.opinfo import direct, recorded
from tests.bridge.samples import ALSO, DECOMPOSED, ONLY, THROUGH, tensor

OPERATIONS = sorted({name.split(".")[1] for name in table() if name.startswith("aten.")})
VALUES_ARE_ANYTHING = {"empty", "empty_permuted", "empty_strided", "new_empty_strided"}
PYTHON_NUMBERS = {"_local_scalar_dense", "sym_constrain_range_for_size", "sym_numel", "sym_size"}
"""Operations on Python numbers; a test of their own covers them."""
NO_DERIVATIVE = {"bincount", "floor_divide", "heaviside", "histc"}
LOOSER = {
    # torch has it in float32 only
    "_grouped_mm": 1e-6,
    # torch's trigamma sums too few terms of its series: see studies/tests/test_surprises.py
    "digamma": 1e-9,
    "lgamma": 1e-9,
    "polygamma": 1e-7,
    # torch's 1/6 is a float32 in the backward of hardsigmoid: see studies/tests/test_surprises.py
    "hardsigmoid": 1e-7,
}
NO_GRADIENT_OF = {"as_strided_scatter": (0,), "_ctc_loss": (0,)}
"""Leaves whose gradient is wrong in torch (see studies/tests/test_surprises.py), or right only after log_softmax."""
FIRST_RESULT = {
    "_batch_norm_with_update_functional", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training", "_scaled_dot_product_flash_attention_for_cpu", "_weight_norm_interface",
    "native_batch_norm", "native_group_norm", "native_layer_norm",
}  # fmt: skip
"""Operations whose further results are for torch's own backward: they have no derivative there."""
ILL_CONDITIONED = {"native_batch_norm", "native_group_norm", "native_layer_norm"}
"""Normalizing two numbers gives +1 and -1 for all values, so the gradient consists of rounding errors only."""


def _by_name(calls: list[Any]) -> dict[str, list[Any]]:
    named: dict[str, list[Any]] = {}
    for call in calls:
        named.setdefault(call[0]._schema.name.partition("::")[2], []).append(call)
    return named


INSTEAD, BESIDE = _by_name(ONLY), _by_name(ALSO)


@cache
def _samples(name: str, each: int) -> list[Any]:
    """Return up to `each` of torch's own samples for every overload, and all samples written by
    hand.
    """
    by_hand = [*INSTEAD.get(name, ()), *BESIDE.get(name, ())]
    if name in INSTEAD:
        return by_hand
    # a function's first sample may call another overload, or none that can be compared
    most = max(each, 3)
    samples = [] if name in THROUGH else _kept(name, direct(name, most), each)
    samples = samples or _kept(
        name, recorded(name, THROUGH.get(name, name.lstrip("_")), most), each
    )
    return samples + by_hand


def _kept(name: str, found: Iterable[Any], each: int) -> list[Any]:
    count: Counter[Any] = Counter()
    samples = []
    for sample in found:
        op = sample[0]
        if count[op] < each and lowering_of(op) is not None and not _hopeless(name, *sample):
            count[op] += 1
            samples.append(sample)
    return samples


def _hopeless(name: str, op: Any, args: Any, kwargs: Any) -> bool:
    if name == "as_strided":
        return bool(kwargs.get("storage_offset")) or args[0].numel() < 1
    return name in ILL_CONDITIONED and args[0].numel() <= 6


def _without_sample(name: str) -> set[str]:
    """Return the overloads of an operation that no sample calls, or the operation where none calls
    any.
    """
    called = {str(op) for op, _, _ in _samples(name, 1)}
    return (
        {o for o in table() if o.startswith(f"aten.{name}.")} - called
        if called
        else {f"aten.{name}"}
    )


def _still(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x


def _calls(name: str, each: int) -> list[Call]:
    calls = []
    for op, args, kwargs in _samples(name, each):
        if name in NO_DERIVATIVE:
            args = pytree.tree_map(_still, args)
        masked = name in ("index", "index_put")
        calls.append(
            Call(
                op,
                args,
                kwargs,
                LOOSER.get(name, TOLERANCE),
                not masked,
                NO_GRADIENT_OF.get(name, ()),
            )
        )
    return calls


COMPARED = [name for name in OPERATIONS if name not in VALUES_ARE_ANYTHING | PYTHON_NUMBERS]
TOGETHER = 16
"""Operations that are compiled into one program: XLA takes most of its time for any program, however small."""


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore")  # torch's deprecations of what its own samples call
@pytest.mark.parametrize(
    "first", range(0, len(COMPARED), 20 * TOGETHER), ids=lambda first: f"from {COMPARED[first]}"
)
def test_operations_agree_with_torch(first):
    """Of every twentieth program; `--full` compares all samples of every operation."""
    compare_all([call for name in COMPARED[first : first + TOGETHER] for call in _calls(name, 1)])


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", COMPARED)
def test_an_operation_agrees_with_torch_on_all_samples(name):
    compare_all(_calls(name, 20))


@pytest.mark.parametrize("name", sorted(VALUES_ARE_ANYTHING))
def test_an_uninitialised_tensor_has_torchs_shape_and_dtype(name):
    like = (torch.ones(2, dtype=torch.float32),) if "like" in name or "new" in name else ()
    size = () if "like" in name else ([3, 2],)
    strides = ([2, 1],) if "strided" in name else ([0, 1],) if "permuted" in name else ()
    packet = getattr(torch.ops.aten, name)
    overload = torch._C._jit_resolve_packet(packet._qualified_op_name, *like, *size, *strides)
    op = getattr(packet, overload or "default")
    expected = op(*like, *size, *strides)
    got = lowering_of(op)(*map(to_array, like), *size, *strides)
    assert (got.shape, got.dtype) == (tuple(expected.shape), jax_dtype(expected.dtype))


def test_operations_that_return_python_numbers():
    x = jnp.ones((2, 3))
    assert lowering_of(torch.ops.aten.sym_size.int)(x, 1) == 3
    assert lowering_of(torch.ops.aten.sym_numel.default)(x) == 6
    assert lowering_of(torch.ops.aten._local_scalar_dense.default)(jnp.asarray(2.5)) == 2.5
    assert lowering_of(torch.ops.aten.sym_constrain_range_for_size.default)(2) is None


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_every_operation_has_a_sample_of_each_overload():
    missing = sorted(one for name in COMPARED for one in _without_sample(name))
    assert not missing, f"no sample of {missing}: add one to tests/bridge/samples.py"


def test_an_overload_without_a_sample_is_seen(monkeypatch):
    monkeypatch.setattr(f"{__name__}.table", lambda: ["aten.relu.default", "aten.relu.planted"])
    assert _without_sample("relu") == {"aten.relu.planted"}


def test_no_operation_is_lost():
    """There were 251 on 2026-11-27; one that is taken out on purpose lowers the number."""
    assert len(OPERATIONS) >= 251


TORCH_DECOMPOSES = [
    "_prelu_kernel", "addcdiv", "addcmul", "addr", "all", "aminmax", "argsort", "avg_pool1d", "baddbmm",
    "block_diag", "celu", "channel_shuffle", "conj_physical", "count_nonzero", "deg2rad", "diag_embed", "dot",
    "elu", "fill", "floor_divide", "frac", "gelu", "glu", "hardshrink", "heaviside", "huber_loss", "im2col",
    "index_add", "index_copy", "index_fill", "isclose", "isfinite", "isin", "isneginf", "isposinf", "kron", "lerp",
    "linalg_cross", "linspace", "log_sigmoid", "logaddexp", "logaddexp2", "logspace", "logsumexp", "masked_fill",
    "mish", "mse_loss", "mv", "nan_to_num", "nansum", "native_batch_norm", "native_group_norm", "native_layer_norm",
    "new_full", "new_ones", "new_zeros", "nll_loss2d_forward", "nll_loss_forward", "norm", "ones_like",
    "pixel_shuffle", "pixel_unshuffle", "positive", "prelu", "rad2deg", "reflection_pad1d", "reflection_pad2d",
    "relu6", "renorm", "repeat_interleave", "replication_pad1d", "replication_pad2d", "reshape", "resolve_conj",
    "roll", "rsub", "scaled_dot_product_attention", "select_scatter", "selu", "silu", "slice_scatter",
    "smooth_l1_loss", "soft_margin_loss", "softshrink", "split", "square", "stack", "t", "threshold", "trace",
    "transpose", "tril", "tril_indices", "triu", "triu_indices", "unbind", "unfold", "unsafe_split",
    "upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d", "upsample_trilinear3d", "vdot", "zeros_like",
]  # fmt: skip
"""Operations that the table leaves to torch's decomposition, whose derivative is torch's at corners, too."""


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*TORCH_DECOMPOSES, *_by_name(DECOMPOSED)])
def test_an_operation_that_torch_decomposes_agrees_with_torch(name):
    calls = [
        *_by_name(DECOMPOSED).get(name, ()),
        *(call for call in direct(name, 4) if not call[2].get("dropout_p")),
    ]
    calls = [call for call in calls if not _hopeless(name, *call)]
    calls = calls or list(recorded(name, THROUGH.get(name, name.lstrip("_")), 4))
    assert calls
    for op, args, kwargs in calls:
        if lowering_of(op) is None:  # else another overload, which is compared by itself
            args = pytree.tree_map(_still, args) if name in NO_DERIVATIVE else args
            args = (args[0], *map(_still, args[1:])) if name.startswith("nll_loss") else args
            assert_exported_agrees(
                op if name not in FIRST_RESULT else lambda *a, f=op, **k: f(*a, **k)[0],
                args,
                kwargs,
            )


def test_a_planted_fault_is_found():
    """The look-up that gives its padding row a gradient is the fault that the comparison must see."""
    weight, indices = tensor(5, 2), torch.tensor([1, 0, 3, 1])
    op = torch.ops.aten.embedding.default
    right = lowering_of(op)
    compare(op, (weight, indices, 1), {})
    try:
        register_op("aten.embedding")(lambda weight, indices, padding_idx=-1, *_: weight[indices])
        with pytest.raises(AssertionError, match="gradient of argument 0 is off"):
            compare(op, (weight, indices, 1), {})
    finally:
        register_op("aten.embedding")(right)
    compare(op, (weight, indices, 1), {})


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (torch.ops.aten.native_dropout.default, (tensor(3), 0.5, True)),
        (torch.ops.aten.rrelu.default, (tensor(3), 0.1, 0.3, True)),
    ],
)
def test_active_randomness_is_refused(op, arguments):
    with pytest.raises(RandomnessError):
        compare(op, arguments, {})
