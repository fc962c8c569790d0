"""A pair of models as its author describes it, and the same pair with other values in its
parameters.

Both sides compute in float64: what differs then is not rounding. The author's code runs with
float64 as torch's default dtype, so that tables that it computes are not rounded either.
"""

from __future__ import annotations

import dataclasses
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from gradcheck_suite.core.comparison import UNIT_ROUNDOFF
from gradcheck_suite.core.frames import Owner, owner_of
from gradcheck_suite.core.text import suggestion
from gradcheck_suite.errors import UsageError
from gradcheck_suite.run.environment import imported
from gradcheck_suite.run.modes import Mode

Array = npt.NDArray[Any]
State = dict[str, Array]
LOWER = tuple(name for name in UNIT_ROUNDOFF if name != "float64")
"""Names of the dtypes that are computed in float64."""
_LOW = (getattr(torch, name) for name in LOWER)
WIDE = dict.fromkeys(_LOW, torch.float64) | {torch.complex64: torch.complex128}
"""Lower dtypes, each with the one that takes its place."""
REQUIRED = ("module", "apply", "inputs")


@dataclass
class Port:
    """A torch module and the JAX model that is to be the same.

    Attributes:
        module: the torch module.
        apply: `apply(params, *inputs) -> array or pytree`, or a model of flax linen, flax nnx or
            Equinox.
        params: pytree of arrays, loaded from the module's state by the author's code; None for nnx
            and Equinox models.
        inputs: numpy arrays that both sides get, as tensors and as arrays.
        load: `load(state) -> params`; `state` has the names of `module.state_dict()` and numpy
            arrays.
        kwargs: further keyword arguments of the module.
        jax_kwargs: further keyword arguments of the JAX model, such as `{"deterministic": True}`.
        targets: further arguments of both losses.
        torch_loss: `loss(output, *targets) -> scalar`.
        jax_loss: likewise.
        torch_optimizer: `parameters -> torch.optim.Optimizer`.
        jax_optimizer: an `optax.GradientTransformation`.
        train: whether both are in train mode; running statistics are then compared.
        draw: a Hypothesis strategy of inputs, or `draw(seed) -> inputs`.
        sizes: that the pair is made for: None for all that torch takes, `"given"`, a function of
            the inputs that returns whether it is made for them, or a dict of axes of the first
            input, or (input, axis), with a size or a container of sizes.
        accept: names of causes that are intended.
        outputs: what is compared of an output, where not all of it is.
        rebuild: the function that made the pair, or None.
    """

    module: nn.Module
    apply: Any
    params: Any = None
    inputs: tuple[Any, ...] = ()
    load: Callable[..., Any] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    jax_kwargs: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[Any, ...] = ()
    torch_loss: Callable[..., Any] | None = None
    jax_loss: Callable[..., Any] | None = None
    torch_optimizer: Callable[..., Any] | None = None
    jax_optimizer: Any = None
    train: bool = False
    draw: Any = None
    sizes: Any = None
    accept: tuple[str, ...] = ()
    outputs: Callable[[Any], Any] | None = None
    rebuild: Callable[[], Any] | None = field(default=None, repr=False)


def as_port(given: Any, rebuild: Callable[[], Any] | None = None) -> tuple[Port, list[str]]:
    """Return the pair of what an author's function returned, in float64, and notes on what was
    ignored.

    Raises:
        UsageError: it is no pair, or a part of it is of a wrong kind.
    """
    notes: list[str] = []
    if isinstance(given, Mapping):
        given, notes = _of_dict(given)
    if not isinstance(given, Port):
        raise UsageError(
            "expected a gradcheck_suite.Port or a dict with the same names, got"
            f" {type(given).__name__}"
        )
    if not isinstance(given.module, nn.Module):
        raise UsageError(f"module: expected a torch.nn.Module, got {type(given.module).__name__}")
    if not callable(given.apply):
        raise UsageError(f"apply: expected a function or a model, got {type(given.apply).__name__}")
    pair = dataclasses.replace(
        given,
        inputs=_tuple(given.inputs),
        targets=_tuple(given.targets),
        accept=_tuple(given.accept),
        rebuild=rebuild,
    )
    # one of the two alone would be compared with nothing
    for what in ("loss", "optimizer"):
        if (getattr(pair, f"torch_{what}") is None) != (getattr(pair, f"jax_{what}") is None):
            raise UsageError(f"expected both torch_{what} and jax_{what}, or neither")
    to_double(pair.module)
    # the author's function may have left it in another mode, and JAX's side has none
    pair.module.train(pair.train)
    _expect_no_dropout(pair)
    return pair, notes


