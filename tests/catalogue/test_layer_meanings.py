"""Corner cases of layers that random numbers seldom reach, with expected values computed by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from gradcheck_suite.catalogue.definitions import Signal
from gradcheck_suite.catalogue.tables import LAYERS, build_model, out_signal
from gradcheck_suite.core.case import Input, Layer, Loss, ProblemSpec
from gradcheck_suite.errors import UsageError

jax.config.update("jax_enable_x64", True)

IMAGE = Signal("image", (2, 4, 5))
SEQUENCE = Signal("sequence", (3, 2), padded=True)
TOKENS = Signal("tokens", (3,), vocabulary=5)


def both(layer: Layer, signal: Signal, x, values=None, **extras):
    """Return, by torch and by JAX, a layer's output and the gradient of its sum with respect to a floating input."""
    kind, x = LAYERS[layer.kind], np.asarray(x)
    values = {name: np.asarray(value, np.float64) for name, value in (values or {}).items()}
    module = kind.torch_module(signal, layer.o).double()
    module.load_state_dict({name: torch.from_numpy(value) for name, value in values.items()}, strict=False)
    floating = x.dtype == np.float64
    leaf = torch.from_numpy(x).requires_grad_(floating)
    y = module(leaf, **{name: torch.from_numpy(a) for name, a in extras.items()})
    y.sum().backward()

    def total(x):
        y = kind.jax_apply(layer.o, values, x, extras)
        return y.sum(), y

    if floating:
        # one program in place of one for each of JAX's operations
        gradient, jax_y = jax.jit(jax.grad(total, has_aux=True))(jnp.asarray(x))
        return [(y.detach().numpy(), leaf.grad.numpy()), (np.asarray(jax_y), np.asarray(gradient))]
    return [(y.detach().numpy(), None), (np.asarray(total(jnp.asarray(x))[1]), None)]


MAX_POOL = Layer("max_pool2d", kernel=2, stride=2, padding=0, dilation=1)


def test_first_of_equal_maxima_takes_the_gradient_of_a_window():
    x = np.array([[[[0.0, 0.0, 1.0, 3.0], [0.0, 0.0, 3.0, 2.0]]]])
    for y, gradient in both(MAX_POOL, Signal("image", (1, 2, 4)), x):
        np.testing.assert_array_equal(y, [[[[0.0, 3.0]]]])
        np.testing.assert_array_equal(gradient, [[[[1, 0, 0, 1], [0, 0, 0, 0]]]])


def test_first_of_equal_maxima_takes_the_gradient_of_a_bin():
    layer = Layer("adaptive_max_pool2d", size=1)
    for _, gradient in both(layer, Signal("image", (1, 2, 2)), np.zeros((1, 1, 2, 2))):
        np.testing.assert_array_equal(gradient, [[[[1, 0], [0, 0]]]])


@pytest.mark.parametrize(("shared", "expected"), [(False, [1, 0, 0]), (True, [0.5, 0.5, 0])])
def test_equal_maxima_over_time(shared, expected):
    mask = np.array([[True, True, False]])
    layer = Layer("max_over_time", shared=shared)
    for y, gradient in both(layer, Signal("sequence", (3, 1), padded=True), np.zeros((1, 3, 1)), mask=mask):
        np.testing.assert_array_equal(y, [[0.0]])
        np.testing.assert_array_equal(gradient[0, :, 0], expected)


def test_maximum_over_time_does_not_see_padding():
    x, mask = np.array([[[-2.0], [-1.0], [7.0]]]), np.array([[True, True, False]])
    for y, gradient in both(Layer("max_over_time", shared=False), SEQUENCE, x, mask=mask):
        np.testing.assert_array_equal(y, [[-1.0]])
        np.testing.assert_array_equal(gradient[0, :, 0], [0, 1, 0])


