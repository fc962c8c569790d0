"""Calls of the operations that torch's own samples do not reach, and of further overloads of some
of the others.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten
F64 = torch.float64

THROUGH = {
    "_cdist_forward": "cdist",
    "_ctc_loss": "nn.functional.ctc_loss",
    "_fft_c2c": "fft.fft2",
    "_fft_c2r": "fft.irfft",
    "_fft_r2c": "fft.rfft2",
    "_linalg_det": "linalg.det",
    "_linalg_slogdet": "linalg.slogdet",
    "_linalg_solve_ex": "linalg.solve",
    "_local_scalar_dense": "item",
    "_pdist_forward": "nn.functional.pdist",
    "_prelu_kernel": "nn.functional.prelu",
    "_safe_softmax": "torch.ops.aten._safe_softmax.default",
    "_to_copy": "to",
    "_trilinear": "nn.functional.bilinear",
    "_unsafe_view": "kron",
    "_upsample_nearest_exact1d": "nn.functional.interpolate.nearest-exact",
    "_upsample_nearest_exact2d": "nn.functional.interpolate.nearest-exact",
    "_upsample_nearest_exact3d": "nn.functional.interpolate.nearest-exact",
    "alias": "nn.functional.instance_norm",
    "convolution": "nn.functional.conv_transpose2d",
    "detach": "nanmean",
    "index": "__getitem__",
    "linalg_matrix_exp": "matrix_exp",
    "log_sigmoid_forward": "nn.functional.logsigmoid",
    "max_pool2d_with_indices": "nn.functional.max_pool2d",
    "max_pool3d_with_indices": "nn.functional.max_pool3d",
    "max_unpool2d": "nn.functional.max_unpool2d.grad",
    "max_unpool3d": "nn.functional.max_unpool3d.grad",
    "multilabel_margin_loss_forward": "nn.functional.multilabel_margin_loss",
    "nll_loss2d_forward": "nn.functional.nll_loss",
    "nll_loss_forward": "nn.functional.nll_loss",
    "reflection_pad1d": "nn.functional.pad.reflect",
    "reflection_pad2d": "nn.functional.pad.reflect",
    "replication_pad1d": "nn.functional.pad.replicate",
    "replication_pad2d": "nn.functional.pad.replicate_negative",
    "upsample_bicubic2d": "nn.functional.interpolate.bicubic",
    "upsample_bilinear2d": "nn.functional.interpolate.bilinear",
    "upsample_linear1d": "nn.functional.interpolate.linear",
    "upsample_nearest1d": "nn.functional.interpolate.nearest",
    "upsample_nearest2d": "nn.functional.interpolate.nearest",
    "upsample_nearest3d": "nn.functional.interpolate.nearest",
    "upsample_trilinear3d": "nn.functional.interpolate.trilinear",
    "where": "where",
}
"""The function of torch whose samples call the operation, where it has another name."""


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64).requires_grad_()


def _still(*shape: int, seed: int = 0) -> torch.Tensor:
    """Without a gradient: torch has no derivative for the functional form of some operations."""
    return tensor(*shape, seed=seed).detach()


def _whole(*shape: int, seed: int) -> torch.Tensor:
    """Return whole numbers: float32, the widest dtype of torch's `_grouped_mm` on a CPU, adds them
    exactly.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).float().requires_grad_()


def _weights(
    gates: int, inputs: int, hidden: int, *, cells: int = 1, projection: int = 0
) -> list[torch.Tensor]:
    width = projection or hidden
    shapes = [
        (gates * hidden, inputs),
        (gates * hidden, width),
        (gates * hidden,),
        (gates * hidden,),
    ]
    shapes += [(projection, hidden)] if projection else []
    places = [(10 * i + j, shape) for i in range(cells) for j, shape in enumerate(shapes)]
    return [(0.5 * _still(*shape, seed=seed)).requires_grad_() for seed, shape in places]


