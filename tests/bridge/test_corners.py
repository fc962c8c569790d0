"""Corners, ties and zeros: where a function has no derivative, JAX must return the same one as
torch.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import jax
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from gradcheck_suite.bridge.op_table import jax_dtype, lowering_of, to_array
from tests.bridge.agreeing import assert_agrees
from tests.bridge.comparing import TOLERANCE, Call, compare, compare_all
from tests.bridge.samples import tensor
from tests.bridge.test_operations import LOOSER, TOGETHER

aten = torch.ops.aten
CORNERS = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 3.0, -3.0, 6.0, 2.0, -2.0, 0.25, 20.0, 21.0]


def corners(values: Any = CORNERS) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).requires_grad_()


UNARY = [
    "abs", "acos", "acosh", "asin", "asinh", "atan", "ceil", "cosh", "digamma", "erf",
    "erfinv", "exp2", "expm1", "floor", "hardswish", "hardtanh", "i0", "leaky_relu",
    "lgamma", "log", "log1p", "logit", "reciprocal", "relu", "round",
    "rsqrt", "sgn", "sigmoid", "sign", "sinc", "softplus", "special_entr",
    "special_i0e", "special_i1", "special_log_ndtr", "sqrt", "tan", "tanh", "trunc",
]  # fmt: skip


@pytest.mark.parametrize("first", range(0, len(UNARY), TOGETHER), ids=lambda i: f"from {UNARY[i]}")
def test_functions_of_one_number(first):
    calls = []
    for name in UNARY[first : first + TOGETHER]:
        # which infinity torch's logit has at -0.0 depends on the element's place: see
        # studies/tests/test_surprises.py
        values = [
            value for value in CORNERS if name != "logit" or math.copysign(1.0, value) > 0 or value
        ]
        calls.append(
            Call(getattr(aten, name).default, (corners(values),), {}, LOOSER.get(name, TOLERANCE))
        )
    compare_all(calls)


PAIRS = [(a, b) for a in (0.0, 1.0, -1.0, 2.0, -3.0, 0.5) for b in (0.0, 1.0, -1.0, 2.0, -3.0, 0.5)]
BINARY = [
    aten.add.Tensor, aten.atan2.default, aten.copysign.Tensor, aten.div.Tensor, aten.fmax.default, aten.fmin.default,
    aten.hypot.default, aten.maximum.default, aten.minimum.default, aten.mul.Tensor,
    aten.pow.Tensor_Tensor, aten.xlogy.Tensor, aten.special_xlog1py.default, aten.clamp_min.Tensor,
    aten.clamp_max.Tensor,
]  # fmt: skip


OLD = torch.__version__ < (2, 13)
"""Whether torch has NaN for the gradient of atan2 at the origin, and none of aminmax: so it is in 2.9."""


def test_functions_of_two_numbers():
    left, right = (corners(values) for values in zip(*PAIRS, strict=True))
    compare_all(
        [Call(op, (left, right), {}) for op in BINARY if not (OLD and op is aten.atan2.default)]
    )


REMAINDERS = [
    (a, b) for a in (0.0, 1.0, -1.0, 2.0, -3.0, 0.5, 7.25) for b in (1.0, -1.0, 2.0, -3.0, 0.5)
]


def test_remainders_and_rounded_quotients():
    left, right = (corners(values) for values in zip(*REMAINDERS, strict=True))
    remainders = [Call(op, (left, right), {}) for op in (aten.fmod.Tensor, aten.remainder.Tensor)]
    quotients = [
        Call(aten.div.Tensor_mode, (left, right), {"rounding_mode": mode})
        for mode in ("floor", "trunc")
    ]
    compare_all(remainders + quotients)


def test_powers_of_corners():
    exponents = (0, 1, 2, 3, -1, 0.5, 1.5, 0.0)
    compare_all(
        [
            Call(aten.pow.Tensor_Scalar, (corners(),), {"exponent": exponent})
            for exponent in exponents
        ]
    )


TIES = [[1.0, 2.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0], [-1.0, 3.0, 3.0, 3.0]]
REDUCTIONS = [
    (aten.amax.default, ([1],)), (aten.amin.default, ([0],)), (aten.max.default, ()), (aten.min.default, ()),
    (aten.max.dim, (1,)), (aten.min.dim, (0,)), (aten.median.default, ()), (aten.prod.default, ()),
    (aten.prod.dim_int, (1,)), (aten.cumprod.default, (1,)), (aten.std.correction, ([1],)),
    (aten.var.correction, ([0],)), (aten.linalg_vector_norm.default, (2, [1])),
    (aten.linalg_vector_norm.default, (1, [1])), (aten.linalg_vector_norm.default, (3.5, [1])),
    (aten.linalg_vector_norm.default, (float("inf"), [1])),
    (aten.cummax.default, (1,)), (aten.cummin.default, (0,)), (aten.sort.stable, ()),
    (aten.logcumsumexp.default, (1,)), (aten._softmax.default, (1, False)),
]  # fmt: skip


DECOMPOSED: dict[str, list[Any]] = {
    "unary": [
        aten.celu.default, aten.deg2rad.default, aten.elu.default, aten.frac.default,
        aten.gelu.default, partial(aten.gelu.default, approximate="tanh"), aten.hardshrink.default, aten.mish.default,
        aten.nan_to_num.default, aten.silu.default, aten.softshrink.default,
        partial(aten.soft_margin_loss.default, target=-torch.ones(len(CORNERS), dtype=torch.float64)),
        partial(aten.threshold.default, threshold=0, value=3),
    ],
    "binary": [
        aten._prelu_kernel.default, aten.huber_loss.default, aten.logaddexp.default, aten.logaddexp2.default,
        aten.mse_loss.default, aten.smooth_l1_loss.default,
    ],
    "reductions": [
        *([] if OLD else [partial(aten.aminmax.default, dim=1)]),
        partial(aten.logsumexp.default, dim=[1]), aten.nansum.default,
        partial(aten.norm.ScalarOpt_dim, p=2, dim=[1]), partial(aten.renorm.default, p=2, dim=0, maxnorm=1),
    ],
}  # fmt: skip
"""Functions of corners, of pairs of them and of rows with ties that the table leaves to torch's decomposition."""