def test_mean_over_time_counts_no_padding():
    x, mask = np.array([[[1.0], [3.0], [100.0]]]), np.array([[True, True, False]])
    for y, gradient in both(Layer("mean_over_time"), SEQUENCE, x, mask=mask):
        np.testing.assert_array_equal(y, [[2.0]])
        np.testing.assert_array_equal(gradient[0, :, 0], [0.5, 0.5, 0])


def test_last_step_is_the_last_that_is_no_padding():
    x, mask = np.array([[[1.0], [3.0], [100.0]]]), np.array([[True, True, False]])
    for y, gradient in both(Layer("last_step"), SEQUENCE, x, mask=mask):
        np.testing.assert_array_equal(y, [[3.0]])
        np.testing.assert_array_equal(gradient[0, :, 0], [0, 1, 0])


def test_neighbouring_bins_overlap():
    """Five columns in two bins: columns 0 to 2 and 2 to 4. The middle one counts in both."""
    x = np.array([[[[1.0, 2.0, 3.0, 4.0, 5.0]] * 2]])
    layer = Layer("adaptive_average_pool2d", size=2)
    for y, gradient in both(layer, Signal("image", (1, 2, 5)), x):
        np.testing.assert_allclose(y, [[[[2.0, 4.0]] * 2]], rtol=1e-15)
        np.testing.assert_allclose(gradient, [[[[1 / 3, 1 / 3, 2 / 3, 1 / 3, 1 / 3]] * 2]], rtol=1e-15)


@pytest.mark.parametrize(("count_padding", "corner"), [(True, 4 / 9), (False, 1.0)])
def test_average_at_the_border_may_count_the_padding(count_padding, corner):
    layer = Layer("average_pool2d", kernel=3, stride=1, padding=1, count_padding=count_padding)
    for y, _ in both(layer, IMAGE, np.ones((1, 2, 4, 5))):
        np.testing.assert_allclose(y[0, 0, 0, 0], corner, rtol=1e-15)
        np.testing.assert_allclose(y[0, 0, 1, 1], 1.0, rtol=1e-15)


def test_torch_points_outside_the_image_where_a_window_holds_only_padding():
    """Its backward would write there and corrupt the heap, so the catalogue refuses such windows.

    https://github.com/pytorch/pytorch/issues/114216
    """
    layer = Layer("max_pool2d", kernel=2, stride=1, padding=1, dilation=2)
    signal = Signal("image", (1, 1, 1))
    assert layer.o not in LAYERS["max_pool2d"].variants(signal)
    with pytest.raises(UsageError, match=r"'max_pool2d': expected a pixel in every window"):
        out_signal(layer, signal)
    value, index = torch.nn.functional.max_pool2d(torch.ones(1, 1, 1, 1), 2, 1, 1, 2, return_indices=True)
    assert value.item() == -torch.inf
    assert index.item() not in range(1)


@pytest.mark.parametrize("kind", ["batch_norm1d", "batch_norm2d"])
def test_batch_norm_keeps_its_running_statistics_in_a_model_in_train_mode(kind):
    source = Input("vector", size=2) if kind == "batch_norm1d" else Input("image", channels=2, height=4, width=5)
    model = build_model(ProblemSpec(source, (Layer(kind, affine=True),), Loss("mse")), 0, torch.float64).train()
    assert model.training
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    size = (2,) if kind == "batch_norm1d" else (2, 4, 5)
    model({"x": torch.randn(4, *size, dtype=torch.float64)})
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert not torch.equal(before["0.running_mean"], torch.zeros(2, dtype=torch.float64)), "the statistics are drawn"


def test_layer_norm_of_one_number_is_constant():
    for y, gradient in both(Layer("layer_norm", affine=False), Signal("vector", (1,)), [[3.0], [-2.0]]):
        np.testing.assert_array_equal(y, np.zeros((2, 1)))
        np.testing.assert_array_equal(gradient, np.zeros((2, 1)))


