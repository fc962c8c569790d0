"""Corner cases of layers that random numbers seldom reach, by hand; what attention sees; refused
options.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from gradcheck_suite.catalogue.definitions import Signal
from gradcheck_suite.catalogue.tables import LAYERS, build_model, fill_parameters, out_signal
from gradcheck_suite.core.case import Input, Layer, Loss, ProblemSpec
from gradcheck_suite.errors import UsageError

jax.config.update("jax_enable_x64", True)

IMAGE = Signal("image", (2, 4, 5))
SEQUENCE = Signal("sequence", (3, 2), padded=True)
TOKENS = Signal("tokens", (3,), vocabulary=5)


def both(layer: Layer, signal: Signal, x, values=None, **extras):
    """Return, by torch and by JAX, a layer's output and the gradient of its sum with respect to a
    floating input.
    """
    kind, x = LAYERS[layer.kind], np.asarray(x)
    values = {name: np.asarray(value, np.float64) for name, value in (values or {}).items()}
    module = kind.torch_module(signal, layer.o).double()
    module.load_state_dict(
        {name: torch.from_numpy(value) for name, value in values.items()}, strict=False
    )
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


def _conv(kind, **options):
    plain = {
        "features": 2,
        "kernel": 1,
        "stride": 1,
        "padding": 0,
        "dilation": 1,
        "groups": 1,
        "bias": False,
    }
    return Layer(kind, **{**plain, **options})


def _bag(**options):
    plain = {"features": 1, "mode": "sum", "sparse": False, "padding_idx": True, "weighted": False}
    return Layer("embedding_bag", **{**plain, **options})


MAX_POOL = Layer("max_pool2d", kernel=2, stride=2, padding=0, dilation=1)
VECTOR = Signal("vector", (2,))
MASK = {"mask": np.array([[True, True, False]])}
TABLE = {"weight": [[100.0], [1.0], [2.0], [3.0], [4.0]]}
NEAR, FAR = 1 / 1.01**0.5, 10 / 100.01**0.5
EXAMPLES = {
    "the first of equal maxima of a window takes the gradient": (
        (MAX_POOL, Signal("image", (1, 2, 4)), [[[[0.0, 0.0, 1.0, 3.0], [0.0, 0.0, 3.0, 2.0]]]]),
        ([[[[0.0, 3.0]]]], [[[[1, 0, 0, 1], [0, 0, 0, 0]]]]),
    ),
    "the first of equal maxima of a bin takes the gradient": (
        (Layer("adaptive_max_pool2d", size=1), Signal("image", (1, 2, 2)), np.zeros((1, 1, 2, 2))),
        ([[[[0.0]]]], [[[[1, 0], [0, 0]]]]),
    ),
    "the first of equal maxima over time takes the gradient": (
        (Layer("max_over_time", shared=False), SEQUENCE, np.zeros((1, 3, 1)), MASK),
        ([[0.0]], [[[1], [0], [0]]]),
    ),
    "equal maxima over time share the gradient": (
        (Layer("max_over_time", shared=True), SEQUENCE, np.zeros((1, 3, 1)), MASK),
        ([[0.0]], [[[0.5], [0.5], [0]]]),
    ),
    "the maximum over time does not see padding": (
        (Layer("max_over_time", shared=False), SEQUENCE, [[[-2.0], [-1.0], [7.0]]], MASK),
        ([[-1.0]], [[[0], [1], [0]]]),
    ),
    "the mean over time counts no padding": (
        (Layer("mean_over_time"), SEQUENCE, [[[1.0], [3.0], [100.0]]], MASK),
        ([[2.0]], [[[0.5], [0.5], [0]]]),
    ),
    "the last step is the last that is no padding": (
        (Layer("last_step"), SEQUENCE, [[[1.0], [3.0], [100.0]]], MASK),
        ([[3.0]], [[[0], [1], [0]]]),
    ),
    # five columns in two bins, 0 to 2 and 2 to 4: the middle one counts in both
    "neighbouring bins overlap": (
        (
            Layer("adaptive_average_pool2d", size=2),
            Signal("image", (1, 2, 5)),
            [[[[1.0, 2.0, 3.0, 4.0, 5.0]] * 2]],
        ),
        ([[[[2.0, 4.0]] * 2]], [[[[1 / 3, 1 / 3, 2 / 3, 1 / 3, 1 / 3]] * 2]]),
    ),
    "the layer norm of one number is constant": (
        (Layer("layer_norm", affine=False), Signal("vector", (1,)), [[3.0], [-2.0]]),
        ([[0.0], [0.0]], [[0.0], [0.0]]),
    ),
    # x / sqrt(x^2 + eps), of derivative eps / (x^2 + eps)^(3/2)
    "the RMS norm of one number is nearly its sign": (
        (Layer("rms_norm", affine=False), Signal("vector", (1,)), [[3.0], [-2.0]]),
        (
            [[3 / 9.01**0.5], [-2 / 4.01**0.5]],
            [[0.01 / 9.01**1.5], [0.01 / 4.01**1.5]],
            1e-14,
            1e-12,
        ),
    ),
    # the pairs (1, 3) and (10, 30) lie 1 and 10 from their own means
    "a group norm keeps groups apart": (
        (
            Layer("group_norm", groups=2, affine=False),
            Signal("vector", (4,)),
            [[1.0, 3.0, 10.0, 30.0]],
        ),
        ([[-NEAR, NEAR, -FAR, FAR]], None, 1e-14),
    ),
    "dropout scales what it keeps": (
        (Layer("dropout", p=0.5), VECTOR, [[3.0, 4.0]], {"keep": np.array([[True, False]])}),
        ([[6.0, 0.0]], [[2.0, 0.0]]),
    ),
    **{
        f"a bag's {mode} leaves padding out": (
            (_bag(mode=mode), TOKENS, [[3, 4, 0], [0, 0, 0]], {}, TABLE),
            ([[value], [0.0]], None),
        )
        for mode, value in (("sum", 7.0), ("mean", 3.5), ("max", 4.0))
    },
    "pixels are read row by row": (
        (Layer("pixels"), Signal("image", (2, 2, 2)), np.arange(8.0).reshape(1, 2, 2, 2)),
        ([[[0, 4], [1, 5], [2, 6], [3, 7]]], None),
    ),
    "a vector is cut into positions": (
        (Layer("unflatten", length=3), Signal("vector", (6,)), np.arange(6.0).reshape(1, 6)),
        ([[[0, 1], [2, 3], [4, 5]]], None),
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_value_and_gradient_by_hand(name):
    (layer, signal, x, *given), (y, gradient, *rtol) = EXAMPLES[name]
    extras, values = (*given, {}, {})[:2]
    for found in both(layer, signal, x, values, **extras):
        for array, by_hand, allowed in zip(
            found, (y, gradient), (*rtol, 1e-15, 1e-15)[:2], strict=True
        ):
            if by_hand is not None:
                exact = np.all(np.asarray(by_hand) % 0.5 == 0)
                np.testing.assert_allclose(array, by_hand, rtol=0 if exact else allowed)


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
    value, index = torch.nn.functional.max_pool2d(
        torch.ones(1, 1, 1, 1), 2, 1, 1, 2, return_indices=True
    )
    assert value.item() == -torch.inf
    assert index.item() not in range(1)


@pytest.mark.parametrize("kind", ["batch_norm1d", "batch_norm2d"])
def test_batch_norm_keeps_its_running_statistics_in_a_model_in_train_mode(kind):
    source = (
        Input("vector", size=2)
        if kind == "batch_norm1d"
        else Input("image", channels=2, height=4, width=5)
    )
    model = build_model(
        ProblemSpec(source, (Layer(kind, affine=True),), Loss("mse")), 0, torch.float64
    ).train()
    assert model.training
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    size = (2,) if kind == "batch_norm1d" else (2, 4, 5)
    model({"x": torch.randn(4, *size, dtype=torch.float64)})
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert not torch.equal(before["0.running_mean"], torch.zeros(2, dtype=torch.float64)), (
        "the statistics are drawn"
    )


def test_dropout_drops_about_a_share_of_p():
    keep = LAYERS["dropout"].extras(
        Signal("vector", (4,)), {"p": 0.1}, np.random.default_rng(0), 1000
    )["keep"]
    assert keep.shape == (1000, 4)
    # 4000 draws: five standard deviations are 0.024
    assert abs((~keep).mean() - 0.1) < 0.024


@pytest.mark.parametrize(
    ("layer", "signal", "expected"),
    [
        (_conv("conv2d", kernel=3), IMAGE, Signal("image", (2, 2, 3))),
        (_conv("conv1d", kernel=2), SEQUENCE, Signal("sequence", (2, 2))),
        (Layer("unflatten", length=4), Signal("vector", (12,)), Signal("sequence", (4, 3))),
    ],
)
def test_shape_with_options_that_are_not_drawn(layer, signal, expected):
    assert out_signal(layer, signal) == expected


@pytest.mark.parametrize(
    ("layer", "signal", "message"),
    [
        (
            _conv("conv2d", kernel=5),
            IMAGE,
            "'conv2d': expected a kernel that the padded input holds",
        ),
        (
            _conv("conv2d", groups=2, features=3),
            IMAGE,
            r"'conv2d': expected .* features that 2 groups divide",
        ),
        (
            Layer("max_pool2d", kernel=2, stride=2, padding=2, dilation=1),
            IMAGE,
            "padding of at most half the kernel",
        ),
        (
            Layer("average_pool2d", kernel=8, stride=1, padding=0, count_padding=True),
            IMAGE,
            "a kernel that the padded",
        ),
        (
            Layer("group_norm", groups=3, affine=True),
            IMAGE,
            "'group_norm': expected groups that divide the features",
        ),
        (
            Layer("group_norm", groups=4, affine=True),
            Signal("vector", (4,)),
            "more than one number in a group",
        ),
        (
            Layer("instance_norm", affine=True),
            Signal("image", (2, 1, 1)),
            "more than one position or pixel",
        ),
        (
            Layer("unflatten", length=3),
            Signal("vector", (4,)),
            "'unflatten': expected a length that divides 4, got 3",
        ),
        (Layer("transpose"), SEQUENCE, "'transpose': expected a sequence without padding"),
        (
            Layer("dropout", p=1.0),
            Signal("vector", (2,)),
            "'dropout': expected p of at least 0 and below 1, got 1.0",
        ),
        (_bag(mode="median"), TOKENS, "mode to be one of sum, mean, max, got median"),
        (_bag(mode="max", sparse=True), TOKENS, "a dense gradient for mode 'max'"),
        (_bag(mode="mean", weighted=True), TOKENS, "weights for mode 'sum' only"),
    ],
)
def test_a_wrong_option_or_input_is_refused_with_a_message(layer, signal, message):
    with pytest.raises(UsageError, match=message):
        out_signal(layer, signal)


# Attention ignores padding, and with a causal mask later positions


PADDED = Signal("sequence", (3, 4), padded=True)
VALID = np.arange(3) < np.array([[1], [2], [3]])
LAYERS_WITH_MASK = [
    pytest.param(name, options, id=f"{name}{dict(options)}")
    for name in ("attention", "transformer")
    for options in LAYERS[name].variants(PADDED)
]


def both_sides(name, options, mask):
    """Return the layer as a torch function and as a JAX function of x (n, T, D), with the same
    values.
    """
    kind = LAYERS[name]
    module = kind.torch_module(PADDED, options)
    fill_parameters(module, 0)
    module = module.double()
    values = {n: p.detach().numpy() for n, p in module.named_parameters()}
    extras = {} if mask is None else {"mask": mask}

    def in_torch(x):
        y = module(torch.from_numpy(x), **{n: torch.from_numpy(a) for n, a in extras.items()})
        return y.detach().numpy()

    return in_torch, lambda x: np.asarray(kind.jax_apply(options, values, jnp.asarray(x), extras))


def changed_positions(function, x, where, to):
    """Return (n, T): which positions of the output change when the input's positions `where` are
    set to `to`.
    """
    other = np.where(where[..., None], to, x)
    before, after = function(x), function(other)
    assert np.isfinite(before).all()
    assert np.isfinite(after).all()
    return (np.abs(before - after) > 1e-9).any(axis=-1)


@pytest.mark.parametrize(("name", "options"), LAYERS_WITH_MASK)
def test_padding_changes_no_valid_position(name, options):
    x = np.random.default_rng(0).standard_normal((3, 3, 4))
    for function in both_sides(name, options, VALID):
        assert not (changed_positions(function, x, ~VALID, 7.0) & VALID).any()


@pytest.mark.parametrize(
    ("name", "options"), [p for p in LAYERS_WITH_MASK if not p.values[1].get("causal")]
)
def test_without_the_mask_padding_changes_valid_positions(name, options):
    """The test above can fail, except for causal layers, where padding is after every valid
    position.
    """
    x = np.random.default_rng(0).standard_normal((3, 3, 4))
    for function in both_sides(name, options, None):
        assert (changed_positions(function, x, ~VALID, 7.0) & VALID).any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_only_a_causal_layer_ignores_later_positions(causal, position):
    x = np.random.default_rng(0).standard_normal((2, 3, 4))
    where = np.broadcast_to(np.arange(3) == position, (2, 3))
    for function in both_sides("attention", {"heads": 2, "causal": causal}, None):
        changed = changed_positions(function, x, where, 7.0)
        assert (changed == ((np.arange(3) >= position) | (not causal))).all()
