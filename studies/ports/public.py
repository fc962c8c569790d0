"""Ports in public code, beside the torch models that they are to be: `public.toml` has which, and
the truth about each.

A release is an architecture and each of its models a variant, so that the zoo's scoreboard takes
them. Models are small and have random weights, which the port's own code loads where it has some.
Nothing is downloaded.
"""

from __future__ import annotations

import importlib
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from studies.ports.planted import Architecture, Pair, Truth
from studies.ports.scoreboard import Row

TABLE: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())[
    "release"
]
RELEASES = {release["name"]: release for release in TABLE}


def lacking(name: str) -> str | None:
    """Return what a release needs and what is there in its place; None where it can be run."""
    for package, wanted in RELEASES[name]["packages"].items():
        try:
            found = version(package)
        except PackageNotFoundError:
            found = "none"
        if found != wanted:
            return f"{package} {wanted} is wanted, {found} is installed"
    return None


def architectures() -> dict[str, Architecture]:
    """Return the releases by name; the variants are their models."""
    found = {}
    for name, release in RELEASES.items():
        rows = {row["name"]: row for row in release["model"]}
        faulty = {one: row for one, row in rows.items() if "causes" in row}
        faults = {
            one: Truth(tuple(row["places"]), tuple(row["causes"])) for one, row in faulty.items()
        }
        forms = tuple(one for one in rows if one not in faults)
        found[name] = Architecture(
            name, partial(_made, BUILDERS[release["build"]], rows), faults, forms
        )
    return found


def write_row(page: Path, row: Row) -> None:
    """Write what is said of a port over its row in a page's table, or below the last row."""
    said = row.result if isinstance(row.result, str) else row.result.verdict
    found = dict.fromkeys(
        f"`{cause}` at `{place or 'the model'}`" for place, cause in row.differences
    )
    release, _, name = row.name.partition("/")
    (truth,) = (
        model.get("truth", "equal") for model in RELEASES[release]["model"] if model["name"] == name
    )
    usual = "passes" if row.usual else "fails"
    line = f"| {row.name} | {said} | {'; '.join(found)} | {truth} | {usual} | {row.seconds:.0f} |"
    lines = page.read_text().split("\n")
    here = [n for n, old in enumerate(lines) if old.startswith(f"| {row.name} |")]
    last = max(n for n, old in enumerate(lines) if old.startswith("| "))
    lines[here[0] if here else last + 1 : here[0] + 1 if here else last + 1] = [line]
    page.write_text("\n".join(lines))