@pytest.mark.full
@pytest.mark.parametrize("kind", DECOMPOSED)
def test_what_torch_decomposes(kind):
    given = {"unary": [CORNERS], "binary": list(zip(*PAIRS, strict=True)), "reductions": [TIES]}[
        kind
    ]

    def loss(model: Any, batch: Any) -> torch.Tensor:
        outs = [x for function in DECOMPOSED[kind] for x in pytree.tree_leaves(function(*model))]
        return sum(number * out.sin().sum() for number, out in enumerate(outs, start=1))

    assert_agrees(
        torch.nn.ParameterList([corners(values).detach() for values in given]), loss, [], jit=False
    )


@pytest.mark.parametrize(
    "first", range(0, len(REDUCTIONS), TOGETHER), ids=lambda i: f"from {REDUCTIONS[i][0]}"
)
def test_reductions_with_ties_and_zeros(first):
    calls = []
    for op, arguments in REDUCTIONS[first : first + TOGETHER]:
        kwargs = {"stable": True} if op is aten.sort.stable else {}
        calls.append(Call(op, (corners(TIES), *arguments), kwargs))
    compare_all(calls)


def test_scattered_ties_and_zeros():
    index = torch.tensor([[0, 0, 1], [2, 2, 2]])
    source = corners([[2.0, 2.0, 0.0], [0.0, 3.0, 3.0]])
    calls = []
    for reduce, include_self in itertools.product(
        ("sum", "prod", "mean", "amax", "amin"), (True, False)
    ):
        # torch counts a tie with an entry of self that is not included: see
        # studies/tests/test_surprises.py
        into = corners(TIES) if include_self else (corners(TIES) - 7).detach().requires_grad_()
        calls.append(
            Call(
                aten.scatter_reduce.two,
                (into, 1, index, source, reduce),
                {"include_self": include_self},
            )
        )
    compare_all(calls)


def test_pooling_windows():
    """Where windows are rounded up, rows would have one that begins behind them, and columns one
    that ends there.
    """
    image, windows = tensor(1, 2, 5, 6), ([2, 3], [2, 2], [1, 0])
    calls = []
    for round_up in (False, True):
        calls.append(
            Call(aten.max_pool2d_with_indices.default, (image, *windows, [2, 1], round_up), {})
        )
        for count_padding in (False, True):
            calls.append(
                Call(aten.avg_pool2d.default, (image, *windows, round_up, count_padding), {})
            )
    compare_all(calls)


def test_pooling_ties():
    image = corners(
        [[[[1.0, 1.0, 0.0, 2.0], [1.0, 1.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0], [3.0, 0.0, 0.0, 3.0]]]]
    )
    pools = (aten.max_pool2d_with_indices.default, aten.adaptive_max_pool2d.default)
    compare_all([Call(pool, (image, [2, 2]), {}) for pool in pools])


def test_clamps_at_their_bounds():
    bounds = corners([0.0, 2.0, 1.0, 3.0]), corners([1.0, 2.0, 0.0, 3.0])
    compare_all(
        [
            Call(aten.clamp.default, (corners(), -1, 3), {}),
            Call(aten.clamp.default, (corners([-1.0, 0.0, 3.0, math.nan]), -1, 3), {}),
            Call(aten.clamp.Tensor, (corners(TIES), *bounds), {}),
        ]
    )


@given(
    values=st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.0]), min_size=4, max_size=4),
    p=st.sampled_from([1, 2, 3]),
)
def test_distances_of_points_that_coincide(values, p):
    points = corners(values).reshape(2, 2).detach().requires_grad_()
    compare(
        aten._cdist_forward.default, (points, corners([[0.0, 1.0], [2.0, 2.0]]), float(p), None), {}
    )


DTYPES = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64]


@pytest.mark.parametrize("op", ["add", "mul", "div", "sub", "maximum", "remainder", "where", "eq"])
def test_dtypes_promote_as_in_torch(op):
    """Tensors with axes, tensors without, and Python numbers: three priorities."""
    packet = getattr(aten, op)
    numbers = [torch.ones(shape, dtype=dtype) for dtype in DTYPES for shape in ((2,), ())]
    for left, right in itertools.product(numbers[::2], [*numbers, 2, 2.5, True]):
        args = (left, right)
        args = (torch.tensor([True, False]), *args) if op == "where" else args
        try:
            overload = getattr(
                packet, torch._C._jit_resolve_packet(packet._qualified_op_name, *args)
            )
            expected = overload(*args)
        except RuntimeError:
            continue  # torch has no such operation: no minus for booleans, no maximum of a tensor and a number
        if lowering_of(overload) is None:
            continue  # torch makes tensors of the numbers
        arrays = [to_array(x) if isinstance(x, torch.Tensor) else x for x in args]
        got = jax.eval_shape(partial(lowering_of(overload), *arrays))
        assert (got.dtype, got.shape) == (jax_dtype(expected.dtype), tuple(expected.shape)), (
            overload,
            args,
        )
