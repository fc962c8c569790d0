"""Layers over the positions of a sequence and the pixels of an image, and layers with arrays of
their own.

A sequence is (T, D) per item, and torch's convolutions and most normalizations take (D, T): their
modules transpose. Variants are few and produce the sizes of other layers, because every new shape
is one more compilation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import torch

from gradcheck_suite.catalogue.definitions import (
    FLOATS,
    ROWS,
    Arguments,
    Arrays,
    Form,
    Implementation,
    LayerDefinition,
    Options,
    Signal,
    Variants,
    expect,
    expect_counts,
    on,
    rows_to_features,
    same,
    vector,
)
from gradcheck_suite.catalogue.rows import (
    PADDING,
    embedding_arguments,
    few_in_sequences,
    standardised,
)

# Layers over the positions of a sequence and the pixels of an image: convolution, pooling,
# normalization, reshaping.
#
# A sequence is (T, D) per item, and torch's convolutions and most normalizations take (D, T): their
# modules transpose. Variants are few and produce the sizes of other layers, because every new shape
# is one more compilation.


# Convolutions


_AREAS = ((4, 5), (2, 2), (1, 1))
_PLAIN = {
    "features": 2,
    "kernel": 1,
    "stride": 1,
    "padding": 0,
    "dilation": 1,
    "groups": 1,
    "bias": False,
}


class ChannelsLast(torch.nn.Module):
    """Transposes a sequence (n, T, D) for a module that takes channels before positions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x.transpose(1, 2)).transpose(1, 2)
        return y


class SequenceConv(ChannelsLast, torch.nn.Conv1d):
    """`Conv1d` over (n, T, D)."""