def _inputs(shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Draw inputs by name: identifiers, a mask that hides the end of the second row, or numbers."""
    rng, drawn = np.random.default_rng(5), {}
    for name, shape in shapes.items():
        if name.endswith("mask"):
            drawn[name] = np.ones(shape, np.int64)
            drawn[name][1:, -2:] = 0
        else:
            numbers = not name.endswith(("ids", "text", "timestep"))
            high = 2 if "type" in name else 40
            drawn[name] = (
                rng.normal(size=shape).astype(np.float32)
                if numbers
                else rng.integers(high // 13, high, shape)
            )
    return drawn


class Called(nn.Module):
    """A model that takes its inputs by keyword, and some of its outputs."""

    def __init__(self, model: nn.Module, names: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.model, self._names, self._outputs = model, names, outputs

    def forward(self, *inputs: Any) -> Any:
        """Return the outputs that both sides have."""
        return _picked(self.model(**dict(zip(self._names, inputs, strict=True))), self._outputs)


def _picked(out: Any, names: Sequence[str]) -> Any:
    return [out[name] for name in names] if names else out


def _made(build: Callable[..., Any], rows: Mapping[str, Any], variant: str) -> Pair:
    # the libraries read them when a builder imports them
    os.environ.update(USE_TF="0", KERAS_BACKEND="jax", HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
    row = rows[variant]
    inputs = _inputs(row["inputs"])
    names, outputs = tuple(inputs), row.get("outputs", ())
    model, call, own_load = build(row)
    module = Called(model.eval(), names, outputs)

    def load(state: Mapping[str, Any]) -> Any:
        return own_load({name[len("model.") :]: np.asarray(value) for name, value in state.items()})

    def apply(params: Any, *given: Any) -> Any:
        theirs = dict(zip(row.get("jax_inputs", names), given, strict=True))
        return _picked(call(params, theirs), row.get("jax_outputs", outputs))

    params = load(module.state_dict())
    return {
        "module": module,
        "apply": apply,
        "params": params,
        "load": load,
        "inputs": tuple(inputs.values()),
        "train": row.get("train", False),
        "sizes": row.get("sizes"),
    }


def _named(value: Any) -> Any:
    """Return what a table says, with `package.module:name` in place of what has that name."""
    if isinstance(value, dict):
        return {key: _named(one) for key, one in value.items()}
    if isinstance(value, str) and ":" in value:
        module, _, name = value.partition(":")
        return getattr(importlib.import_module(module), name)
    return value


def _tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(value) for name, value in state.items()}


def _transformers(row: Mapping[str, Any]) -> Any:
    library = importlib.import_module("transformers")
    loading = importlib.import_module("transformers.modeling_flax_pytorch_utils")
    kind = row["model"]
    config = getattr(library, f"{kind}Config")(**_named(row["config"]), attn_implementation="eager")
    flax = getattr(library, f"Flax{kind}Model")(config, _do_init=False)
    flax._is_initialized = (
        True  # the loader asks for initial values, for their names and shapes alone
    )
    flax.params = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, leaf.dtype), flax.params_shape_tree
    )

    def load(state: Mapping[str, Any]) -> Any:
        given = loading.convert_pytorch_state_dict_to_flax(dict(state), flax)
        return _common(given, flax.params)  # `from_pretrained` drops the other names too

    def call(params: Any, given: Mapping[str, Any]) -> Any:
        return flax(**given, params=params)

    return getattr(library, f"{kind}Model")(config), call, load


def _common(given: Any, wanted: Any) -> Any:
    if not isinstance(wanted, Mapping):
        return given
    return {name: _common(given[name], one) for name, one in wanted.items() if name in given}


def _diffusers(row: Mapping[str, Any]) -> Any:
    library = importlib.import_module("diffusers")
    loading = importlib.import_module("diffusers.models.modeling_flax_pytorch_utils")
    flax = getattr(library, f"Flax{row['model']}")(**row["config"])
    shapes = jax.eval_shape(flax.init_weights, jax.random.key(0))
    # as above, without the time that initial values take
    shaped = SimpleNamespace(init_weights=lambda key: shapes)

    def load(state: Mapping[str, Any]) -> Any:
        return loading.convert_pytorch_state_dict_to_flax(_tensors(state), shaped)

    def call(params: Any, given: Mapping[str, Any]) -> Any:
        return flax.apply({"params": params}, **given)

    return getattr(library, row["model"])(**row["config"]), call, load


def _nnx(row: Mapping[str, Any]) -> Any:
    nnx = importlib.import_module("flax.nnx")
    graph, params = nnx.split(nnx.GRUCell(*row["config"], rngs=nnx.Rngs(0)))
    like = nnx.to_pure_dict(params)

    def load(state: Mapping[str, Any]) -> Any:
        """Load what the cell has; the gates' two biases are added, and `b_hn` has no place."""
        gates = np.repeat([1.0, 1.0, 0.0], row["config"][1])
        like["dense_i"] = {
            "kernel": state["weight_ih"].T,
            "bias": state["bias_ih"] + gates * state["bias_hh"],
        }
        like["dense_h"] = {"kernel": state["weight_hh"].T}
        return dict(like)

    def call(params: Any, given: Mapping[str, Any]) -> Any:
        return nnx.merge(graph, nnx.State(params))(given["hx"], given["input"])[0]

    return nn.GRUCell(*row["config"]), call, load


def _torchvision() -> None:
    """Import torchvision, also a wheel for CUDA where torch is one for a CPU: the models use no
    operator of it, and the import names these two.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for operator in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{operator}", "(Tensor a, Tensor b, float c) -> Tensor"
            )


def _jaxonmodels(row: Mapping[str, Any]) -> Any:
    equinox = importlib.import_module("equinox")
    loading = importlib.import_module("jaxonmodels.statedict2pytree.s2p")
    _torchvision()
    model = _named(row["torch"])(**_named(row["config"]))
    key = jax.random.key(0)
    made = equinox.nn.make_with_state(_named(row["jax"]))(
        **_named(row["config"] | row.get("jax_config", {})), key=key
    )

    def load(state: Mapping[str, Any]) -> Any:
        weights = {
            name: value.reshape(1) if not value.ndim else value
            for name, value in _tensors(state).items()
        }
        fields, indices = loading.pytree_to_fields(made)
        return loading.convert(
            weights, made, fields, indices, loading.state_dict_to_fields(weights)
        )

    def call(params: Any, given: Mapping[str, Any]) -> Any:
        own, state = params
        if "text" in given:  # each image with each text
            image, text = given["image"], given["text"]
            return jax.vmap(lambda i: jax.vmap(lambda t: own(i, t, state)[0])(text))(image)
        known = {"state": state, "key": key}
        more = {name: known[name] for name in row.get("more", ())}
        out = jax.vmap(lambda x: own(x, **more))(*given.values())
        return out[0] if isinstance(out, tuple) else out

    return model, call, load


def _keras_hub(row: Mapping[str, Any]) -> Any:
    keras = importlib.import_module("keras")
    converter = importlib.import_module(
        f"keras_hub.src.utils.transformers.convert_{row['converter']}"
    )
    loading = importlib.import_module("keras_hub.src.utils.transformers.safetensor_utils")
    library = importlib.import_module("transformers")
    config = getattr(library, f"{row['model']}Config")(**row["config"], attn_implementation="eager")
    keras.config.set_floatx("float64")
    backbone = converter.backbone_cls(**converter.convert_backbone_config(config.to_dict()))

    class Loader(loading.SafetensorLoader):  # type: ignore[misc, name-defined]
        """Takes tensors from a state in place of a file."""

        prefix = None

        def __init__(self, state: Mapping[str, Any]) -> None:
            self.state = state

        def get_tensor(self, name: str) -> Any:
            return self.state[self.get_prefixed_key(name, self.state)]

    def load(state: Mapping[str, Any]) -> Any:
        converter.convert_weights(backbone, Loader(state), config.to_dict())
        return [variable.value for variable in backbone.trainable_variables]

    def call(params: Any, given: Mapping[str, Any]) -> Any:
        rest = [variable.value for variable in backbone.non_trainable_variables]
        return backbone.stateless_call(params, rest, dict(given))[0]

    return getattr(library, f"{row['model']}Model")(config), call, load


def _ablanx(row: Mapping[str, Any]) -> Any:
    models = importlib.import_module("ablang2.models.ablang2.ablang")
    port = importlib.import_module("ablang_jax.model")
    vocabulary, width, heads, blocks, padding = row["config"]
    # the port's sizes are constants of its module, the width of its feed-forward layer a literal
    sizes = {
        "VOCAB": vocabulary,
        "HID": width,
        "N_HEAD": heads,
        "N_BLOCK": blocks,
        "HEAD_DIM": width // heads,
    }
    for name, value in sizes.items():
        setattr(port, name, value)

    class Hidden(nn.Module):
        """The encoder and what it returns last."""

        def __init__(self) -> None:
            super().__init__()
            self.AbRep = models.AbRep(
                *(vocabulary, width, heads, blocks, padding, padding + 1),
                a_fn="swiglu",
                dropout=0.0,
            )
            for block in self.AbRep.encoder_blocks:
                block.intermediate_layer[0] = nn.Linear(width, 3840)
                block.intermediate_layer[2] = nn.Linear(1920, width)

        def forward(self, input_ids: Any) -> Any:
            return self.AbRep(input_ids).last_hidden_states

    def call(params: Any, given: Mapping[str, Any]) -> Any:
        tokens = given["input_ids"]
        mask = (tokens != padding).astype(params["aa_embed_layer"]["embedding"].dtype)
        return port.Ablanx().apply({"params": params}, tokens, mask, return_attn=False)[0]

    return Hidden(), call, port.load_ablanx_params


# What equimo calls a part of a layer -> what transformers calls it.
_OF_DINOV2 = {
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "cls_token": "embeddings.cls_token",
    "global_pos_embed.weight": "embeddings.position_embeddings",
    "norm.": "layernorm.",
}
_OF_LAYER = {
    "prenorm.": "norm1.",
    "norm.": "norm2.",
    "attn.proj.": "attention.o_proj.",
    "mlp.": "mlp.",
    "ls1.gamma": "layer_scale1.lambda1",
    "ls2.gamma": "layer_scale2.lambda1",
}


def _equimo(row: Mapping[str, Any]) -> Any:
    equinox = importlib.import_module("equinox")
    library = importlib.import_module("transformers")
    models = importlib.import_module("equimo.models.vit")
    naming = importlib.import_module("equimo.conversion.utils")
    given = row["config"]
    config = library.Dinov2Config(**given, attn_implementation="eager")
    made = models.VisionTransformer(
        img_size=given["image_size"],
        in_channels=3,
        dim=given["hidden_size"],
        patch_size=given["patch_size"],
        num_heads=[given["num_attention_heads"]],
        depths=[given["num_hidden_layers"]],
        key=jax.random.key(0),
        reg_tokens=0,
        num_classes=0,
        **_named(row["jax_config"]),
    )
    arrays, rest = equinox.partition(equinox.nn.inference_mode(made), equinox.is_array)
    found, structure = jax.tree_util.tree_flatten_with_path(arrays)

    def one(name: str, state: Mapping[str, Any]) -> Any:
        layer = re.fullmatch(r"blocks\.0\.blocks\.(\d+)\.(.*)", name)
        table, start = (_OF_LAYER, "encoder.layer.") if layer else (_OF_DINOV2, "")
        before, own = (f"{start}{layer[1]}.", layer[2]) if layer else ("", name)
        if own.startswith("attn.qkv."):
            parts = [f"{before}attention.{part}_proj.{own[9:]}" for part in "qkv"]
            return np.concatenate([state[part] for part in parts])
        for theirs, mine in table.items():
            if own.startswith(theirs):
                return state[before + mine + own[len(theirs) :]]
        raise KeyError(name)

    def load(state: Mapping[str, Any]) -> Any:
        leaves = [
            np.reshape(one(naming.stringify_name(path), state), leaf.shape) for path, leaf in found
        ]
        return jax.tree.unflatten(structure, leaves)

    def call(params: Any, inputs: Mapping[str, Any]) -> Any:
        model = equinox.combine(params, rest)
        key = jax.random.key(0)
        features = jax.vmap(lambda image: model.features(image, key=key, inference=True))
        return {
            "last_hidden_state": jax.vmap(jax.vmap(model.norm))(features(inputs["pixel_values"]))
        }

    return library.Dinov2Model(config), call, load


def _jax_raft(row: Mapping[str, Any]) -> Any:
    _torchvision()
    raft = importlib.import_module("torchvision.models.optical_flow.raft")
    port = importlib.import_module("jax_raft.model")
    layers = row["config"]
    model = raft.FeatureEncoder(block=raft.ResidualBlock, layers=layers, norm_layer=nn.BatchNorm2d)
    made = port.FeatureEncoder(layers=tuple(layers))

    def load(state: Mapping[str, Any]) -> Any:
        # `scripts/convert_checkpoint.py` of the port, which is no part of its package
        parameters: dict[str, Any] = {}
        statistics: dict[str, Any] = {}
        for name, value in state.items():
            *path, own = [f"layers_{part}" if part.isdigit() else part for part in name.split(".")]
            if own == "num_batches_tracked":
                continue
            is_running = own.startswith("running_")
            tree = statistics if is_running else parameters
            for part in path:
                tree = tree.setdefault(part, {})
            tree[_raft_name(own, value)] = value.transpose(2, 3, 1, 0) if value.ndim == 4 else value
        return {"params": parameters, "batch_stats": statistics}

    def call(params: Any, given: Mapping[str, Any]) -> Any:
        image = given["x"].transpose(0, 2, 3, 1)
        train = row.get("train", False)
        mutable = ["batch_stats"] if train else []
        out, updated = made.apply(params, image, train=train, mutable=mutable)
        return [out.transpose(0, 3, 1, 2), *([updated] if train else [])]

    return model, call, load


def _raft_name(own: str, value: Any) -> str:
    if own == "weight":
        return "kernel" if value.ndim == 4 else "scale"
    return own.removeprefix("running_")


def _mamba2_jax(row: Mapping[str, Any]) -> Any:
    library = importlib.import_module("transformers")
    port = importlib.import_module("mamba2_jax.modeling")
    loading = importlib.import_module("mamba2_jax.params")
    nnx = importlib.import_module("flax.nnx")
    config = library.Mamba2Config(**row["config"], **row["torch_config"])
    made = port.Mamba2ForCausalLM(port.Mamba2Config(**row["config"]), rngs=nnx.Rngs(0))
    graph, _ = nnx.split(made)

    def load(state: Mapping[str, Any]) -> Any:
        # the port reads checkpoints of state-spaces/mamba, which has the singular
        theirs = {name.replace("embeddings", "embedding"): v for name, v in state.items()}
        loaded, _, _ = loading.load_pytorch_weights(made, theirs, dtype=None, strict=True)
        return nnx.split(loaded)[1]

    def call(params: Any, given: Mapping[str, Any]) -> Any:
        return nnx.merge(graph, params)(given["input_ids"])

    return library.Mamba2ForCausalLM(config), call, load


def _jaxlpips(row: Mapping[str, Any]) -> Any:
    _torchvision()
    lpips = importlib.import_module("lpips")
    port = importlib.import_module("jaxlpips.lpips")
    features = importlib.import_module("jaxlpips.modules")
    nnx = importlib.import_module("flax.nnx")
    model = lpips.LPIPS(pretrained=False, pnet_rand=True, pnet_tune=True, verbose=False)
    rows = [np.ones(width) for width in model.chns]
    # the port downloads its weights when it is made
    parts = features.AlexNetFeatures(rngs=nnx.Rngs(0)), nnx.List([nnx.Param(row) for row in rows])
    vars(port)["load_model"] = lambda name: parts
    graph, own = nnx.split(port.LPIPS())
    like = nnx.to_pure_dict(own)

    def load(state: Mapping[str, Any]) -> Any:
        convolutions = [name[: -len(".weight")] for name in state if name.endswith(".weight")]
        trunk = [name for name in convolutions if name.startswith("net.")]
        like["model"] = {
            f"conv{number}": {
                "kernel": state[f"{name}.weight"].transpose(2, 3, 1, 0),
                "bias": state[f"{name}.bias"],
            }
            for number, name in enumerate(trunk, 1)
        }
        like["linear_weights"] = {
            number: state[f"lin{number}.model.1.weight"].reshape(-1) for number in range(len(rows))
        }
        return dict(like)

    def call(params: Any, given: Mapping[str, Any]) -> Any:
        images = [given[name].transpose(0, 2, 3, 1) for name in ("in0", "in1")]
        return nnx.merge(graph, nnx.State(params))(*images)

    return model, call, load


BUILDERS: dict[str, Callable[..., Any]] = {
    "transformers": _transformers,
    "diffusers": _diffusers,
    "nnx": _nnx,
    "jaxonmodels": _jaxonmodels,
    "keras-hub": _keras_hub,
    "ablanx": _ablanx,
    "equimo": _equimo,
    "jax-raft": _jax_raft,
    "mamba2-jax": _mamba2_jax,
    "jaxlpips": _jaxlpips,
}