def test_rms_norm_of_one_number_is_nearly_its_sign():
    """It is x / sqrt(x^2 + eps), of derivative eps / (x^2 + eps)^(3/2)."""
    for y, gradient in both(Layer("rms_norm", affine=False), Signal("vector", (1,)), [[3.0], [-2.0]]):
        np.testing.assert_allclose(y, [[3 / 9.01**0.5], [-2 / 4.01**0.5]], rtol=1e-14)
        np.testing.assert_allclose(gradient, [[0.01 / 9.01**1.5], [0.01 / 4.01**1.5]], rtol=1e-12)


def test_group_norm_keeps_groups_apart():
    """The pairs (1, 3) and (10, 30) lie 1 and 10 from their own means."""
    near, far = 1 / 1.01**0.5, 10 / 100.01**0.5
    for y, _ in both(Layer("group_norm", groups=2, affine=False), Signal("vector", (4,)), [[1.0, 3.0, 10.0, 30.0]]):
        np.testing.assert_allclose(y, [[-near, near, -far, far]], rtol=1e-14)


def test_dropout_scales_what_it_keeps():
    keep = np.array([[True, False]])
    for y, gradient in both(Layer("dropout", p=0.5), Signal("vector", (2,)), [[3.0, 4.0]], keep=keep):
        np.testing.assert_array_equal(y, [[6.0, 0.0]])
        np.testing.assert_array_equal(gradient, [[2.0, 0.0]])


def test_dropout_drops_about_a_share_of_p():
    keep = LAYERS["dropout"].extras(Signal("vector", (4,)), {"p": 0.1}, np.random.default_rng(0), 1000)["keep"]
    assert keep.shape == (1000, 4)
    # 4000 draws: five standard deviations are 0.024
    assert abs((~keep).mean() - 0.1) < 0.024


@pytest.mark.parametrize(("whole", "expected"), [(False, [6.0, 16.0]), (True, [3.0, 4.0])])
def test_weight_norm_divides_by_the_norm_of_a_row_or_of_all(whole, expected):
    """Rows (3, 4) and (0, 12) have norms 5 and 12, together 13; the input makes each row's sum."""
    values = {
        "parametrizations.weight.original0": 13.0 if whole else [[5 * 6 / 7], [16.0]],
        "parametrizations.weight.original1": [[3.0, 4.0], [0.0, 12.0]],
        "bias": [-4.0, -8.0] if whole else [0.0, 0.0],
    }
    layer = Layer("weight_norm", features=2, whole=whole)
    for y, _ in both(layer, Signal("vector", (2,)), [[1.0, 1.0]], values):
        np.testing.assert_allclose(y, [expected], rtol=1e-14)


TABLE = [[100.0], [1.0], [2.0], [3.0], [4.0]]


def _bag(**options):
    return Layer(
        "embedding_bag",
        **{"features": 1, "mode": "sum", "sparse": False, "padding_idx": True, "weighted": False, **options},
    )


@pytest.mark.parametrize(("mode", "expected"), [("sum", 7.0), ("mean", 3.5), ("max", 4.0)])
def test_bag_without_its_padding(mode, expected):
    for y, _ in both(_bag(mode=mode), TOKENS, [[3, 4, 0], [0, 0, 0]], {"weight": TABLE}):
        np.testing.assert_array_equal(y, [[expected], [0.0]])


def test_bag_with_weights():
    layer = _bag(weighted=True, padding_idx=False)
    for y, _ in both(layer, TOKENS, [[1, 2, 2]], {"weight": TABLE}, weights=np.array([[1.0, 10.0, 100.0]])):
        np.testing.assert_array_equal(y, [[1.0 + 20.0 + 200.0]])