def _of_dict(given: Mapping[str, Any]) -> tuple[Port, list[str]]:
    """Return the pair that a dict describes, and notes on the keys that are not used."""
    known = [f.name for f in dataclasses.fields(Port) if f.name != "rebuild"]
    unused = [key for key in given if key not in known]
    lacking = [name for name in REQUIRED if name not in given]
    if lacking:
        lacks = "".join([f"no {lacking[0]!r}", *(f", but {key!r}" for key in unused)])
        raise UsageError(f"the pair has {lacks}: expected a Port or a dict with {', '.join(known)}")
    notes = [f"the key {key!r} is not used{suggestion(str(key), known)}" for key in unused]
    return Port(**{k: v for k, v in given.items() if k in known and v is not None}), notes


def _tuple(value: Any) -> tuple[Any, ...]:
    """Return a tuple of what an author gave as one or alone, with arrays of numpy in place of
    tensors.
    """
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return tuple(
        jax.tree.map(lambda x: x.numpy(force=True) if isinstance(x, torch.Tensor) else x, values)
    )


def _expect_no_dropout(pair: Port) -> None:
    # in eval mode dropout does nothing
    if not pair.train:
        return
    for name, part in pair.module.named_modules():
        # by the name, so that those of other libraries, such as timm's, count as well
        if "Dropout" in type(part).__name__ and getattr(part, "p", 0) > 0:
            raise UsageError(
                f"{name or 'the module'} is {part} in train mode, which no port repeats:"
                " expected p=0"
            )
        if isinstance(part, nn.MultiheadAttention | nn.RNNBase) and part.dropout > 0:
            raise UsageError(
                f"{name or 'the module'} has dropout={part.dropout} in train mode: expected 0"
            )


def to_double(module: nn.Module) -> None:
    """Convert a module's state, and tensors that it keeps without registering them, to float64."""
    # not `Module.double`, which leaves complex numbers of 32 bits as they are
    module._apply(lambda tensor: tensor.to(WIDE.get(tensor.dtype, tensor.dtype)))
    for part in module.modules():
        # a list, since an attribute that is set again may change the dict
        for name, value in list(vars(part).items()):
            if isinstance(value, torch.Tensor) and value.dtype in WIDE:
                setattr(part, name, value.to(WIDE[value.dtype]))


