"""Forward and backward passes of a running script, and sketches of the gradients that arrive."""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.modules import module as module_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import TensorWeakRef

from gradcheck_suite.auditing.losses import NOWHERE, Place, Received
from gradcheck_suite.core.comparison import FALSE_ALARM, FURTHER_ROUNDINGS, UNIT_ROUNDOFF

# Sketches of gradients: a few +-1 projections in float64, from which sums are compared without a copy of anything.
#
# The signs are products of a row sign and a column sign. One matrix-vector product contracts the rows of a gradient;
# its result is short, so the `PROJECTIONS` column signs cost next to nothing. The projections are functions of the
# logical shape alone: strides, sparsity and device do not matter. On a CPU numpy computes them, so that no autocast,
# dispatch mode or profiler of the user's program sees an operation.
#
# The bound. Let a sum of r arrivals a_j be computed in a dtype of unit roundoff u: its element i is off by e_i with
# |e_i| <= u * (the sum over j > 1 of |a_i1| + ... + |a_ij|), and a factor applied afterwards (clipping, unscaling)
# adds
# a few roundings (`FURTHER_ROUNDINGS`). The signs are independent of the e_i, so by Hoeffding's inequality the
# projection of e exceeds `SPREAD` times its 2-norm with probability `FALSE_ALARM`. The contraction of d rows,
# computed
# with unit roundoff v, is off by SPREAD * sqrt(d) * v times the norm with the same probability (Higham and Mary, as
# in
# `bounds`). W. Hoeffding, J. Amer. Stat. Assoc. 58 (1963), theorem 2; N. Alon, Y. Matias, M. Szegedy, J. Comput.
# Syst.
# Sci. 58 (1999), for the norm from the same projections.


Sketch = npt.NDArray[np.float64]
"""(PROJECTIONS + 1,): the projections and the squared 2-norm, estimated where the gradient is large."""

PROJECTIONS = 8
TILE = 4096
"""Columns are folded to this many before they are projected: the tables of signs take 0.35 MiB."""
SPREAD = math.sqrt(2 * math.log(2 / FALSE_ALARM))
_BLOCK = 1 << 17
"""Elements that are converted at once where BLAS does not know a dtype."""

