"""A port with a fault planted in its JAX side, the truth about it, and what the ports are written
with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch
from torch import nn

Array = npt.NDArray[Any]
Parameters = dict[str, Any]
Pair = dict[str, Any]


@dataclass(frozen=True)
class Truth:
    """Where a planted fault is and what it is.

    Attributes:
        places: paths of the torch module, any of which is right, as patterns; empty for the whole
            model.
        causes: names of causes, any of which is right.
    """

    places: tuple[str, ...]
    causes: tuple[str, ...]


@dataclass(frozen=True)
class Architecture:
    """A torch model with its port, as a function of what is planted.

    Attributes:
        name: of the architecture.
        make: `make(variant) -> pair`, where the variant is a fault or an equal form.
        faults: name -> truth.
        forms: names of forms that are written differently and are equal; `plain` is the usual one.
        logits: whether the outputs are logits over their last axis.
    """

    name: str
    make: Callable[[str], Pair]
    faults: Mapping[str, Truth]
    forms: tuple[str, ...]
    logits: bool = False

    def pair(self, variant: str) -> Pair:
        """Return the pair with this variant; the same values at each call."""
        torch.manual_seed(5)
        return self.make(variant)


ARCHITECTURES: dict[str, Architecture] = {}
ROWS = Path(__file__).with_name("pairs.txt").read_text().splitlines()
TABLE = [[part.strip() for part in row.split("|")] for row in ROWS]
"""Of each pair `architecture/variant`, the places of its fault (`-` is the whole model) or `sound`, and its causes."""


def architecture(logits: bool = False) -> Callable[[Callable[[str], Pair]], Callable[[str], Pair]]:
    """Enter a function of the planted variant as an architecture, under its name.

    `pairs.txt` has its variants.
    """

    def enter(make: Callable[[str], Pair]) -> Callable[[str], Pair]:
        name = make.__name__.replace("_", "-")
        own = {row[0].partition("/")[2]: row[1:] for row in TABLE if row[0].startswith(f"{name}/")}
        truths = {
            variant: Truth(
                tuple("" if one == "-" else one for one in places.split(", ")),
                tuple(causes.split(", ")),
            )
            for variant, (places, causes) in own.items()
            if places != "sound"
        }
        forms = tuple(variant for variant in own if variant not in truths)
        ARCHITECTURES[name] = Architecture(name, make, truths, forms, logits)
        return make

    return enter


# What the pairs are built of.


def tree(state: Mapping[str, Any]) -> Parameters:
    """Return a state as nested dicts, one level for each dot."""
    made: Parameters = {}
    for name, value in state.items():
        *path, last = name.split(".")
        inner = made
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = jnp.asarray(value)
    return made


def pair_of(
    module: nn.Module,
    apply: Callable[..., Any],
    *inputs: Array,
    load: Callable[[Mapping[str, Any]], Any] = tree,
    **more: Any,
) -> Pair:
    """Return a pair with its parameters loaded."""
    state = {name: value.detach().numpy().copy() for name, value in module.state_dict().items()}
    return {
        "module": module,
        "apply": apply,
        "params": load(state),
        "load": load,
        "inputs": inputs,
        **more,
    }


def normal(*shape: int, seed: int = 0) -> Array:
    """Return normal numbers in float32."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def integers(high: int, *shape: int, seed: int = 0) -> Array:
    """Return integers below a limit."""
    return np.random.default_rng(seed).integers(0, high, shape)


# The layers that most ports need.


def dense(p: Parameters, x: jax.Array) -> jax.Array:
    """Return torch's Linear."""
    out = x @ p["weight"].T
    return out + p["bias"] if "bias" in p else out


def conv(
    p: Parameters,
    x: jax.Array,
    padding: Any = 0,
    *,
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
) -> jax.Array:
    """Return torch's convolution of channels-first arrays of one or two dimensions."""
    n = x.ndim - 2
    pads = [(padding, padding)] * n if isinstance(padding, int) else padding
    out = jax.lax.conv_general_dilated(
        x,
        p["weight"],
        (stride,) * n,
        pads,
        rhs_dilation=(dilation,) * n,
        feature_group_count=groups,
    )
    return out + p["bias"].reshape(-1, *(1,) * n) if "bias" in p else out


def layer_norm(p: Parameters, x: jax.Array, eps: float = 1e-5) -> jax.Array:
    """Return torch's LayerNorm over the last axis."""
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + eps) * p["weight"] + p["bias"]


def rms_norm(p: Parameters, x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """Return torch's RMSNorm over the last axis."""
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + eps) * p["weight"]


def group_norm(p: Parameters, x: jax.Array, groups: int, eps: float = 1e-5) -> jax.Array:
    """Return torch's GroupNorm of a channels-first array."""
    parts = x.reshape(x.shape[0], groups, -1)
    spread = jnp.sqrt(parts.var(-1, keepdims=True) + eps)
    each = (-1, *(1,) * (x.ndim - 2))
    return ((parts - parts.mean(-1, keepdims=True)) / spread).reshape(x.shape) * p[
        "weight"
    ].reshape(each) + p["bias"].reshape(each)


def mean_squares(outputs: Any, *_: Any) -> Any:
    """Return the mean of the squares of an output: a loss that both sides compute alike."""
    return (outputs**2).mean()