def test_arrangements():
    image = np.arange(8.0).reshape(1, 2, 2, 2)
    for y, _ in both(Layer("pixels"), Signal("image", (2, 2, 2)), image):
        np.testing.assert_array_equal(y, [[[0, 4], [1, 5], [2, 6], [3, 7]]])
    for y, _ in both(Layer("flatten"), Signal("image", (2, 2, 2)), image):
        np.testing.assert_array_equal(y, [[0, 1, 2, 3, 4, 5, 6, 7]])
    for y, _ in both(Layer("unflatten", length=3), Signal("vector", (6,)), np.arange(6.0).reshape(1, 6)):
        np.testing.assert_array_equal(y, [[[0, 1], [2, 3], [4, 5]]])
    for y, _ in both(Layer("transpose"), Signal("sequence", (3, 4)), np.arange(12.0).reshape(1, 3, 4)):
        np.testing.assert_array_equal(y, [[[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]])


def _conv(kind, **options):
    plain = {"features": 2, "kernel": 1, "stride": 1, "padding": 0, "dilation": 1, "groups": 1, "bias": False}
    return Layer(kind, **{**plain, **options})


@pytest.mark.parametrize(
    ("layer", "signal", "expected"),
    [
        (_conv("conv2d", kernel=3), IMAGE, Signal("image", (2, 2, 3))),
        (_conv("conv2d", kernel=4, stride=2, padding=1), IMAGE, Signal("image", (2, 2, 2))),
        (_conv("conv2d", kernel=3, dilation=2, padding=2), IMAGE, Signal("image", (2, 4, 5))),
        (_conv("conv1d", kernel=3, padding=1), SEQUENCE, SEQUENCE),
        (_conv("conv1d", kernel=2), SEQUENCE, Signal("sequence", (2, 2))),
        (MAX_POOL, IMAGE, Signal("image", (2, 2, 2))),
        (Layer("adaptive_max_pool2d", size=2), IMAGE, Signal("image", (2, 2, 2))),
        (Layer("mean_over_time"), SEQUENCE, Signal("vector", (2,))),
        (Layer("unflatten", length=3), Signal("vector", (12,)), Signal("sequence", (3, 4))),
    ],
)
def test_shape(layer, signal, expected):
    assert out_signal(layer, signal) == expected


@pytest.mark.parametrize(
    ("layer", "signal", "message"),
    [
        (_conv("conv2d", kernel=5), IMAGE, "'conv2d': expected a kernel that the padded input holds"),
        (_conv("conv2d", groups=2, features=3), IMAGE, r"'conv2d': expected .* features that 2 groups divide"),
        (_conv("conv1d", stride=0), SEQUENCE, "'conv1d': expected stride of at least 1, got 0"),
        (_conv("conv1d"), IMAGE, "'conv1d': expected a sequence, got"),
        (Layer("max_pool2d", kernel=2, stride=2, padding=2, dilation=1), IMAGE, "padding of at most half the kernel"),
        (Layer("average_pool2d", kernel=8, stride=1, padding=0, count_padding=True), IMAGE, "a kernel that the padded"),
        (Layer("adaptive_average_pool2d", size=0), IMAGE, "expected size of at least 1, got 0"),
        (Layer("group_norm", groups=3, affine=True), IMAGE, "'group_norm': expected groups that divide the features"),
        (Layer("group_norm", groups=4, affine=True), Signal("vector", (4,)), "more than one number in a group"),
        (Layer("instance_norm", affine=True), Signal("image", (2, 1, 1)), "more than one position or pixel"),
        (Layer("unflatten", length=3), Signal("vector", (4,)), "'unflatten': expected a length that divides 4, got 3"),
        (Layer("transpose"), SEQUENCE, "'transpose': expected a sequence without padding"),
        (Layer("dropout", p=1.0), Signal("vector", (2,)), "'dropout': expected p of at least 0 and below 1, got 1.0"),
        (_bag(mode="median"), TOKENS, "mode to be one of sum, mean, max, got median"),
        (_bag(mode="max", sparse=True), TOKENS, "a dense gradient for mode 'max'"),
        (_bag(mode="mean", weighted=True), TOKENS, "weights for mode 'sum' only"),
    ],
)
def test_a_wrong_option_or_input_is_refused_with_a_message(layer, signal, message):
    with pytest.raises(UsageError, match=message):
        out_signal(layer, signal)