_random = np.random.default_rng(20260101)
_COLUMNS = _random.choice([-1.0, 1.0], (PROJECTIONS, TILE))
_ROWS: dict[np.dtype[Any], npt.NDArray[Any]] = {np.dtype(np.float64): _random.choice([-1.0, 1.0], TILE)}
_ROWS[np.dtype(np.float32)] = _ROWS[np.dtype(np.float64)].astype(np.float32)
_ON_DEVICE: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
_NATIVE = (torch.float32, torch.float64)


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of the matrix whose rows are contracted: long vectors and narrow matrices are cut to `TILE`."""
    numel = math.prod(shape)
    rows = shape[0] if len(shape) > 1 else 1
    columns = numel // rows if rows else 0
    if columns >= 32 and columns <= 16 * TILE:
        return rows, columns
    return (numel // TILE, TILE) if numel > TILE else (1, numel)


def _contract(matrix: npt.NDArray[Any]) -> Sketch:
    """Return (columns,) float64: the sum of the rows with their signs."""
    rows, columns = matrix.shape
    if rows == 1:
        return matrix[0].astype(np.float64)
    signs = _ROWS[matrix.dtype]
    total = np.zeros(columns)
    for block, start in enumerate(range(0, rows, TILE)):
        part = matrix[start : start + TILE]
        total += signs[block % TILE] * np.dot(signs[: len(part)], part)
    return total


def _finish(columns: Sketch) -> Sketch:
    """Return the sketch of contracted columns: fold them to `TILE` and project."""
    norm = float(np.dot(columns, columns))
    if len(columns) > TILE:
        folds = -(-len(columns) // TILE)
        columns = np.pad(columns, (0, folds * TILE - len(columns))).reshape(folds, TILE)
        columns = _ROWS[np.dtype(np.float64)][:folds] @ columns
    result = np.empty(PROJECTIONS + 1)
    np.dot(_COLUMNS[:, : len(columns)], columns, out=result[:PROJECTIONS])
    result[PROJECTIONS] = norm
    return result


def _sparse(tensor: torch.Tensor) -> Sketch:
    """Return the sketch of a COO tensor of one sparse dimension; duplicates may be left, since a sketch is linear."""
    rows, columns = _matrix_shape(tuple(tensor.shape))
    if tensor.sparse_dim() != 1 or rows != tensor.shape[0] or tensor.dim() < 2:
        return as_array(sketch(tensor.to_dense()))
    indices = tensor._indices()[0].cpu().numpy()
    values = tensor._values().detach().to(torch.float64).cpu().numpy().reshape(len(indices), columns)
    table = _ROWS[np.dtype(np.float64)]
    return _finish((table[indices % TILE] * table[(indices // TILE) % TILE]) @ values)


def _blocks(tensor: torch.Tensor, rows: int, columns: int) -> Sketch:
    """Contract a tensor whose dtype BLAS does not know, converted a few rows at a time."""
    matrix = tensor.reshape(rows, columns)
    total, table = np.zeros(columns), _ROWS[np.dtype(np.float64)]
    step = max(1, min(TILE, _BLOCK // max(columns, 1)))
    for start in range(0, rows, step):
        part = matrix[start : start + step].to(torch.float32).numpy()
        index = np.arange(start, start + len(part))
        signs = table[index % TILE] * table[(index // TILE) % TILE] if rows > 1 else np.ones(1)
        total += signs.astype(np.float32) @ part
    return total


def _on_device(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the sketch as a tensor on the gradient's device, where nothing waits for it."""
    if tensor.device not in _ON_DEVICE:
        _ON_DEVICE[tensor.device] = (
            torch.from_numpy(_ROWS[np.dtype(np.float64)]).to(tensor.device),
            torch.from_numpy(_COLUMNS).to(tensor.device),
        )
    table, signs = _ON_DEVICE[tensor.device]
    matrix = tensor.reshape(rows, columns)
    with torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
        if tensor.dtype not in _NATIVE:
            matrix = matrix.to(torch.float32)
        index = torch.arange(rows, device=tensor.device)
        row_signs = table[index % TILE] * table[(index // TILE) % TILE] if rows > 1 else table.new_ones(1)
        total = torch.mv(matrix.t(), row_signs.to(matrix.dtype)).to(torch.float64)
        norm = torch.dot(total, total)
        if columns > TILE:
            folds = -(-columns // TILE)
            total = torch.nn.functional.pad(total, (0, folds * TILE - columns)).reshape(folds, TILE)
            total = table[:folds] @ total
        return torch.cat([signs[:, : len(total)] @ total, norm[None]])


def sketch(tensor: torch.Tensor) -> Sketch | torch.Tensor:
    """Return the sketch of a gradient: (PROJECTIONS + 1,) float64, a tensor where the gradient is not on the CPU."""
    with np.errstate(all="ignore"):
        return _sketch(tensor.detach())


def _sketch(tensor: torch.Tensor) -> Sketch | torch.Tensor:
    if tensor.layout == torch.sparse_coo:
        return _sparse(tensor)
    numel = tensor.numel()
    if numel == 0:
        return np.zeros(PROJECTIONS + 1)
    rows, columns = _matrix_shape(tuple(tensor.shape))
    rest = numel - rows * columns
    if rest:
        # a long vector whose length is no multiple of TILE
        flat = tensor.reshape(-1)
        head, tail = _sketch(flat[: rows * columns]), _sketch(flat[rows * columns :])
        return head + tail
    if tensor.device.type != "cpu":
        return _on_device(tensor, rows, columns)
    if tensor.dtype not in _NATIVE:
        return _finish(_blocks(tensor, rows, columns))
    return _finish(_contract(tensor.numpy().reshape(rows, columns)))


def as_array(value: Sketch | torch.Tensor) -> Sketch:
    """Return a sketch as an array; waits for the device."""
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else value


def tolerance(norms: npt.NDArray[np.float64], shape: tuple[int, ...], dtype: str) -> float:
    """Return the largest difference of a projection that the rounding of a sum explains.

    Args:
        norms: (r,), 2-norms of what was added up, in this order.
        shape: of the parameter.
        dtype: the coarsest dtype of the sum.
    """
    # the first arrival is stored as it is; each further one is rounded with the sum so far
    adding = UNIT_ROUNDOFF[dtype] * float(norms.cumsum()[1:].sum())
    return SPREAD * adding + _contraction(float(norms.sum()), shape, dtype)


def resolution(norm: float, shape: tuple[int, ...], dtype: str) -> float:
    """Return the largest difference of a projection that the rounding of a gradient of some 2-norm explains."""
    return SPREAD * UNIT_ROUNDOFF[dtype] * FURTHER_ROUNDINGS * norm + _contraction(norm, shape, dtype)


def _contraction(norm: float, shape: tuple[int, ...], dtype: str) -> float:
    rows, _ = _matrix_shape(shape)
    unit = UNIT_ROUNDOFF["float64" if dtype == "float64" else "float32"]
    return SPREAD * unit * math.sqrt(rows + FURTHER_ROUNDINGS) * norm


# Calls of the user's modules that lead to a loss: what is needed to compute a window again.
#
# A call is recorded where no other recorded call surrounds it. Its inputs are kept by reference and the gradient of
# each of its outputs by a hook, so that the user's code between a module and a loss need not run again.


TRANSPARENT = ("DistributedDataParallel", "DataParallel")
"""Wrappers whose inner module is recorded instead: to call them again would start a collective."""


@dataclass(eq=False)
class Forward:
    """One call of a module.

    Attributes:
        module: that was called.
        arguments: flat positional and keyword arguments; tensors are detached and share their storage.
        structure: how `arguments` are put together.
        versions: `_version` of each tensor of `arguments` when the module was called, -1 for other values.
        needs_gradient: whether each of `arguments` required a gradient.
        random: states of the random number generators.
        modes: `training` of each submodule.
        autocast: device type, dtype, and whether autocast was on.
        point: fingerprint of the module's parameters.
        compiled: whether the module is compiled.
        outputs: sketch of each output tensor; None for other outputs and for tensors without a gradient.
        scalars: which outputs have no dimension.
    """

    module: torch.nn.Module
    arguments: list[Any]
    structure: Any
    versions: list[int]
    needs_gradient: list[bool]
    random: RandomState
    modes: tuple[bool, ...]
    autocast: tuple[str, torch.dtype, bool]
    point: tuple[Any, ...]
    compiled: bool = False
    outputs: list[Sketch | torch.Tensor | None] = field(default_factory=list)
    scalars: list[bool] = field(default_factory=list)

    @property
    def changed(self) -> bool:
        """Whether an argument was changed in place since the call."""
        return any(
            value._version != version
            for value, version in zip(self.arguments, self.versions, strict=True)
            if isinstance(value, torch.Tensor)
        )


@dataclass(frozen=True)
class RandomState:
    """The states of the generators of torch (CPU and GPUs), numpy and Python."""

    cpu: torch.Tensor
    devices: tuple[torch.Tensor, ...]
    numpy: Any
    python: Any

    @staticmethod
    def now() -> RandomState:
        """Return the present states."""
        used = torch.cuda.is_available() and torch.cuda.is_initialized()
        devices = tuple(torch.cuda.get_rng_state_all()) if used else ()
        return RandomState(torch.get_rng_state(), devices, np.random.get_state(), random.getstate())

    def set(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.cpu)
        if self.devices:
            torch.cuda.set_rng_state_all(list(self.devices))
        np.random.set_state(self.numpy)
        random.setstate(self.python)


def point_of(module: torch.nn.Module) -> tuple[Any, ...]:
    """Return what changes when something writes to a module's parameters: versions, addresses and a few values."""
    parameters = list(module.parameters())
    sample = [p.detach() for p in parameters[:8] if p.device.type == "cpu" and p.numel() and p.layout == torch.strided]
    values = tuple(float(p.as_strided((), ())) for p in sample)
    return sum(p._version for p in parameters), sum(p.data_ptr() for p in parameters), values


def _autocast(module: torch.nn.Module) -> tuple[str, torch.dtype, bool]:
    device = next((p.device.type for p in module.parameters()), "cpu")
    return device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)


class Forwards:
    """Records the calls of modules while `wanted()` says so.

    Attributes:
        copies: whether inputs are copied, since the program changes them in place.
    """

    def __init__(
        self,
        wanted: Callable[[], bool],
        receive: Callable[[Forward, int, torch.Tensor], None],
        guarded: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self.copies = False
        self._wanted, self._receive, self._guarded = wanted, receive, guarded
        self._surrounding: torch.nn.Module | None = None
        self._begun: tuple[Any, ...] | None = None
        self._handles: list[Any] = []

    def open(self) -> None:
        """Watch the calls of modules."""
        others = bool(module_hooks._has_any_global_hook())
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, with_kwargs=True),
        ]
        # a compiled module asks for it, and would warn of our hooks (torch/_dynamo/eval_frame.py, no issue known)
        self._asked, module_hooks._has_any_global_hook = module_hooks._has_any_global_hook, lambda: others

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
            # torch 2.13.0 leaves this entry behind (torch/nn/modules/module.py, no issue known)
            module_hooks._global_forward_hooks_with_kwargs.pop(handle.id, None)
        if self._handles:
            module_hooks._has_any_global_hook = self._asked
        self._handles = []

    def reset(self) -> None:
        """Forget a call that has not returned."""
        self._surrounding = self._begun = None

    def _before(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or self._surrounding not in (None, module) or not self._wanted():
            return
        if type(module).__name__ in TRANSPARENT or not torch.is_grad_enabled():
            return
        if torch._C._current_graph_task_id() != -1 or torch._C._functorch.peek_interpreter_stack() is not None:
            return
        if not any(p.requires_grad for p in module.parameters()):
            return
        with self._guarded("a call of a module"):
            self._surrounding = module
            modes = tuple(part.training for part in module.modules())
            self._begun = arguments, RandomState.now(), modes, _autocast(module), point_of(module)

    def _after(self, module: torch.nn.Module, _: Any, keywords: dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling() or module is not self._surrounding:
            return
        begun = self._begun
        self.reset()
        if begun is not None:
            with self._guarded("a call of a module"):
                self._record(module, begun, keywords, output)

    def _record(self, module: torch.nn.Module, begun: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        arguments, random_state, modes, autocast, point = begun
        values, structure = pytree.tree_flatten((arguments, keywords))
        kept = [self._kept(value) for value in values]
        forward = Forward(
            module=module,
            arguments=kept,
            structure=structure,
            versions=[value._version if isinstance(value, torch.Tensor) else -1 for value in kept],
            needs_gradient=[isinstance(value, torch.Tensor) and value.requires_grad for value in values],
            random=random_state,
            modes=modes,
            autocast=autocast,
            point=point,
            compiled=hasattr(module, "_orig_mod"),
        )
        for index, tensor in enumerate(differentiable(output)):
            forward.outputs.append(sketch(tensor))
            forward.scalars.append(tensor.dim() == 0)
            tensor.register_hook(self._hook(forward, index))

    def _kept(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().clone() if self.copies else value.detach()

    def _hook(self, forward: Forward, index: int) -> Callable[[torch.Tensor], None]:
        @unserializable_hook  # type: ignore[untyped-decorator]
        def hook(cotangent: torch.Tensor) -> None:
            self._receive(forward, index, cotangent.detach())

        return hook


def leaves_of(output: Any) -> list[Any]:
    """Return the leaves of a module's output, which may be an object with attributes."""
    leaves: list[Any] = output if isinstance(output, list) else pytree.tree_leaves(output)
    if len(leaves) == 1 and hasattr(leaves[0], "__dict__") and not isinstance(leaves[0], torch.Tensor):
        leaves = pytree.tree_leaves(dict(vars(leaves[0])))
    return leaves


def is_differentiable(leaf: Any) -> bool:
    """Whether a gradient may come through a leaf of a module's output."""
    return type(leaf) is torch.Tensor and leaf.grad_fn is not None


def differentiable(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a module's output through which a gradient may come."""
    return [leaf for leaf in leaves_of(output) if is_differentiable(leaf)]


# Backward passes, the gradients that arrive at parameters in them, and the optimizers that wait for them.


MAX_PENDING = 1024
"""Backward passes without a step that are remembered for one optimizer."""


@dataclass(eq=False)
class Pass:
    """One backward pass, from the outermost call of backward to its return.

    Attributes:
        number: counts passes of the whole run, from 0.
        place: of the call of backward.
        accumulates: False for `torch.autograd.grad`, which leaves `.grad` alone.
        received: the cotangents that calls of losses received.
        arrivals: id of each parameter -> sketch of what arrived, after the user's hooks.
        after: id of each parameter -> sketch of its `.grad` when the pass had ended; kept for few windows.
        held: id of each parameter -> its `.grad` when the pass had ended, weakly; kept where `after` is.
        edited: names of edits of user hooks: id of a parameter -> whether its elements got fixed factors.
        consumers: ids of the optimizers that have stepped on the pass.
        clips: factors of gradient clipping since the pass, as (parameter ids, total norm, largest norm).
        versions: id of an optimizer -> fingerprint of its parameters when the pass began.
        forwards: recorded calls of modules -> index of an output -> the gradient that it received.
        trained: id of an optimizer -> number of its step that had the pass in its gradient.
        steps: number of steps of all optimizers before the pass.
        unknown: the name of the autograd node of a loss that no recognised call is part of, or None.
    """

    number: int
    place: Place = NOWHERE
    accumulates: bool = True
    received: list[Received] = field(default_factory=list)
    arrivals: dict[int, Sketch | torch.Tensor] = field(default_factory=dict)
    after: dict[int, Sketch | torch.Tensor] = field(default_factory=dict)
    held: dict[int, TensorWeakRef] = field(default_factory=dict)
    edited: dict[int, bool] = field(default_factory=dict)
    consumers: set[int] = field(default_factory=set)
    clips: list[tuple[frozenset[int], Any, float]] = field(default_factory=list)
    versions: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    trained: dict[int, int] = field(default_factory=dict)
    steps: int = 0
    unknown: str | None = None
    forwards: dict[Forward, dict[int, torch.Tensor]] = field(default_factory=dict)


@dataclass(eq=False)
class Watched:
    """One optimizer and the backward passes since its last step.

    Attributes:
        optimizer: a weak reference to it.
        parameters: id -> the parameter, weakly.
        pending: passes in which something arrived at one of its parameters.
        previous: id of each parameter -> sketch of `.grad` at the last step, or when the watch began.
        steps: number of its steps.
        names: id of each parameter -> its name; empty until one is asked for.
        detail: whether `.grad` is sketched at the end of each backward pass.
        overflown: whether passes were forgotten, so that the window cannot be judged.
        late: whether the optimizer was found at its first step.
        measure: whether the next window is computed again, since the size of a violation is not known.
        stepping: whether its `step()` runs.
        in_closure: whether the closure of its `step()` runs.
    """

    optimizer: weakref.ref[torch.optim.Optimizer]
    parameters: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    pending: list[Pass] = field(default_factory=list)
    previous: dict[int, Sketch | torch.Tensor] = field(default_factory=dict)
    steps: int = 0
    names: dict[int, str] = field(default_factory=dict)
    detail: bool = True
    overflown: bool = False
    late: bool = False
    measure: bool = False
    stepping: bool = False
    in_closure: bool = False

    def add(self, backward: Pass) -> None:
        """Note a pass in which something arrived at one of the parameters."""
        if self.pending and self.pending[-1] is backward:
            return
        self.pending.append(backward)
        backward.versions[id(self)] = self.fingerprint()
        if len(self.pending) > MAX_PENDING:
            del self.pending[0]
            self.overflown = True

    def missing(self) -> str | None:
        """Return why not all passes since the last step are recorded; None where they are."""
        if self.overflown:
            return f"more than {MAX_PENDING} backward passes came before it, and the first of them were not kept"
        if self.late:
            return "the audit found its optimizer only at that step, and had recorded no backward pass for it"
        return None

    def live(self) -> Iterable[tuple[int, torch.Tensor]]:
        """Yield the id and the parameter, for those that still exist."""
        for key, reference in self.parameters.items():
            parameter = reference()
            if parameter is not None:
                yield key, parameter

    def fingerprint(self) -> tuple[Any, ...]:
        """Return what changes when something writes to the parameters."""
        parameters = [p for _, p in self.live()]
        sample = [p.detach() for p in parameters[:8] if p.device.type == "cpu" and p.numel()]
        values = tuple(float(p.as_strided((), ())) for p in sample if p.layout == torch.strided)
        return sum(p._version for p in parameters), sum(p.data_ptr() for p in parameters), values

    def replaced(self) -> bool:
        """Whether each `.grad` is another tensor than the last backward pass left; False where that was not noted."""
        held = self.pending[-1].held if self.pending else {}
        both = [(held[key](), p.grad) for key, p in self.live() if key in held and p.grad is not None]
        return bool(both) and all(then is not now for then, now in both)

    def gradients(self) -> dict[int, Sketch]:
        """Return the sketch of each parameter's `.grad`, zeros for None."""
        found = {key: sketch(p.grad) for key, p in self.live() if p.grad is not None and supported(p.grad)}
        return {key: as_array(value) for key, value in found.items()}


def supported(gradient: torch.Tensor) -> bool:
    """Whether a gradient can be sketched: a plain real tensor, dense or COO, on a device with float64."""
    return (
        type(gradient) in (torch.Tensor, torch.nn.Parameter)
        and gradient.is_floating_point()
        and gradient.layout in (torch.strided, torch.sparse_coo)
        and gradient.device.type in ("cpu", "cuda")
    )


class Gate:
    """The hooks on one parameter: the first sees what arrives, the last what the user's hooks made of it.

    Hooks run in the order of the dictionary that holds them. Where the user has hooks on the parameter, ours are moved
    to both ends of it before a backward pass.
    """

    def __init__(self, parameter: torch.Tensor, run: Any) -> None:
        self.parameter = weakref.ref(parameter)
        self.owners: list[Watched] = []
        self._run, self._key = run, id(parameter)
        self._ratio: torch.Tensor | None = None
        self._raw: torch.Tensor | None = None
        self._last: torch.utils.hooks.RemovableHandle | None = None
        self._first = parameter.register_hook(self._arrive)

    def arrange(self) -> None:
        """Put the hooks at both ends where the user has hooks of his own."""
        parameter = self.parameter()
        if parameter is None or not (hooks := parameter._backward_hooks) or len(hooks) == 1:
            return
        if self._last is None:
            self._last = parameter.register_hook(self._settle)
        order = [key for key in hooks if key not in (self._first.id, self._last.id)]
        order = [self._first.id, *order, self._last.id]
        if list(hooks) != order:
            items = [(key, hooks[key]) for key in order if key in hooks]
            hooks.clear()
            for key, value in items:
                hooks[key] = value

    @unserializable_hook  # type: ignore[untyped-decorator]
    def _arrive(self, gradient: torch.Tensor) -> None:
        backward = self._run.current_pass()
        if backward is None:
            return
        for owner in self.owners:
            owner.add(backward)
        if not supported(gradient):
            self._run.note_unsupported(gradient)
            return
        if self._last is not None:
            self._raw = gradient.detach().clone()
        else:
            self._add(backward, gradient)

    @unserializable_hook  # type: ignore[untyped-decorator]
    def _settle(self, gradient: torch.Tensor) -> None:
        backward, raw, self._raw = self._run.current_pass(), self._raw, None
        if backward is None or raw is None or not supported(gradient):
            return
        self._add(backward, gradient)
        final = gradient.detach()
        if raw.layout == torch.strided and final.shape == raw.shape and not torch.equal(final, raw):
            ratio = torch.where(raw != 0, final / raw, torch.nan)
            fixed = True
            if self._ratio is not None:
                both = ~(ratio.isnan() | self._ratio.isnan())
                fixed = torch.allclose(ratio[both], self._ratio[both], rtol=1e-3 if ratio.element_size() > 2 else 2e-2)
            self._ratio = ratio
            backward.edited[self._key] = fixed

    def _add(self, backward: Pass, gradient: torch.Tensor) -> None:
        found = sketch(gradient)
        before = backward.arrivals.get(self._key)
        # several arrivals in one pass come from nested passes; the norms of parts bound the norm of the sum
        backward.arrivals[self._key] = found if before is None else before + found

    def close(self) -> None:
        """Remove the hooks."""
        self._first.remove()
        if self._last is not None:
            self._last.remove()


def is_finite(value: Sketch) -> bool:
    """Whether what was sketched is finite."""
    return bool(np.isfinite(value).all())