def _length(size: int, o: Options) -> int:
    """Return the output length along an axis of `size`, as torch's `Conv1d` and `MaxPool2d`
    document it.
    """
    covered = o.get("dilation", 1) * (o["kernel"] - 1) + 1
    last_start = size + 2 * o["padding"] - covered
    return int(last_start // o["stride"] + 1)


def _lengths(signal: Signal, options: Options) -> tuple[int, ...]:
    return tuple(_length(size, options) for size in signal.positions)


def _has_usual_size(signal: Signal, options: Options) -> bool:
    """Return whether the output keeps a sequence's length, so that its mask still fits, or has an
    area of `_AREAS`.
    """
    lengths = _lengths(signal, options)
    return lengths == signal.positions if signal.form == "sequence" else lengths in _AREAS


def _convolution(
    name: str,
    form: Form,
    module: Callable[..., torch.nn.Module],
    axes: tuple[str, str, str],
    *changes: dict[str, Any],
) -> LayerDefinition:
    def fits(signal: Signal, o: Options) -> bool:
        return _has_usual_size(signal, o) and signal.features % o["groups"] == 0

    def out(signal: Signal, o: Options) -> Signal:
        expect_counts(o, "features", "kernel", "stride", "dilation", "groups")
        expect(o["padding"] >= 0, "padding of at least 0", o["padding"])
        groups = o["groups"]
        features = o["features"]
        lengths = _lengths(signal, o)
        divided = signal.features % groups == 0 and features % groups == 0
        expect(
            divided,
            f"input and output features that {groups} groups divide",
            (signal.features, features),
        )
        expect(
            min(lengths) >= 1, "a kernel that the padded input holds", f"{dict(o)} on {signal.size}"
        )
        padded = signal.padded and lengths == signal.positions
        return Signal(
            form, (*lengths, features) if form == "sequence" else (features, *lengths), padded
        )

    def convolved(o: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
        spatial = x.ndim - 2
        y = jax.lax.conv_general_dilated(
            x,
            params["weight"],
            window_strides=(o["stride"],) * spatial,
            padding=((o["padding"], o["padding"]),) * spatial,
            rhs_dilation=(o["dilation"],) * spatial,
            dimension_numbers=axes,
            feature_group_count=o["groups"],
            precision=jax.lax.Precision.HIGHEST,
        )
        return (
            y + params["bias"].reshape([-1 if axis == "C" else 1 for axis in axes[2]])
            if o["bias"]
            else y
        )

    return LayerDefinition(
        name,
        on(form, options=[_PLAIN | change for change in changes], fits=fits),
        out,
        lambda signal, o: module(signal.features, *(o[option] for option in _PLAIN)),
        convolved,
        trainable=True,
    )


# Average and maximum pooling of images, over windows of one size (pooling) or a number of bins
# (adaptive pooling).
#
# Equal maxima are common after a ReLU. torch gives the gradient to the first one in row-major
# order, as `argmax` does.


def _every_window_holds_a_pixel(signal: Signal, o: Options) -> bool:
    """Return whether every window contains a pixel: with dilation, a window can lie in the padding
    alone.

    For such a window torch's maximum is -inf, and its backward writes outside of the image's
    gradient.
    """
    within = [o.get("dilation", 1) * j for j in range(o["kernel"])]
    for size in signal.positions:
        for i in range(_length(size, o)):
            first = o["stride"] * i - o["padding"]
            if not any(0 <= first + place < size for place in within):
                return False
    return True


def _pooled(signal: Signal, options: Options) -> Signal:
    expect_counts({"dilation": 1, **options}, "kernel", "stride", "dilation")
    expect(
        0 <= options["padding"] <= options["kernel"] // 2,
        "padding of at most half the kernel",
        dict(options),
    )
    lengths = _lengths(signal, options)
    expect(
        min(lengths) >= 1, "a kernel that the padded image holds", f"{dict(options)} on {signal}"
    )
    # torch returns -inf and an index outside the image:
    # https://github.com/pytorch/pytorch/issues/114216
    whole = _every_window_holds_a_pixel(signal, options)
    expect(whole, "a pixel in every window", f"{dict(options)} on {signal}")
    return Signal("image", (signal.features, *lengths))


def _windows(x: jax.Array, options: Options, outside: float) -> jax.Array:
    """Return the windows, (n, C, H', W', kernel * kernel), row by row, with `outside` beyond the
    image.
    """
    kernel = options["kernel"]
    stride = options["stride"]
    padding = options["padding"]
    dilation = options.get("dilation", 1)
    padded = jnp.pad(
        x, ((0, 0), (0, 0), (padding, padding), (padding, padding)), constant_values=outside
    )

    def places(offset: int, size: int) -> slice:
        return slice(
            dilation * offset, dilation * offset + stride * (_length(size, options) - 1) + 1, stride
        )

    _, _, height, width = x.shape
    windows = [
        padded[:, :, places(i, height), places(j, width)]
        for i, j in itertools.product(range(kernel), range(kernel))
    ]
    return jnp.stack(windows, axis=-1)


def first_maximum(x: jax.Array) -> jax.Array:
    """Return the maximum over the last axis; the first of equal maxima gets the gradient."""
    return jnp.take_along_axis(x, x.argmax(-1, keepdims=True), axis=-1)[..., 0]


def _average(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    total = _windows(x, options, 0.0).sum(-1)
    if options["count_padding"]:
        return total / options["kernel"] ** 2
    return total / _windows(jnp.ones_like(x), options, 0.0).sum(-1)


def _pooling(
    name: str,
    module: Callable[[Options], torch.nn.Module],
    jax_apply: Implementation,
    *options: Options,
) -> LayerDefinition:
    def fits(signal: Signal, o: Options) -> bool:
        return _every_window_holds_a_pixel(signal, o) and _has_usual_size(signal, o)

    variants = on("image", options=options, fits=fits)
    return LayerDefinition(
        name,
        variants,
        _pooled,
        lambda signal, o: module(o),
        jax_apply,
    )


def _bins(x: jax.Array, size: int) -> Iterator[tuple[slice, slice]]:
    """Yield the bins row by row, from floor(i H / size) to ceil((i + 1) H / size): neighbours may
    overlap.
    """
    height, width = x.shape[2:]
    for i in range(size):
        for j in range(size):
            rows = slice(i * height // size, -(-(i + 1) * height // size))
            yield rows, slice(j * width // size, -(-(j + 1) * width // size))


def _adaptive(
    name: str, module: Callable[[int], torch.nn.Module], pool: Callable[[jax.Array], jax.Array]
) -> LayerDefinition:
    def out(signal: Signal, o: Options) -> Signal:
        expect_counts(o, "size")
        return Signal("image", (signal.features, o["size"], o["size"]))

    def jax_apply(o: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
        pooled = [pool(x[:, :, rows, columns]) for rows, columns in _bins(x, o["size"])]
        return jnp.stack(pooled, -1).reshape(*x.shape[:2], o["size"], o["size"])

    variants = on("image", fits=lambda signal, o: signal.positions == (4, 5), size=(1, 2))
    return LayerDefinition(
        name,
        variants,
        out,
        lambda signal, o: module(o["size"]),
        jax_apply,
    )


# Pooling of a sequence to one vector: the mean, maximum or last of its valid positions.


class MeanOverTime(torch.nn.Module):
    """Mean of the positions where the mask is True: (n, T, D) and a mask (n, T) to (n, D)."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is None:
            return x.mean(1)
        kept = mask.unsqueeze(-1)
        # filled, not multiplied: padding may be infinite, and 0 times infinity is NaN
        return x.masked_fill(~kept, 0).sum(1) / kept.sum(1)


class MaxOverTime(torch.nn.Module):
    """Maximum of the positions where the mask is True: (n, T, D) and a mask (n, T) to (n, D).

    Args:
        shared: whether equal maxima share the gradient (`amax`) or the first one gets it (`max`).
    """

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), -torch.inf)
        return x.amax(1) if self.shared else x.max(1).values


class LastStep(torch.nn.Module):
    """Last position where the mask is True: (n, T, D) and a mask (n, T), True on a prefix, to (n,
    D).
    """

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is None:
            return x[:, -1]
        return x[torch.arange(len(x), device=x.device), mask.sum(1) - 1]


def _mean(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    kept = jnp.ones(x.shape[:2], x.dtype)
    if "mask" in extras:
        kept = extras["mask"].astype(x.dtype)
    return jnp.einsum("ntd,nt->nd", x, kept) / kept.sum(1)[:, None]


def _max(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    if "mask" in extras:
        x = jnp.where(extras["mask"][:, :, None], x, -jnp.inf)
    return x.max(1) if options["shared"] else first_maximum(jnp.swapaxes(x, 1, 2))


def _last(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    if "mask" not in extras:
        return x[:, -1]
    position = jnp.arange(x.shape[1])
    # from the mask itself, not from its sum: so a mask that is no prefix shows as a difference from
    # torch's
    last = jnp.where(extras["mask"], position, -1).max(1)
    return jnp.where((position == last[:, None])[:, :, None], x, 0.0).sum(1)


def _over_time(
    name: str, module: Callable[..., torch.nn.Module], jax_apply: Implementation, **choices: Any
) -> LayerDefinition:
    return LayerDefinition(
        name,
        on("sequence", **choices),
        lambda signal, o: vector(signal.features),
        lambda signal, o: module(**o),
        jax_apply,
        uses_mask=True,
    )


# Normalization layers: layer, RMS, group and instance norm, batch norm in eval mode.
#
# Batch norm in train mode is not separable over samples. Here a model in train mode keeps its batch
# norms in eval mode, as fine-tuning with frozen statistics does. The strategies draw one in train
# mode only for `problems(accumulable=False)`: the forward-only check must detect it before a loop
# is blamed.


EPS = 1e-2
"""Larger than torch's default of 1e-5. Rounding errors left by cancellation, as in the mean over positions after an
instance norm, grow by 1/sqrt(EPS) in each further normalization: by 3e7 in three of them at 1e-5. A large value also
makes errors in how it enters the formula visible."""


class SequenceGroupNorm(ChannelsLast, torch.nn.GroupNorm):
    """`GroupNorm` over (n, T, D)."""


class SequenceInstanceNorm(ChannelsLast, torch.nn.InstanceNorm1d):
    """`InstanceNorm1d` over (n, T, D)."""


class SequenceBatchNorm(ChannelsLast, torch.nn.BatchNorm1d):
    """`BatchNorm1d` over (n, T, D)."""


class FrozenBatchNorm1d(torch.nn.BatchNorm1d):
    """`BatchNorm1d` over (n, D) or (n, T, D) that stays in eval mode."""

    def train(self, mode: bool = True) -> Self:
        return super().train(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            super().forward(x)
            if x.ndim == 2
            else super().forward(x.transpose(1, 2)).transpose(1, 2)
        )


class FrozenBatchNorm2d(torch.nn.BatchNorm2d):
    """`BatchNorm2d` that stays in eval mode."""

    def train(self, mode: bool = True) -> Self:
        return super().train(False)


def _per_channel(values: jax.Array, x: jax.Array) -> jax.Array:
    """Return (D,) in a shape that broadcasts over x: channels are axis 1 of an image, the last axis
    otherwise.
    """
    return values.reshape(-1, 1, 1) if x.ndim == 4 else values


def _affine(options: Options, params: Arguments, x: jax.Array) -> jax.Array:
    """Return x scaled and shifted per channel."""
    return (
        x * _per_channel(params["weight"], x) + _per_channel(params["bias"], x)
        if options["affine"]
        else x
    )


def _layer_norm(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    return _affine(options, params, standardised(x, (-1,), EPS))


def _rms_norm(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    y = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + EPS)
    return y * params["weight"] if options["affine"] else y


def _group_norm(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    axis = 1 if x.ndim == 4 else -1
    channels_first = jnp.moveaxis(x, axis, 1)
    grouped = standardised(channels_first.reshape(len(x), options["groups"], -1), (-1,), EPS)
    return _affine(options, params, jnp.moveaxis(grouped.reshape(channels_first.shape), 1, axis))


def _instance_norm(
    options: Options, params: Arguments, x: jax.Array, extras: Arguments
) -> jax.Array:
    return _affine(options, params, standardised(x, (1,) if x.ndim == 3 else (2, 3), EPS))


def _batch_norm(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    mean = _per_channel(params["running_mean"], x)
    variance = _per_channel(params["running_var"], x)
    return _affine(options, params, (x - mean) / jnp.sqrt(variance + EPS))


def _elements(signal: Signal, groups: int) -> int:
    """Return the number of elements in one group."""
    return int(np.prod(signal.size)) // groups


def _takes_groups(signal: Signal, options: Options) -> bool:
    """Return whether a group has several numbers.

    Two groups with parameters are drawn where that is so, else one.
    """
    pairs = signal.features % 2 == 0 and _elements(signal, 2) > 1
    return _elements(signal, 1) > 1 and (not options["affine"] or options["groups"] == 1 + pairs)


def _group_out(signal: Signal, options: Options) -> Signal:
    groups = options["groups"]
    expect(groups >= 1 and signal.features % groups == 0, "groups that divide the features", groups)
    expect(
        _elements(signal, groups) > 1, "more than one number in a group", f"{groups} of {signal}"
    )
    return signal


def _has_several_positions(signal: Signal, options: Options) -> bool:
    return _elements(signal, signal.features) > 1


def _instance_out(signal: Signal, options: Options) -> Signal:
    expect(_has_several_positions(signal, options), "more than one position or pixel", signal)
    return signal


def _normalization(  # noqa: PLR0913 - the arguments of a kind of layer
    name: str,
    module: Callable[..., torch.nn.Module],
    jax_apply: Implementation,
    *,
    forms: tuple[Form, ...] = ROWS,
    in_sequences: Callable[..., torch.nn.Module] | None = None,
    axes: int | None = None,
    affine: str = "affine",
    variants: Variants | None = None,
    out: Callable[[Signal, Options], Signal] | None = None,
) -> LayerDefinition:
    """Return a normalization.

    `affine` is torch's name of that option, `in_sequences` the module of a sequence.
    """

    def torch_module(signal: Signal, o: Options) -> torch.nn.Module:
        make = in_sequences if in_sequences and signal.form == "sequence" else module
        groups = [o["groups"]] if "groups" in o else []
        # a batch norm that stays in eval mode does so from its first call of `train`
        return make(*groups, signal.features, eps=EPS, **{affine: o["affine"]}).train()

    variants = variants or on(*forms, affine=(False, True))
    return LayerDefinition(
        name,
        variants,
        out or same,
        torch_module,
        jax_apply,
        axes=axes,
    )


def _batch_norm_in_train_mode(signal: Signal, options: Options) -> torch.nn.Module:
    module = {
        "vector": torch.nn.BatchNorm1d,
        "sequence": SequenceBatchNorm,
        "image": torch.nn.BatchNorm2d,
    }
    return module[signal.form](signal.features, eps=EPS)


# Layers that only reshape. Their output sizes are those of other layers, so that few shapes are
# compiled


def _unflattened(signal: Signal, options: Options) -> Signal:
    length = options["length"]
    expect(
        length >= 1 and signal.size[0] % length == 0,
        f"a length that divides {signal.size[0]}",
        length,
    )
    return Signal("sequence", (length, signal.size[0] // length))


class Transpose(torch.nn.Module):
    """Transposes (n, A, B) to (n, B, A), a view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)


def _transposed(signal: Signal, options: Options) -> Signal:
    expect(not signal.padded, "a sequence without padding", signal)
    return Signal("sequence", signal.size[::-1])


class Pixels(torch.nn.Module):
    """Turns images (n, C, H, W) into sequences of pixels (n, H W, C), row by row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(2).transpose(1, 2)


def _pixels_out(signal: Signal, options: Options) -> Signal:
    channels, height, width = signal.size
    return Signal("sequence", (height * width, channels))


_POSITIONS = (
    _convolution(
        "conv1d",
        "sequence",
        SequenceConv,
        ("NWC", "OIW", "NWC"),
        # each of these maps 3 positions to 3
        {},
        {"kernel": 3, "padding": 1, "bias": True},
        {"kernel": 3, "stride": 2, "padding": 2},
        {"kernel": 2, "padding": 1, "dilation": 2, "bias": True},
        {"features": 4, "kernel": 3, "padding": 1, "groups": 2, "bias": True},
    ),
    _convolution(
        "conv2d",
        "image",
        torch.nn.Conv2d,
        ("NCHW", "OIHW", "NCHW"),
        # these map 4x5 to 4x5 or 2x2, and 2x2 to 2x2 or 1x1
        {},
        {"kernel": 3, "padding": 1, "bias": True},
        {"kernel": 2, "stride": 2, "bias": True},
        {"features": 4, "kernel": 4, "stride": 2, "padding": 1},
        {"kernel": 3, "padding": 2, "dilation": 2, "bias": True},
        {"features": 4, "kernel": 3, "padding": 1, "groups": 2, "bias": True},
    ),
    _pooling(
        "average_pool2d",
        lambda o: torch.nn.AvgPool2d(
            o["kernel"], o["stride"], o["padding"], count_include_pad=o["count_padding"]
        ),
        _average,
        {"kernel": 2, "stride": 2, "padding": 0, "count_padding": True},
        {"kernel": 3, "stride": 1, "padding": 1, "count_padding": True},
        {"kernel": 3, "stride": 1, "padding": 1, "count_padding": False},
    ),
    _pooling(
        "max_pool2d",
        lambda o: torch.nn.MaxPool2d(o["kernel"], o["stride"], o["padding"], o["dilation"]),
        lambda o, params, x, extras: first_maximum(_windows(x, o, -jnp.inf)),
        {"kernel": 2, "stride": 2, "padding": 0, "dilation": 1},
        {"kernel": 3, "stride": 1, "padding": 1, "dilation": 1},
        {"kernel": 2, "stride": 1, "padding": 1, "dilation": 2},
    ),
    _adaptive("adaptive_average_pool2d", torch.nn.AdaptiveAvgPool2d, lambda x: x.mean((2, 3))),
    _adaptive(
        "adaptive_max_pool2d",
        torch.nn.AdaptiveMaxPool2d,
        lambda x: first_maximum(x.reshape(*x.shape[:2], -1)),
    ),
    _over_time("mean_over_time", MeanOverTime, _mean),
    _over_time("max_over_time", MaxOverTime, _max, shared=(False, True)),
    _over_time("last_step", LastStep, _last),
    _normalization(
        "layer_norm", torch.nn.LayerNorm, _layer_norm, axes=1, affine="elementwise_affine"
    ),
    _normalization("rms_norm", torch.nn.RMSNorm, _rms_norm, axes=1, affine="elementwise_affine"),
    _normalization(
        "group_norm",
        torch.nn.GroupNorm,
        _group_norm,
        in_sequences=SequenceGroupNorm,
        variants=on(
            *FLOATS,
            options=[
                {"groups": groups, "affine": affine}
                for groups, affine in ((1, False), (1, True), (2, True))
            ],
            fits=_takes_groups,
        ),
        out=_group_out,
    ),
    _normalization(
        "instance_norm",
        torch.nn.InstanceNorm2d,
        _instance_norm,
        in_sequences=SequenceInstanceNorm,
        variants=on("sequence", "image", fits=_has_several_positions, affine=(False, True)),
        out=_instance_out,
    ),
    _normalization("batch_norm1d", FrozenBatchNorm1d, _batch_norm, axes=1),
    _normalization("batch_norm2d", FrozenBatchNorm2d, _batch_norm, forms=("image",)),
    LayerDefinition(
        "batch_norm_train",
        on(*FLOATS),
        same,
        _batch_norm_in_train_mode,
        trainable=True,
        separable=False,
    ),
    LayerDefinition(
        "flatten",
        on("sequence", "image", fits=lambda signal, o: bool(np.prod(signal.size) <= 12)),
        lambda signal, o: vector(int(np.prod(signal.size))),
        lambda signal, o: torch.nn.Flatten(),
        lambda o, params, x, extras: x.reshape(len(x), -1),
    ),
    LayerDefinition(
        "unflatten",
        on("vector", fits=lambda signal, o: signal.features in (3, 6, 12), length=(3,)),
        _unflattened,
        lambda signal, o: torch.nn.Unflatten(1, (o["length"], signal.size[0] // o["length"])),
        lambda o, params, x, extras: x.reshape(len(x), o["length"], -1),
    ),
    LayerDefinition(
        "transpose",
        on(
            "sequence", fits=lambda signal, o: not signal.padded and signal.size in ((3, 4), (4, 3))
        ),
        _transposed,
        lambda signal, o: Transpose(),
        lambda o, params, x, extras: jnp.swapaxes(x, 1, 2),
    ),
    LayerDefinition(
        "pixels",
        on("image", fits=lambda signal, o: signal.positions == (2, 2)),
        _pixels_out,
        lambda signal, o: Pixels(),
        lambda o, params, x, extras: jnp.einsum("nchw->nhwc", x).reshape(len(x), -1, x.shape[1]),
    ),
)


# Further layers: with arrays of their own beside the input, that scale, made of other layers, and
# the weight probe's.
#
# They come after `rows` and `positions` because the strategies draw kinds by their place in the
# table.


# Dropout whose mask is part of the batch, so that every split of the items drops the same elements


class MaskedDropout(torch.nn.Module):
    """x * keep / (1 - p) for a mask `keep` of the input's shape."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        return x * keep / (1 - self.p)


def _dropout_out(signal: Signal, options: Options) -> Signal:
    expect(0 <= options["p"] < 1, "p of at least 0 and below 1", options["p"])
    return signal


# Linear layers with weight normalization: the weight is g v / |v|, and g and v are the parameters


def _weight_norm_module(signal: Signal, options: Options) -> torch.nn.Module:
    module = torch.nn.Linear(signal.features, options["features"])
    # dim=-1 takes one norm over the whole weight
    return torch.nn.utils.parametrizations.weight_norm(module, dim=-1 if options["whole"] else 0)


def _weight_norm(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    magnitude, direction = (params[f"parametrizations.weight.original{i}"] for i in range(2))
    square = direction**2
    norm = jnp.sqrt(square.sum() if options["whole"] else square.sum(1, keepdims=True))
    return x @ (magnitude * direction / norm).T + params["bias"]


# Embedding bags: the sum, mean or maximum of an item's token vectors, one bag per item


_MODES = ("sum", "mean", "max")
# torch supports per-sample weights for mode 'sum' only, and no sparse gradient for mode 'max'
_BAGS = [
    {
        "features": 2,
        "mode": mode,
        **{flag: flag in flags for flag in ("sparse", "padding_idx", "weighted")},
    }
    for mode, *flags in (
        *((mode,) for mode in _MODES),
        ("sum", "sparse"),
        ("mean", "padding_idx"),
        ("max", "padding_idx"),
        ("sum", "weighted"),
        ("mean", "sparse", "padding_idx"),
    )
]


def _bag_out(signal: Signal, options: Options) -> Signal:
    mode = options["mode"]
    expect_counts(options, "features")
    expect(mode in _MODES, f"mode to be one of {', '.join(_MODES)}", mode)
    expect(mode != "max" or not options["sparse"], "a dense gradient for mode 'max'", "sparse=True")
    expect(
        mode == "sum" or not options["weighted"], "weights for mode 'sum' only", f"mode {mode!r}"
    )
    return vector(options["features"])


class Bag(torch.nn.EmbeddingBag):
    """`EmbeddingBag` of (n, T) ids, one bag per row, with optional weights of the same shape."""

    def forward(self, x: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, per_sample_weights=weights)


def _bag_extras(signal: Signal, options: Options, rng: np.random.Generator, items: int) -> Arrays:
    return {"weights": rng.standard_normal((items, *signal.size))} if options["weighted"] else {}


def _bag(options: Options, params: Arguments, x: jax.Array, extras: Arguments) -> jax.Array:
    rows = params["weight"][x]
    kept = (x != PADDING if options["padding_idx"] else jnp.full(x.shape, True))[:, :, None]
    if options["mode"] == "max":
        largest = first_maximum(jnp.swapaxes(jnp.where(kept, rows, -jnp.inf), 1, 2))
        # torch returns a zero vector for a bag of padding only
        return jnp.where(kept.any(1), largest, 0.0)
    if options["weighted"]:
        rows = rows * extras["weights"][:, :, None]
    total = jnp.where(kept, rows, 0.0).sum(1)
    return total / jnp.maximum(kept.sum(1), 1) if options["mode"] == "mean" else total


# Layers that scale: by a parameter without dimensions, and by a factor that depends on the mode


class Scale(torch.nn.Module):
    """x * weight, for a weight of shape (), as the logit scale of CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class TrainScale(torch.nn.Module):
    """x * factor in train mode and x in eval mode: a difference between the modes without random
    numbers.
    """

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor if self.training else x


# A layer with an input of its own: each item has a second vector beside the one that the first
# layer receives


WIDTH = 3


class SecondInput(torch.nn.Module):
    """x + other W^T, for a second input `other` of the item."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.features = features
        self.width = width
        self.weight = torch.nn.Parameter(torch.empty(features, width))

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.linear(other, self.weight)


# The layer of the weight probe: one parameter entry per item. The gradient that a loop accumulates
# for this parameter is the vector of the weights that the loop gives to the items


class Readout(torch.nn.Module):
    """A parameter vector; an item's index selects one entry."""

    def __init__(self, items: int) -> None:
        super().__init__()
        self.items = items
        self.weight = torch.nn.Parameter(torch.zeros(items))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight[x]


def _is_index(signal: Signal) -> bool:
    return signal.form == "tokens" and signal.size == (1,)


def _read_out(signal: Signal, options: Options) -> Signal:
    expect(_is_index(signal), "the index of an item", signal)
    return vector(1)


_OWN_ARRAYS = (
    LayerDefinition(
        "dropout",
        on(*FLOATS, fits=lambda signal, o: signal.form == "vector" or o["p"] == 0.5, p=(0.5, 0.1)),
        _dropout_out,
        lambda signal, o: MaskedDropout(o["p"]),
        lambda o, params, x, extras: jnp.where(extras["keep"], x / (1 - o["p"]), 0.0),
        extras=lambda signal, o, rng, items: {"keep": rng.random((items, *signal.size)) >= o["p"]},
    ),
    LayerDefinition(
        "weight_norm",
        on(*ROWS, fits=few_in_sequences, features=(2, 3), whole=(False, True)),
        rows_to_features(),
        _weight_norm_module,
        _weight_norm,
        axes=1,
        trainable=True,
    ),
    LayerDefinition(
        "embedding_bag",
        on("tokens", options=_BAGS),
        _bag_out,
        lambda signal, o: Bag(**embedding_arguments(signal, o), mode=o["mode"]),
        _bag,
        extras=_bag_extras,
        trainable=True,
    ),
    LayerDefinition(
        "scale",
        on(*FLOATS),
        same,
        lambda signal, o: Scale(),
        lambda o, params, x, extras: x * params["weight"],
        axes=0,
        trainable=True,
    ),
    LayerDefinition(
        "train_scale",
        on(*FLOATS, factor=(2.0,)),
        same,
        lambda signal, o: TrainScale(o["factor"]),
        lambda o, params, x, extras: x * o["factor"],
        axes=0,
    ),
    LayerDefinition(
        "second_input",
        on("vector"),
        same,
        lambda signal, o: SecondInput(signal.features, WIDTH),
        lambda o, params, x, extras: x + extras["other"] @ params["weight"].T,
        extras=lambda signal, o, rng, items: {"other": rng.standard_normal((items, WIDTH))},
        trainable=True,
    ),
    LayerDefinition("residual", on(*FLOATS), same, wraps="residual"),
    LayerDefinition("shared", on(*FLOATS), same, wraps="shared"),
    LayerDefinition("sum", on(*FLOATS), same, wraps="sum"),
    # few features, so that few new shapes occur
    LayerDefinition(
        "concat", on(*FLOATS, fits=lambda signal, o: signal.features <= 2), same, wraps="concat"
    ),
    LayerDefinition(
        "readout",
        on("tokens", fits=lambda signal, o: _is_index(signal)),
        _read_out,
        lambda signal, o: Readout(signal.vocabulary),
        lambda o, params, x, extras: params["weight"][x],
        trainable=True,
    ),
)

KINDS = (*_POSITIONS, *_OWN_ARRAYS)
"""In the order in which the strategies draw them."""