def _call(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op, args, kwargs


def _index(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def _complex() -> torch.Tensor:
    return torch.complex(
        _index(1, -2, 3).double(), torch.tensor([0.3, 0.0, -1.0], dtype=F64)
    ).requires_grad_()


_NORM = _still(4, 3, 2), _still(3), _still(3)
_RUNNING = torch.zeros(3, dtype=F64), torch.ones(3, dtype=F64)
_BAG = tensor(5, 2), _index(1, 2, 0, 4), _index(0, 3)
_CELL = tensor(2, 3), tensor(2, 4, seed=1)
_RNN = tensor(4, 2, 3), tensor(1, 2, 4, seed=1), _weights(1, 3, 4), True, 1, 0.0, True, False, False
_LSTM = (
    tensor(2, 4, 3),
    [tensor(2, 2, 3, seed=1), tensor(2, 2, 3, seed=2)],
    _weights(4, 3, 3, cells=2),
)
_PROJECTED = (
    tensor(4, 2, 3),
    [tensor(1, 2, 2, seed=1), tensor(1, 2, 3, seed=2)],
    _weights(4, 3, 3, projection=2),
)
_GROUPED = (((5, 4), (3, 4, 8)), ((3, 4, 8), (8, 16)), ((4, 16), (16, 8)), ((2, 4, 8), (2, 8, 4)))

ONLY = [
    _call(aten._assert_async.msg, torch.tensor(True), "text"),
    _call(aten._assert_scalar.default, True, "text"),
    _call(aten._assert_tensor_metadata.default, tensor(2)),
    _call(aten._conj.default, _complex()),
    _call(aten._conj_physical.default, _complex()),
    _call(aten._embedding_bag.default, *_BAG, False, 0, False, None),
    _call(aten._embedding_bag.default, *_BAG, False, 1, False, None, padding_idx=2),
    _call(aten._embedding_bag.default, *_BAG, False, 2, False, None, padding_idx=0),
    _call(aten._embedding_bag.default, *_BAG, False, 0, False, tensor(4, seed=1)),
    _call(aten._embedding_bag_forward_only.default, _still(5, 2), *_BAG[1:]),
    _call(aten._euclidean_dist.default, tensor(3, 2), tensor(4, 2, seed=1)),
    # torch wants strides that are multiples of 16 bytes; one group is empty
    *(
        _call(
            aten._grouped_mm.default,
            _whole(*a, seed=1),
            _whole(*b, seed=2),
            ends and _index(*ends).int(),
        )
        for (a, b), ends in zip(_GROUPED, ([2, 2, 5], [4, 4, 16], [4, 4, 16], None), strict=True)
    ),
    _call(
        aten._linalg_check_errors.default,
        torch.zeros((), dtype=torch.int32),
        "text",
        is_matrix=True,
    ),
    _call(aten._linalg_eigh.default, _still(2, 4, 4), "L", False),
    _call(aten._linalg_eigh.default, _still(2, 4, 4), "U", False),
    # the signs of singular vectors are arbitrary: test_lowered compares functions that do not
    # depend on them
    _call(aten._linalg_svd.default, _still(2, 4, 4), False, False),
    _call(aten._linalg_svd.default, _still(3, 5), False, False),
    *(
        _call(op, tensor(1, 2, 7, 6), [3, 9], corners)
        for op in (aten._upsample_bicubic2d_aa.default, aten._upsample_bilinear2d_aa.default)
        for corners in (True, False)
    ),
    _call(aten.copy.default, _still(2, 3), _still(3, seed=1)),
    _call(
        aten.gru.input,
        tensor(4, 2, 3),
        tensor(2, 2, 3, seed=1),
        _weights(3, 3, 3, cells=2),
        True,
        2,
        0.0,
        True,
        False,
        False,
    ),
    _call(aten.lift_fresh_copy.default, tensor(2)),
    _call(aten.lstm.input, *_LSTM, True, 1, 0.0, True, True, True),
    _call(aten.lstm.input, *_PROJECTED, True, 1, 0.0, True, False, False),
    _call(aten.native_channel_shuffle.default, _still(1, 4, 2), 2),
    _call(aten.native_dropout.default, tensor(3), 0.5, False),
    _call(aten.rnn_relu.input, *_RNN),
    _call(aten.rnn_tanh.input, *_RNN),
    _call(aten.rrelu.default, tensor(4), 0.1, 0.5, False),
    _call(aten.sgn.default, torch.tensor([-2.0, 0.0, 3.0], dtype=F64)),
    _call(aten.sgn.default, _complex()),
    _call(aten.view_as_real.default, _complex()),
]
"""Calls in place of torch's own samples."""

_UPSAMPLING = (
    ("_upsample_bicubic2d_aa", 2, True), ("_upsample_bilinear2d_aa", 2, False), ("_upsample_nearest_exact1d", 1),
    ("_upsample_nearest_exact2d", 2), ("_upsample_nearest_exact3d", 3), ("upsample_nearest1d", 1),
    ("upsample_nearest2d", 2), ("upsample_nearest3d", 3),
)  # fmt: skip
_LINEAR = (
    ("upsample_bicubic2d", 2, False), ("upsample_bilinear2d", 2, True), ("upsample_linear1d", 1, False),
    ("upsample_trilinear3d", 3, False),
)  # fmt: skip


def _interpolations(table: Any) -> list[Any]:
    """Return calls that interpolate by factors, and to a size."""
    return [
        _call(getattr(aten, name).vec, tensor(1, 2, *[4, 5, 3][:n]), *arguments)
        for name, n, *flags in table
        for arguments in ((None, *flags, [1.7, 0.6, 2.0][:n]), ([3, 7, 2][:n], *flags, None))
    ]


_ROW = 0, _index(1, 1)[None]

ALSO = [
    *_interpolations(_UPSAMPLING),
    _call(aten.repeat_interleave.Tensor, _index(2, 0, 3)),
    _call(aten.scatter.value, tensor(3, 2), 0, _index(1, 2)[None], 0.5),
    *(
        _call(aten.scatter.reduce, _still(3, 2), *_ROW, _still(1, 2), reduce=how)
        for how in ("add", "multiply")
    ),
    *(
        _call(aten.scatter.value_reduce, _still(3, 2), *_ROW, 2.5, reduce=how)
        for how in ("add", "multiply")
    ),
    _call(aten.view.dtype, _still(2), torch.int64),
]
"""Calls beside torch's own samples."""

DECOMPOSED = [
    _call(aten._batch_norm_with_update_functional.default, *_NORM, *_RUNNING, 0.1, 1e-5),
    _call(
        aten._native_batch_norm_legit.no_stats,
        *(x.requires_grad_() for x in map(torch.clone, _NORM)),
        True,
        0.1,
        1e-5,
    ),
    _call(aten._native_batch_norm_legit_functional.default, *_NORM, *_RUNNING, True, 0.1, 1e-5),
    _call(aten._native_batch_norm_legit_functional.default, *_NORM, *_RUNNING, False, 0.1, 1e-5),
    _call(aten._native_batch_norm_legit_no_training.default, *_NORM, *_RUNNING, 0.1, 1e-5),
    *(
        _call(
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            *(tensor(2, 2, 3, 4, seed=i) for i in range(3)),
            is_causal=causal,
        )
        for causal in (False, True)
    ),
    _call(aten._weight_norm_interface.default, tensor(3, 2), tensor(3, 1, seed=1), 0),
    _call(aten._weight_norm_interface.default, tensor(3, 2), tensor(1, 2, seed=1), 1),
    *_interpolations(_LINEAR),
    _call(aten._fused_rms_norm.default, tensor(3, 4), [4], tensor(4, seed=1), 1e-3),
    _call(aten._fused_rms_norm.default, tensor(3, 4), [4], tensor(4, seed=1), None),
    _call(aten.col2im.default, tensor(2, 8, 9), [6, 6], [2, 2], [1, 1], [0, 0], [2, 2]),
    _call(aten.col2im.default, tensor(2, 8, 16), [4, 4], [2, 2], [2, 2], [1, 1], [1, 1]),
    _call(aten.reflection_pad3d.default, tensor(1, 2, 3, 4, 5), [1, 2, 0, 1, 2, 1]),
    _call(aten.replication_pad3d.default, tensor(1, 2, 3, 4, 5), [1, 2, 0, 1, 2, 1]),
    _call(aten.unsafe_split_with_sizes.default, tensor(5, 2), [2, 3]),
    _call(aten._unsafe_index.Tensor, tensor(4, 3), [None, _index(2, -1, 2)]),
    _call(
        aten._unsafe_index_put.default, tensor(4, 3), [_index(2, -1, 2)], tensor(3, 3, seed=1), True
    ),
    _call(aten.norm.ScalarOpt_dim_dtype, tensor(3, 2), 3, [1], False, dtype=F64),
    _call(aten.norm.ScalarOpt_dtype, tensor(3, 2), 1, dtype=F64),
    _call(aten.eye.m, 3, 2),
    _call(aten.feature_dropout.default, tensor(3), 0.5, False),
    _call(aten.gru_cell.default, *_CELL, *_weights(3, 3, 4)),
    _call(aten.imag.default, _complex()),
    _call(aten.lstm_cell.default, _CELL[0], [_CELL[1], tensor(2, 4, seed=2)], *_weights(4, 3, 4)),
    _call(aten.real.default, _complex()),
    _call(aten.rnn_relu_cell.default, *_CELL, *_weights(1, 3, 4)),
    _call(aten.rnn_tanh_cell.default, *_CELL, *_weights(1, 3, 4)),
    _call(aten.where.Scalar, _index(1, 0) > 0, 2.0, 1),
    _call(aten.where.ScalarOther, _index(1, 0) > 0, tensor(2), 1),
    _call(aten.where.ScalarSelf, _index(1, 0) > 0, 2.0, tensor(2)),
]
"""Calls of operations that torch decomposes: its own samples do not reach them."""
