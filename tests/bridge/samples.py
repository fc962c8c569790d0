"""Calls of the operations that torch's own samples do not reach, and exceptions for some of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.bridge.grouped_products import grouped_products

aten = torch.ops.aten
F64 = torch.float64


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64).requires_grad_()


def _weights(gates: int, inputs: int, hidden: int, *, cells: int = 1, projection: int = 0) -> list[torch.Tensor]:
    out = []
    for i in range(cells):
        width = projection or hidden
        shapes = [(gates * hidden, inputs), (gates * hidden, width), (gates * hidden,), (gates * hidden,)]
        shapes += [(projection, hidden)] if projection else []
        out += [(0.5 * tensor(*shape, seed=10 * i + j)).detach().requires_grad_() for j, shape in enumerate(shapes)]
    return out


THROUGH = {
    "_adaptive_avg_pool2d": "nn.functional.adaptive_avg_pool2d",
    "_adaptive_avg_pool3d": "nn.functional.adaptive_avg_pool3d",
    "_cdist_forward": "cdist",
    "_ctc_loss": "nn.functional.ctc_loss",
    "_fft_c2c": "fft.fft2",
    "_fft_c2r": "fft.irfft",
    "_fft_r2c": "fft.rfft2",
    "_linalg_det": "linalg.det",
    "_linalg_slogdet": "linalg.slogdet",
    "_linalg_solve_ex": "linalg.solve",
    "_local_scalar_dense": "item",
    "_log_softmax": "log_softmax",
    "_pdist_forward": "nn.functional.pdist",
    "_prelu_kernel": "nn.functional.prelu",
    "_safe_softmax": "torch.ops.aten._safe_softmax.default",
    "_softmax": "softmax",
    "_to_copy": "to",
    "_trilinear": "nn.functional.bilinear",
    "_unsafe_view": "kron",
    "_upsample_nearest_exact1d": "nn.functional.interpolate.nearest-exact",
    "_upsample_nearest_exact2d": "nn.functional.interpolate.nearest-exact",
    "_upsample_nearest_exact3d": "nn.functional.interpolate.nearest-exact",
    "adaptive_max_pool2d": "nn.functional.adaptive_max_pool2d",
    "adaptive_max_pool3d": "nn.functional.adaptive_max_pool3d",
    "alias": "nn.functional.instance_norm",
    "block_diag": "block_diag",
    "convolution": "nn.functional.conv_transpose2d",
    "detach": "nanmean",
    "eye": "eye",
    "huber_loss": "nn.functional.huber_loss",
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
    "nonzero": "nonzero",
    "polygamma": "polygamma.polygamma_n_1",
    "reflection_pad1d": "nn.functional.pad.reflect",
    "reflection_pad2d": "nn.functional.pad.reflect",
    "replication_pad1d": "nn.functional.pad.replicate",
    "replication_pad2d": "nn.functional.pad.replicate_negative",
    "roll": "roll",
    "scalar_tensor": "scalar_tensor",
    "upsample_bicubic2d": "nn.functional.interpolate.bicubic",
    "upsample_bilinear2d": "nn.functional.interpolate.bilinear",
    "upsample_linear1d": "nn.functional.interpolate.linear",
    "upsample_nearest1d": "nn.functional.interpolate.nearest",
    "upsample_nearest2d": "nn.functional.interpolate.nearest",
    "upsample_nearest3d": "nn.functional.interpolate.nearest",
    "upsample_trilinear3d": "nn.functional.interpolate.trilinear",
    "where": "where",
}
"""The function of torch whose samples call the operation."""


def _running() -> list[torch.Tensor]:
    return [torch.zeros(3, dtype=F64), torch.ones(3, dtype=F64)]


def _index(*values: int) -> torch.Tensor:
    return torch.tensor(values)


COMPLEX = torch.complex(torch.tensor([1.0, -2.0, 0.5], dtype=F64), torch.tensor([0.3, 0.0, -1.0], dtype=F64))

HAND: dict[str, Callable[[], list[Any]]] = {
    "_assert_async": lambda: [(aten._assert_async.msg, (torch.tensor(True), "text"), {})],
    "_assert_scalar": lambda: [(aten._assert_scalar.default, (True, "text"), {})],
    "_assert_tensor_metadata": lambda: [(aten._assert_tensor_metadata.default, (tensor(2),), {})],
    "_grouped_mm": grouped_products,
    "_linalg_check_errors": lambda: [
        (aten._linalg_check_errors.default, (torch.zeros((), dtype=torch.int32), "text"), {"is_matrix": True})
    ],
    "_batch_norm_with_update_functional": lambda: [
        (
            aten._batch_norm_with_update_functional.default,
            (*_no_grad(tensor(4, 3), tensor(3), tensor(3)), *_running(), 0.1, 1e-5),
            {},
        )
    ],
    "_conj": lambda: [(aten._conj.default, (COMPLEX.clone().requires_grad_(),), {})],
    "_conj_physical": lambda: [(aten._conj_physical.default, (COMPLEX.clone().requires_grad_(),), {})],
    "_embedding_bag": lambda: [
        (
            aten._embedding_bag.default,
            (tensor(5, 2), _index(1, 2, 0, 4), _index(0, 3), False, mode, False, weights),
            {"padding_idx": padding},
        )
        for mode, weights, padding in ((0, None, -1), (1, None, 2), (2, None, 0), (0, tensor(4, seed=1), -1))
    ],
    "_embedding_bag_forward_only": lambda: [
        (aten._embedding_bag_forward_only.default, (*_no_grad(tensor(5, 2)), _index(1, 2, 0, 4), _index(0, 3)), {})
    ],
    "_euclidean_dist": lambda: [(aten._euclidean_dist.default, (tensor(3, 2), tensor(4, 2, seed=1)), {})],
    "_fused_rms_norm": lambda: [
        (aten._fused_rms_norm.default, (tensor(3, 4), [4], weight, eps), {})
        for weight, eps in ((tensor(4, seed=1), 1e-3), (tensor(4, seed=1), None))
    ],
    "_linalg_eigh": lambda: [
        (aten._linalg_eigh.default, (*_no_grad(tensor(2, 4, 4)), uplo, False), {}) for uplo in ("L", "U")
    ],
    # the signs of singular vectors are arbitrary: test_lowered compares functions that do not depend on them
    "_linalg_svd": lambda: [
        (aten._linalg_svd.default, (*_no_grad(tensor(*shape)), False, False), {}) for shape in ((2, 4, 4), (3, 5))
    ],
    "_native_batch_norm_legit": lambda: [
        (
            aten._native_batch_norm_legit.no_stats,
            (tensor(4, 3, 2), tensor(3, seed=1), tensor(3, seed=2), True, 0.1, 1e-5),
            {},
        )
    ],
    "_native_batch_norm_legit_functional": lambda: [
        (
            aten._native_batch_norm_legit_functional.default,
            (*_no_grad(tensor(4, 3, 2), tensor(3), tensor(3)), *_running(), training, 0.1, 1e-5),
            {},
        )
        for training in (True, False)
    ],
    "_native_batch_norm_legit_no_training": lambda: [
        (
            aten._native_batch_norm_legit_no_training.default,
            (*_no_grad(tensor(4, 3), tensor(3), tensor(3)), *_running(), 0.1, 1e-5),
            {},
        )
    ],
    "_scaled_dot_product_flash_attention_for_cpu": lambda: [
        (
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            tuple(tensor(2, 2, 3, 4, seed=i) for i in range(3)),
            {"is_causal": causal},
        )
        for causal in (False, True)
    ],
    "_unsafe_index": lambda: [(aten._unsafe_index.Tensor, (tensor(4, 3), [None, _index(2, -1, 2)]), {})],
    "_unsafe_index_put": lambda: [
        (aten._unsafe_index_put.default, (tensor(4, 3), [_index(2, -1, 2)], tensor(3, 3, seed=1), True), {})
    ],
    "_upsample_bicubic2d_aa": lambda: [
        (aten._upsample_bicubic2d_aa.default, (tensor(1, 2, 7, 6), [3, 9], corners), {}) for corners in (True, False)
    ],
    "_upsample_bilinear2d_aa": lambda: [
        (aten._upsample_bilinear2d_aa.default, (tensor(1, 2, 7, 6), [3, 9], corners), {}) for corners in (True, False)
    ],
    "_weight_norm_interface": lambda: [
        (aten._weight_norm_interface.default, (tensor(3, 2), tensor(3, 1, seed=1), 0), {}),
        (aten._weight_norm_interface.default, (tensor(3, 2), tensor(1, 2, seed=1), 1), {}),
    ],
    "alpha_dropout": lambda: [(aten.alpha_dropout.default, (tensor(3), 0.5, False), {})],
    "broadcast_tensors": lambda: [(aten.broadcast_tensors.default, ([tensor(3, 1), tensor(1, 2)],), {})],
    "col2im": lambda: [
        (aten.col2im.default, (tensor(2, 8, 9), [6, 6], [2, 2], [1, 1], [0, 0], [2, 2]), {}),
        (aten.col2im.default, (tensor(2, 8, 16), [4, 4], [2, 2], [2, 2], [1, 1], [1, 1]), {}),
    ],
    "copy": lambda: [(aten.copy.default, _no_grad(tensor(2, 3), tensor(3, seed=1)), {})],
    "dropout": lambda: [(aten.dropout.default, (tensor(3), p, train), {}) for p, train in ((0.5, False), (0.0, True))],
    "empty": list,
    "feature_alpha_dropout": lambda: [(aten.feature_alpha_dropout.default, (tensor(3), 0.5, False), {})],
    "feature_dropout": lambda: [(aten.feature_dropout.default, (tensor(3), 0.5, False), {})],
    "gru": lambda: [
        (
            aten.gru.input,
            (tensor(4, 2, 3), tensor(2, 2, 3, seed=1), _weights(3, 3, 3, cells=2), True, 2, 0.0, True, False, False),
            {},
        )
    ],
    "gru_cell": lambda: [(aten.gru_cell.default, (tensor(2, 3), tensor(2, 4, seed=1), *_weights(3, 3, 4)), {})],
    "imag": lambda: [(aten.imag.default, (COMPLEX.clone().requires_grad_(),), {})],
    "lift_fresh_copy": lambda: [(aten.lift_fresh_copy.default, (tensor(2),), {})],
    "lstm": lambda: [
        (
            aten.lstm.input,
            (
                tensor(2, 4, 3),
                [tensor(2, 2, 3, seed=1), tensor(2, 2, 3, seed=2)],
                _weights(4, 3, 3, cells=2),
                True,
                1,
                0.0,
                True,
                True,
                True,
            ),
            {},
        ),
        (
            aten.lstm.input,
            (
                tensor(4, 2, 3),
                [tensor(1, 2, 2, seed=1), tensor(1, 2, 3, seed=2)],
                _weights(4, 3, 3, projection=2),
                True,
                1,
                0.0,
                True,
                False,
                False,
            ),
            {},
        ),
    ],
    "lstm_cell": lambda: [
        (aten.lstm_cell.default, (tensor(2, 3), [tensor(2, 4, seed=1), tensor(2, 4, seed=2)], *_weights(4, 3, 4)), {})
    ],
    "native_channel_shuffle": lambda: [(aten.native_channel_shuffle.default, (*_no_grad(tensor(1, 4, 2)), 2), {})],
    "native_dropout": lambda: [(aten.native_dropout.default, (tensor(3), 0.5, False), {})],
    "real": lambda: [(aten.real.default, (COMPLEX.clone().requires_grad_(),), {})],
    "reflection_pad3d": lambda: [(aten.reflection_pad3d.default, (tensor(1, 2, 3, 4, 5), [1, 2, 0, 1, 2, 1]), {})],
    "replication_pad3d": lambda: [(aten.replication_pad3d.default, (tensor(1, 2, 3, 4, 5), [1, 2, 0, 1, 2, 1]), {})],
    "resolve_conj": lambda: [(aten.resolve_conj.default, (tensor(2),), {})],
    "resolve_neg": lambda: [(aten.resolve_neg.default, (tensor(2),), {})],
    "rnn_relu": lambda: [
        (
            aten.rnn_relu.input,
            (tensor(4, 2, 3), tensor(1, 2, 4, seed=1), _weights(1, 3, 4), True, 1, 0.0, True, False, False),
            {},
        )
    ],
    "rnn_relu_cell": lambda: [
        (aten.rnn_relu_cell.default, (tensor(2, 3), tensor(2, 4, seed=1), *_weights(1, 3, 4)), {})
    ],
    "rnn_tanh": lambda: [
        (
            aten.rnn_tanh.input,
            (tensor(4, 2, 3), tensor(1, 2, 4, seed=1), _weights(1, 3, 4), True, 1, 0.0, True, False, False),
            {},
        )
    ],
    "rnn_tanh_cell": lambda: [
        (aten.rnn_tanh_cell.default, (tensor(2, 3), tensor(2, 4, seed=1), *_weights(1, 3, 4)), {})
    ],
    "rrelu": lambda: [(aten.rrelu.default, (tensor(4), 0.1, 0.5, False), {})],
    "sgn": lambda: [
        (aten.sgn.default, (torch.tensor([-2.0, 0.0, 3.0], dtype=F64),), {}),
        (aten.sgn.default, (COMPLEX.clone().requires_grad_(),), {}),
    ],
    "sym_constrain_range_for_size": list,
    "sym_numel": list,
    "sym_size": list,
    "unsafe_split_with_sizes": lambda: [(aten.unsafe_split_with_sizes.default, (tensor(5, 2), [2, 3]), {})],
    "view_as_real": lambda: [(aten.view_as_real.default, (COMPLEX.clone().requires_grad_(),), {})],
    "zero": lambda: [(aten.zero.default, (tensor(2),), {})],
}


_ONE_ROW = (0, torch.tensor([[1, 1]]))
_HOW = ({"reduce": "add"}, {"reduce": "multiply"})
ALSO: dict[str, Callable[[], list[Any]]] = {
    "_upsample_bicubic2d_aa": lambda: _by_factors("_upsample_bicubic2d_aa", 2, True),
    "_upsample_bilinear2d_aa": lambda: _by_factors("_upsample_bilinear2d_aa", 2, False),
    "_upsample_nearest_exact1d": lambda: _by_factors("_upsample_nearest_exact1d", 1),
    "_upsample_nearest_exact2d": lambda: _by_factors("_upsample_nearest_exact2d", 2),
    "_upsample_nearest_exact3d": lambda: _by_factors("_upsample_nearest_exact3d", 3),
    "arange": lambda: [(aten.arange.default, (end,), {}) for end in (4, 2.5)],
    "eye": lambda: [(aten.eye.m, (3, 2), {})],
    "norm": lambda: [
        (aten.norm.ScalarOpt_dim_dtype, (tensor(3, 2), 3, [1], False), {"dtype": torch.float64}),
        (aten.norm.ScalarOpt_dtype, (tensor(3, 2), 1), {"dtype": torch.float64}),
    ],
    "repeat_interleave": lambda: [(aten.repeat_interleave.Tensor, (_index(2, 0, 3),), {})],
    "scatter": lambda: [
        (aten.scatter.value, (tensor(3, 2), 0, _index(1, 2)[None], 0.5), {}),
        *((aten.scatter.reduce, (*_no_grad(tensor(3, 2)), *_ONE_ROW, *_no_grad(tensor(1, 2))), h) for h in _HOW),
        *((aten.scatter.value_reduce, (*_no_grad(tensor(3, 2)), *_ONE_ROW, 2.5), h) for h in _HOW),
    ],
    "upsample_bicubic2d": lambda: _by_factors("upsample_bicubic2d", 2, False),
    "upsample_bilinear2d": lambda: _by_factors("upsample_bilinear2d", 2, True),
    "upsample_linear1d": lambda: _by_factors("upsample_linear1d", 1, False),
    "upsample_nearest1d": lambda: _by_factors("upsample_nearest1d", 1),
    "upsample_nearest2d": lambda: _by_factors("upsample_nearest2d", 2),
    "upsample_nearest3d": lambda: _by_factors("upsample_nearest3d", 3),
    "upsample_trilinear3d": lambda: _by_factors("upsample_trilinear3d", 3, False),
    "view": lambda: [(aten.view.dtype, (tensor(2).detach(), torch.int64), {})],
    "where": lambda: [
        (aten.where.Scalar, (_index(1, 0) > 0, 2.0, 1), {}),
        (aten.where.ScalarOther, (_index(1, 0) > 0, tensor(2), 1), {}),
        (aten.where.ScalarSelf, (_index(1, 0) > 0, 2.0, tensor(2)), {}),
    ],
}
"""Calls of overloads that the others do not reach."""


def _by_factors(name: str, n: int, *flags: bool) -> list[Any]:
    """Calls of an interpolation by factors, and to a size."""
    op, x = getattr(aten, name).vec, tensor(1, 2, *[4, 5, 3][:n])
    return [(op, (x, None, *flags, [1.7, 0.6, 2.0][:n]), {}), (op, (x, [3, 7, 2][:n], *flags, None), {})]


def _no_grad(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Without gradients: torch has no derivative for the functional form of some operations."""
    return tuple(t.detach() for t in tensors)