def without_low(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments with the wide dtype in place of a lower one."""
    return {k: WIDE.get(v, v) if k == "dtype" else v for k, v in kwargs.items()}


class _Lifting(Mode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **without_low(kwargs or {}))


@contextmanager
def default_dtype(dtype: torch.dtype = torch.float64) -> Iterator[None]:
    """Make a dtype torch's default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def float64_allowed() -> Iterator[None]:
    """Let the author's code make float64 tensors."""
    with default_dtype(), _Lifting():
        yield


# The JAX model, whatever library it is written in.


def library_of(model: Any) -> str:
    """Return `linen`, `nnx`, `equinox` or `function`."""
    for base in type(model).__mro__:
        # by the names of modules: a library that the port does not use is not imported
        for start, name in (("flax.linen", "linen"), ("flax.nnx", "nnx"), ("equinox", "equinox")):
            if base.__name__ == "Module" and base.__module__.startswith(start):
                return name
    return "function"


def is_float(leaf: Any) -> bool:
    """Return whether a leaf is an array of floating dtype."""
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def is_number(leaf: Any) -> bool:
    """Return whether a leaf is an array of numbers, not of random keys and not a function."""
    has_numbers = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    return has_numbers and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


class JaxModel:
    """The JAX model as a function of leaves.

    Attributes:
        paths: path of each leaf of the parameters.
        leaves: their values; what is no array of numbers stays as it is.
    """

    def __init__(self, pair: Port) -> None:
        self._model = pair.apply
        self._pair = pair
        self.library = library_of(pair.apply)
        self._has_module = "equinox" in (self.library, library_of(pair.params))
        self._graph: Any = None
        tree = self._tree(pair.params)
        found, self.structure = jax.tree_util.tree_flatten_with_path(tree)
        self.paths = [_path(keys) for keys, _ in found]
        self._complex = [hasattr(leaf, "dtype") and jnp.iscomplexobj(leaf) for _, leaf in found]
        self.leaves = [self._as_array(leaf) for _, leaf in found]
        if not any(map(is_float, self.leaves)):
            raise UsageError(
                "params: expected a pytree with arrays of floats, which a port has loaded from the"
                " module"
            )

    def _nnx(self) -> ModuleType:
        found = imported("flax.nnx")
        assert not isinstance(found, str), found
        return found

    def _tree(self, params: Any) -> Any:
        """Return the pytree of parameters that a model is called with."""
        if self.library == "nnx":
            nnx = self._nnx()
            self._graph, own = nnx.split(self._model)
            if params is None:
                return own
            return (
                nnx.split(params)[1]
                if isinstance(params, nnx.Module)
                else self._in_structure(params, own)
            )
        if library_of(params) == "nnx":
            return self._nnx().split(params)[1]
        if self.library == "equinox":
            # an Equinox model is a pytree of its own parameters, so `apply` alone may have them
            return self._model if params is None else self._in_structure(params, self._model)
        if params is None:
            raise UsageError("the pair has no 'params': expected a pytree of arrays")
        # the parameters alone: linen's `apply` wants them in their collection
        if self.library == "linen" and not (isinstance(params, Mapping) and "params" in params):
            return {"params": params}
        return params

    def _in_structure(self, given: Any, own: Any) -> Any:
        """Return a model's own tree with given arrays in place of its arrays.

        An activation stays where it is.
        """
        arrays, wanted = [
            [x for x in jax.tree.leaves(tree) if is_array(x)] for tree in (given, own)
        ]
        if len(arrays) != len(wanted):
            raise UsageError(
                f"params: expected {len(wanted)} arrays, as the model has, got {len(arrays)}"
            )
        # in the order of both trees, which is all that two structures have in common
        rest = iter(arrays)
        return jax.tree.map(lambda leaf: next(rest) if is_array(leaf) else leaf, own)

    def _as_array(self, leaf: Any) -> Any:
        """Return a leaf as an array: also a number, such as `float(state["scale"])`.

        Complex numbers as pairs. A number in a module of Equinox is a setting.
        """
        if hasattr(leaf, "dtype") and jnp.iscomplexobj(leaf):
            return np.stack([np.real(leaf), np.imag(leaf)], -1)
        return np.asarray(leaf) if isinstance(leaf, float) and not self._has_module else leaf

    def loaded(self, params: Any) -> list[Any]:
        """Return the leaves of parameters that the author's code has loaded."""
        leaves = list(map(self._as_array, jax.tree.leaves(self._tree(params))))
        if len(leaves) != len(self.leaves):
            raise UsageError(
                f"load: expected {len(self.leaves)} leaves, as params has, got {len(leaves)}"
            )
        return leaves

    def call(self, leaves: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return the output, and the leaves of what the model updates in training (running
        statistics).
        """
        leaves = [
            x[..., 0] + 1j * x[..., 1] if c else x
            for x, c in zip(leaves, self._complex, strict=True)
        ]
        params = jax.tree.unflatten(self.structure, leaves)
        how = self._pair.jax_kwargs
        if self.library == "linen":
            # all other collections, such as `batch_stats`, whatever their author has called them
            mutable = [name for name in params if name != "params"] if self._pair.train else []
            if not mutable:
                return self._model.apply(params, *inputs, **how), []
            out, updated = self._model.apply(
                params,
                *inputs,
                mutable=mutable,
                **how,
            )
            return out, jax.tree.leaves(updated)
        if self.library == "nnx":
            nnx = self._nnx()
            # a new model at each call: one that is called in train mode updates itself
            model = nnx.merge(self._graph, params)
            out = model(*inputs, **how)
            after = jax.tree.leaves(nnx.split(model)[1]) if self._pair.train else []
            return out, [
                a for a, b in zip(after, leaves, strict=False) if a is not b and is_float(a)
            ]
        if self.library == "equinox":
            return params(*inputs, **how), []
        return self._model(params, *inputs, **how), []


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array of JAX or numpy."""
    return isinstance(leaf, jax.Array | np.ndarray)


def _path(keys: Sequence[Any]) -> str:
    parts = [
        str(next(getattr(k, a) for a in ("key", "name", "idx") if hasattr(k, a))) for k in keys
    ]
    # flax nnx keeps an array as the attribute `value` of its variable; a module may have that name
    # as well
    is_variable = (
        parts[1:] and parts[-1] == "value" and isinstance(keys[-1], jax.tree_util.GetAttrKey)
    )
    return ".".join(parts[:-1] if is_variable else parts)


@dataclass(frozen=True)
class OutputArray:
    """One array of an output.

    Attributes:
        name: keys and fields that lead to it; empty where none does.
        value: the array.
    """

    name: str
    value: Any


def named_outputs(out: Any, name: str = "") -> list[OutputArray]:
    """Return the arrays of an output of either side: sequences in order, dicts by sorted keys,
    dataclasses by field.
    """
    if isinstance(out, torch.Tensor | jax.core.Tracer | np.generic) or is_array(out):
        return [OutputArray(name, out)]
    # settings that a model returns beside its arrays are no output
    if out is None or isinstance(out, str | bool | int | float):
        return []
    # a class of the author's that is registered as a pytree
    if not isinstance(out, Mapping | list | tuple) and not dataclasses.is_dataclass(out):
        return [OutputArray(name, leaf) for leaf in jax.tree.leaves(out) if leaf is not out]
    found = list[OutputArray]()
    for own, part in _parts_of(out):
        found += named_outputs(part, f"{name}.{own}".lstrip(".") if own else name)
    return found


def _parts_of(out: Any) -> list[tuple[str, Any]]:
    """Return the parts of an output with their names, without one those of a sequence."""
    if isinstance(out, Mapping):
        return [(str(key), out[key]) for key in sorted(out)]
    if isinstance(out, list | tuple):
        return [("", part) for part in out]
    return [(f.name, getattr(out, f.name)) for f in dataclasses.fields(out)]


def flat_output(out: Any) -> list[Any]:
    """Return the arrays of an output without their names."""
    return [leaf.value for leaf in named_outputs(out)]


# The module's state, and other values of it.


def state_of(module: nn.Module) -> State:
    """Return all entries of a module's state; tied names share one array.

    Floats are in float64, complex numbers pairs of them.
    """
    found: dict[Any, Array] = {}
    state: State = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            # tied parameters are one memory; an empty tensor has none
            key = (value.data_ptr() if value.numel() else id(value), tuple(value.shape))
            kept = value.detach().cpu()
            kept = torch.view_as_real(kept.resolve_conj()) if kept.is_complex() else kept
            array = (kept.double() if kept.is_floating_point() else kept).numpy()
            state[name] = found.setdefault(key, array.copy())
    return state


def shaped_as(value: Array, like: torch.Tensor) -> torch.Tensor:
    """Return an entry of a state as a tensor, complex where another one is."""
    found = torch.as_tensor(np.asarray(value))
    return torch.view_as_complex(found.contiguous()) if like.is_complex() else found


def set_state(module: nn.Module, state: State) -> None:
    """Write values into a module."""
    own = module.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, value in state.items():
            if isinstance(own.get(name), torch.Tensor):
                own[name].data.copy_(shaped_as(value, own[name]))


def is_statistic(name: str) -> bool:
    """Return whether a name is that of running statistics."""
    return name.rpartition(".")[2] in ("running_mean", "running_var")


def perturbable_names(module: nn.Module) -> set[str]:
    """Return the names of parameters and running statistics.

    Other buffers may be tables that a port computes.
    """
    # every name of a tied parameter, since a port may load any of them
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return parameters | {name for name in module.state_dict() if is_statistic(name)}


def may_be_moved(value: Array) -> bool:
    """Return whether a buffer may have other values: a mask or a table of positions may not."""
    # a mask of minus infinity stays a mask
    if not np.isfinite(value).all():
        return False
    return is_neutral(value) or bool((value != np.round(value)).any())


def is_neutral(value: Array) -> bool:
    """Return whether a buffer is zeros or ones, as a normalizer starts that has seen nothing."""
    return bool((value == 0).all() or (value == 1).all())


Draw = Callable[[Array, str], Array]


def perturbed(rng: np.random.Generator, much: float = 1.0) -> Draw:
    """Return a draw of values about a third of their size away: zero biases and unit scales stay so
    no longer.

    Args:
        rng: of the draw.
        much: factor of the distance.
    """

    def draw(value: Array, name: str) -> Array:
        # a variance stays positive, and away from 0, where its root has no digits
        if name.rpartition(".")[2] == "running_var":
            return np.abs(value) * rng.uniform(0.5, 1.5, value.shape) + 0.05
        size = float(np.sqrt(np.mean(value**2))) if value.size else 0.0
        noise = much * rng.normal(size=value.shape)
        small = size <= 1e-3  # layers that start at 1e-6 hide what is behind them, as zeros do
        if not small and _is_in_order(value):
            return _in_order(value, 0.3 * noise)
        # such as a scale or a variance, whose logarithm or root may be taken
        if value.size and value.min() > 0:
            return value + 0.2 * np.abs(noise) if small else value * np.exp(0.3 * noise)
        return value + (0.2 if small else 0.3 * size) * noise

    return draw


def _is_in_order(value: Array) -> bool:
    """Return whether numbers rise or fall, as edges of bins and schedules of noise do."""
    if value.ndim != 1 or value.size < 3:
        return False
    steps = np.diff(value)
    return bool((steps > 0).all() or (steps < 0).all())


def _in_order(value: Array, noise: Array) -> Array:
    """Return other numbers that rise where the given ones do, and stay between 0 and 1."""
    # such as the noise of a diffusion schedule: a power keeps a number between 0 and 1
    if value.min() > 0 and value.max() < 1:
        new = value ** np.exp(noise)
    else:
        new = value + noise * np.abs(np.diff(value)).mean()
    new = np.sort(new)
    return new if value[0] < value[-1] else new[::-1].copy()


def distinct_values(rng: np.random.Generator, high: bool) -> Draw:
    """Return a draw of distinct positive values, by which elements are told apart."""
    # the two draws do not overlap, so that no value of the one is among those of the other
    return lambda value, name: rng.uniform(0.5, 1.0, value.shape) + (0.75 if high else 0.0)


def representable(draw: Draw, leaves: Sequence[Any]) -> Draw:
    """Return a draw of values that a port does not round which keeps its parameters in 16 bits."""
    low = [leaf.dtype for leaf in leaves if is_float(leaf) and leaf.dtype.itemsize < 4]
    if not low:
        return draw
    # what the coarsest of them keeps, the others keep too, but for bfloat16 and float16 beside each
    # other
    coarsest = max(low, key=lambda dtype: float(jnp.finfo(dtype).eps))
    return lambda value, name: np.asarray(draw(value, name)).astype(coarsest).astype(np.float64)


def drawn_state(base: State, names: set[str], draw: Draw) -> State:
    """Return a state with drawn values for some names; tied names share them."""
    made: dict[int, Array] = {}
    for name, value in base.items():
        if id(value) not in made:
            chosen = name in names and value.dtype.kind == "f" and value.size
            made[id(value)] = np.asarray(draw(value, name), np.float64) if chosen else value
    return {name: made[id(value)].copy() for name, value in base.items()}


class _Writing(Mode):
    """Follows every write into a parameter by one of drawn values: whatever the author's code reads
    then has them.
    """

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self._draw = draw
        self._known: dict[int, tuple[torch.Tensor, str]] = {}

    def note(self, _: nn.Module, name: str, tensor: Any) -> None:
        """Follow what a module registers: a parameter, or a buffer of running statistics."""
        is_followed = isinstance(tensor, nn.Parameter) or is_statistic(name)
        if (
            is_followed
            and isinstance(tensor, torch.Tensor)
            and tensor.is_floating_point()
            and tensor.numel()
        ):
            key = tensor.untyped_storage().data_ptr()
            # by its storage: what writes to a view of the parameter writes to the parameter
            self._known[key] = (tensor.detach(), name)
            self._write(key)

    def _write(self, key: int) -> None:
        whole, name = self._known[key]
        # without this mode, which would see the write and write again
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            whole.copy_(torch.as_tensor(self._draw(whole.double().numpy(), name)).to(whole.dtype))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **without_low(kwargs or {}))
        if (
            func._schema.is_mutable
            and args
            and isinstance(args[0], torch.Tensor)
            and args[0].numel()
        ):
            key = args[0].untyped_storage().data_ptr()
            if key in self._known:
                self._write(key)
        return out


def built_again(pair: Port, draw: Draw) -> tuple[Port, State]:
    """Call the author's function again with drawn values in its module.

    Return the new pair and its state.
    """
    assert pair.rebuild is not None
    writing = _Writing(draw)
    hooks = nn.modules.module
    with (
        hooks.register_module_parameter_registration_hook(writing.note),
        hooks.register_module_buffer_registration_hook(writing.note),
        default_dtype(),
        writing,
    ):
        again, _ = as_port(pair.rebuild(), pair.rebuild)
    return again, state_of(again.module)


def call_user_code(side: str, call: Callable[[], Any], hint: str = "") -> Any:
    """Return what a call of the author's code returns.

    Args:
        side: whose code it is, as the message names it.
        call: of the code.
        hint: what to do, where an exception has one usual reason.

    Raises:
        UsageError: it raised; the message says where.
    """
    try:
        return call()
    except UsageError:
        raise
    except Exception as error:
        frames = [
            (frame.f_code.co_filename, line)
            for frame, line in traceback.walk_tb(error.__traceback__)
        ]
        place = f" at {line}" if (line := first_of_author(reversed(frames))) else ""
        # an error of JAX may have a page of text, of which the first line says what is wrong
        said = next(iter(str(error).strip().splitlines()), "")
        words = f"{side} raised {type(error).__name__}{place}: {said}"[:400]
        raise UsageError(f"{words}{f' ({hint})' if hint else ''}") from error


def is_author_file(name: str) -> bool:
    """Return whether a source file is the author's, or of a package of models: not of a framework,
    of Python, or of this package.
    """
    return owner_of(name) in (Owner.USER, Owner.LIBRARY)


def first_of_author(frames: Iterable[tuple[str, int | None]]) -> str:
    """Return `file:line` of the first of some frames that is the author's, or nothing."""
    return next(
        (f"{os.path.basename(file)}:{line}" for file, line in frames if is_author_file(file)), ""
    )
