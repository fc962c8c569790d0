"""A torch module as a program: the operations below autograd, which can be run again with changes.

Running it again goes through autograd, so that a changed program has the right gradient, and runs
none of the user's Python. Operations that autograd itself adds are dropped: no result needs them.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from gradcheck_suite.port.own_functions import (
    CHECKPOINTED,
    FunctionArguments,
    OwnFunction,
    watched_calls,
)
from gradcheck_suite.port.pair import default_dtype, first_of_author, flat_output, without_low
from gradcheck_suite.run.modes import Mode

LOSS = "loss"
"""The place of what the loss computes."""


@dataclass(frozen=True)
class Ref:
    """A tensor of a program.

    Attributes:
        kind: `state`, `input`, `target` or `constant`, or the index of the call that returns it.
        index: name in the state, place among those of its kind, or place among the call's results.
    """

    kind: Any
    index: Any


FILLED = frozenset([Ref, list, tuple, dict])
"""Types of arguments that are, or may have, references."""


def with_tensors(template: Any, get: Callable[[Ref], Any]) -> Any:
    """Return arguments with tensors in place of references."""
    kind = type(template)
    if kind is Ref:
        return get(template)
    if kind is list or kind is tuple:
        return kind(
            [with_tensors(part, get) if type(part) in FILLED else part for part in template]
        )
    return {k: with_tensors(v, get) for k, v in template.items()} if kind is dict else template


def flat(out: Any) -> list[Any]:
    """Return the results of an operation as a list."""
    if type(out) not in (list, tuple):
        return [out]
    return list(chain.from_iterable(map(flat, out)))


def _refs(template: Any) -> Iterator[Ref]:
    if isinstance(template, Ref):
        yield template
    elif type(template) is dict:
        yield from _refs(list(template.values()))
    elif type(template) in (list, tuple):
        for part in template:
            yield from _refs(part)


LABELS = {
    "addmm": "linear",
    "mm": "matmul",
    "bmm": "matmul",
    "baddbmm": "matmul",
    "clamp_min": "clamp(min=...)",
    "clamp_max": "clamp(max=...)",
    "constant_pad_nd": "pad",
    "unsafe_view": "view",
    "convolution": "conv",
    "convolution_overrideable": "conv",
    "max_pool2d_with_indices": "max_pool2d",
    "max_pool3d_with_indices": "max_pool3d",
    "nll_loss_forward": "nll_loss",
    "nll_loss2d_forward": "nll_loss",
    "rsub": "sub",
    "to_copy": "to",
    "linalg_vector_norm": "norm",
    "index": "indexing",
    "index_put": "assignment by index",
    "batch_norm_legit": "batch_norm",
    "batch_norm_legit_no_training": "batch_norm",
    "weight_norm_interface": "weight_norm",
    "fft_r2c": "rfft",
    "fft_c2r": "irfft",
    "fft_c2c": "fft",
    "upsample_nearest1d": "interpolate",
    "upsample_nearest2d": "interpolate",
    "upsample_linear1d": "interpolate",
    "upsample_bilinear2d": "interpolate",
    "upsample_bicubic2d": "interpolate",
    "upsample_trilinear3d": "interpolate",
}
"""ATen's name -> the name in torch's documents, where they differ."""


@dataclass
class OperationCall:
    """One operation.

    Attributes:
        op: the overload of ATen.
        args: with `Ref` in place of tensors that have an origin.
        kwargs: likewise.
        path: of the module that calls it, or `LOSS`; None outside of both.
        where: `file:line` of the author's code.
        grad: whether autograd was on.
        written: results of calls that have written into the memory of an argument since it was
            made.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    path: str | None
    where: str
    grad: bool
    outs: list[Any] = field(default_factory=list, repr=False)
    written: list[Ref] = field(default_factory=list)

    @cached_property
    def name(self) -> str:
        """Name without overload, such as `add`."""
        return str(self.op._schema.name).split("::")[-1]

    @cached_property
    def label(self) -> str:
        """What an author of torch code calls it, such as `linear` for ATen's `addmm`."""
        plain = self.name.strip("_").removeprefix("native_")
        return LABELS.get(plain, plain)

    @cached_property
    def refs(self) -> list[Ref]:
        """The tensors that it reads."""
        return [*_refs((self.args, self.kwargs)), *self.written]

    @cached_property
    def names(self) -> list[str]:
        """Names of its arguments."""
        return [a.name for a in self.op._schema.arguments]

    @property
    def mutates(self) -> bool:
        """Whether it writes into an argument."""
        return bool(self.op._schema.is_mutable)


def _key(tensor: torch.Tensor) -> Any:
    memory = tensor.untyped_storage().data_ptr()
    return memory, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one storage share elements."""
    # strides may leave gaps, so that two tensors may lie within each other and share nothing: the
    # elements are drawn and compared
    size = a.untyped_storage().nbytes() // min(a.element_size(), b.element_size())
    first = torch.zeros(size, dtype=torch.bool)
    first.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(first.as_strided(b.shape, b.stride(), b.storage_offset()).any())


class _OperationRecorder(Mode):
    """Records operations with the module and the line that call them.

    Autograd makes another Python object for a view, so that a tensor that is not known by its
    identity is looked up by its storage, offset, shape and strides.
    """

    def __init__(self, leaves: Mapping[Any, torch.Tensor]) -> None:
        super().__init__()
        self.calls: list[OperationCall] = []
        self.stack: list[str] = []
        self._ids: dict[int, Ref] = {}
        self._keys: dict[Any, Ref] = {}
        self._kept: list[Any] = []
        self._writes: dict[int, list[int]] = {}
        self.constants: dict[Any, torch.Tensor] = {}
        self.asked: Any = None
        self.before_each: Callable[[], None] = lambda: None
        for (kind, index), tensor in leaves.items():
            self._note(tensor, Ref(kind, index))

    def _note(self, tensor: torch.Tensor, ref: Ref, keyed: bool = True) -> None:
        # an id is one as long as its object is alive
        self._kept.append(tensor)
        self._ids[id(tensor)] = ref
        if keyed and tensor.numel():
            self._keys[_key(tensor)] = ref

    def ref(self, tensor: torch.Tensor) -> Any:
        """Return the reference of a tensor.

        One from elsewhere, as of a buffer that is not saved, is a constant.
        """
        found = self._ids.get(id(tensor))
        # a tensor without elements has no address: all of one shape would be taken for one
        if found is None and tensor.numel():
            found = self._keys.get(_key(tensor))
        if found is None:
            found = Ref("constant", len(self.constants))
            self.constants["constant", found.index] = tensor.detach().clone()
            self._note(tensor, found)
        return found

    def writers(self, tensor: torch.Tensor, ref: Any) -> list[Ref]:
        """Return the calls that wrote into a tensor's memory after the call that made it."""
        if not isinstance(ref, Ref) or not tensor.numel():
            return []
        since = ref.kind if isinstance(ref.kind, int) else -1  # state and inputs come first of all
        later = [i for i in self._writes.get(tensor.untyped_storage().data_ptr(), []) if i > since]
        return [Ref(i, 0) for i in later if _overlap(tensor, self.calls[i].outs[0])]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.before_each()
        # a cast to float32 that the author wrote would round: the program is judged in float64
        kwargs = without_low(kwargs or {})
        written = self._written((args, kwargs))
        template = pytree.tree_map_only(torch.Tensor, self.ref, (args, kwargs))
        out = func(*args, **kwargs)
        if func is torch.ops.aten.detach.default and isinstance(template[0][0], Ref):
            in_backward = sys._getframe(1).f_code.co_name == _ENGINE
            if self._is_no_call(template[0][0], in_backward=in_backward):
                self._note(out, template[0][0], keyed=False)
                return out
        call = OperationCall(
            func,
            template[0],
            template[1],
            self.stack[-1] if self.stack else None,
            _line(),
            torch.is_grad_enabled(),
            flat(out),
            written,
        )
        self.calls.append(call)
        self._note_results(call)
        return out

    def function(self, kind: Any, given: FunctionArguments) -> Callable[[Any], Any]:
        """Record a call of a Function of the author's, whose backward is its own.

        Return what notes its results.
        """
        # asked before the call, which may write into its arguments
        refs = [self.ref(tensor) for tensor in given.tensors]
        start = len(self.calls)
        # the results may be noted later, when another module's operation begins
        path = self.stack[-1] if self.stack else None
        where = _line()

        def end(out: Any) -> Any:
            # a reentrant checkpoint runs without autograd, and once more with it in the backward
            if kind.__name__ == CHECKPOINTED:
                for call in self.calls[start:]:
                    call.grad = True
                return out
            # what is written in place stays what it is
            written = {id(tensor) for tensor in given.tensors}
            for number, result in enumerate(flat(out)):
                is_new = isinstance(result, torch.Tensor) and id(result) not in written
                if is_new and result.requires_grad:
                    arguments = (self.ref(result), *refs)
                    own = OwnFunction(kind, given, number, start)
                    call = OperationCall(own, arguments, {}, path, where, grad=True, outs=[result])
                    self.calls.append(call)
                    self._note(result, Ref(len(self.calls) - 1, 0))
            return out

        return end

    def _written(self, arguments: Any) -> list[Ref]:
        """Return the calls that wrote into the memory of arguments since they were made."""
        found = list[Ref]()
        if self._writes:
            for value in pytree.tree_leaves(arguments):
                if isinstance(value, torch.Tensor):
                    found += self.writers(value, self.ref(value))
        return found

    def _is_no_call(self, before: Ref, *, in_backward: bool) -> bool:
        """Return whether a `detach` is torch's own.

        torch 2.9 makes two calls of one `detach()`; autograd detaches a result that it saves, and a
        gradient that is computed in the forward, as of a force, reads it.

        Args:
            before: what is detached.
            in_backward: whether autograd's engine calls it.
        """
        if not isinstance(before.kind, int):
            return False
        is_second = self.calls[before.kind].op is torch.ops.aten.detach.default
        is_saved = _saves_its_result(self.asked, before.kind, len(self.calls))
        return is_second or in_backward or is_saved

    def _note_results(self, call: OperationCall) -> None:
        """Note the results of the last call."""
        index = len(self.calls) - 1
        first = call.outs[0] if call.outs else None
        # from here on, the memory stands for the result of this call
        if call.mutates and isinstance(first, torch.Tensor) and first.numel():
            self._writes.setdefault(first.untyped_storage().data_ptr(), []).append(index)
            # an in-place operation returns its own argument: what reads it later reads this call
            self._ids.pop(id(first), None)
            self._keys[_key(first)] = Ref(index, 0)
        for j, tensor in enumerate(call.outs):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in self._ids:
                # autograd detaches what it saves: the key stays that of the tensor itself
                is_alias = call.name in ("detach", "alias") and tensor.numel() > 0
                again = is_alias and _key(tensor) in self._keys
                self._note(tensor, Ref(index, j), keyed=not again)


_ENGINE = "_engine_run_backward"
"""The function of torch that has no line of Python between itself and the backward of an operation."""


def _saves_its_result(asked: Any, made_by: int, index: int) -> bool:
    """Return whether a call of `detach` is autograd's, made while the result's own call runs.

    Args:
        asked: what the author's code called: another function that is written in C. One that is
            written in Python may call `detach` itself.
        made_by: index of the call that made the tensor.
        index: that of the next call.
    """
    if made_by != index - 1 or asked is None or isinstance(asked, FunctionType):
        return False
    return getattr(asked, "__name__", "") not in ("detach", "detach_", "__get__")


def _line() -> str:
    stack = traceback.walk_stack(sys._getframe(2))
    return first_of_author((frame.f_code.co_filename, line) for frame, line in stack)


# Attention in steps, each of which has a result to compare.


_FUSED = nn.functional.scaled_dot_product_attention
_PACKED = "_in_projection_packed"


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Compute what `torch.nn.functional.scaled_dot_product_attention` computes, with its arguments."""
    # torch repeats each key for a group of queries
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = (query @ key.mT) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if attn_mask is not None:
        boolean = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if boolean else scores + attn_mask
    weights = scores.softmax(-1)
    if bool((none := (scores == -torch.inf).all(-1, keepdim=True)).any()):
        weights = weights.masked_fill(none, 0.0)  # a query that sees no key has no weights
    return weights @ value


def _projections(q: Any, k: Any, v: Any, w: Any, b: Any = None) -> list[Any]:
    """Compute torch's projections of queries, keys and values as three products, also where two are
    of one tensor.
    """
    biases = [None] * 3 if b is None else b.chunk(3)
    return [
        nn.functional.linear(x, *own) for x, *own in zip((q, k, v), w.chunk(3), biases, strict=True)
    ]


class _Steps(TorchFunctionMode):
    """Tells a recorder what is called, and takes attention in steps."""

    def __init__(self, recorder: _OperationRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._recorder.asked
        self._recorder.asked = func
        try:
            function = attention if func is _FUSED else func
            return function(*args, **(kwargs or {}))
        finally:
            self._recorder.asked = before


@contextmanager
def _attention_in_steps(recorder: _OperationRecorder) -> Iterator[None]:
    fast = torch.backends.mha.get_fastpath_enabled()
    functional = nn.functional
    # in eval mode `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` are one fused operation
    # each, which has no scores and no weights to compare
    torch.backends.mha.set_fastpath_enabled(False)
    # by name, too: inside of a function of torch's that is written in Python, as
    # `multi_head_attention_forward`, the mode `_Steps` is off
    functional.scaled_dot_product_attention = attention
    # for self-attention it is one product of three times the width, which no port has to make
    packed = getattr(functional, _PACKED)
    # `multi_head_attention_forward` reads the name in its own module
    setattr(functional, _PACKED, _projections)
    try:
        with _Steps(recorder):
            yield
    finally:
        functional.scaled_dot_product_attention = _FUSED
        setattr(functional, _PACKED, packed)
        torch.backends.mha.set_fastpath_enabled(fast)


def as_tensor(value: Any) -> Any:
    """Return an input as torch gets it, floats in float64."""
    if isinstance(value, dict | list | tuple):
        return pytree.tree_map(as_tensor, value)
    if not hasattr(value, "__array__") or isinstance(value, torch.Tensor):
        return value
    # a copy: an array of JAX is read-only
    found = torch.as_tensor(np.array(value))
    return found.double() if found.is_floating_point() else found


@dataclass
class TorchRun:
    """The values of one run of a program.

    Attributes:
        values: results of each call.
        seen: the same, as they were before later calls wrote into them.
        outs: the outputs.
        loss: the loss.
        leaves: state and inputs.
    """

    values: list[list[Any]]
    seen: list[list[Any]]
    outs: list[torch.Tensor]
    loss: torch.Tensor
    leaves: dict[Any, torch.Tensor]

    def get(self, ref: Any) -> Any:
        """Return the tensor of a reference."""
        return lookup(ref, self.seen, self.leaves)

    def shape(self, index: int) -> tuple[int, ...] | None:
        """Return the shape of a call's first result, None where that is no tensor."""
        first = self.seen[index][0] if self.seen[index] else None
        return tuple(first.shape) if isinstance(first, torch.Tensor) else None


def lookup(ref: Any, values: Sequence[Sequence[Any]], leaves: Mapping[Any, Any]) -> Any:
    """Return what a reference stands for."""
    if not isinstance(ref, Ref):
        return ref
    return values[ref.kind][ref.index] if isinstance(ref.kind, int) else leaves[ref.kind, ref.index]


def _hard_sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Compute `hardsigmoid`, whose backward has 1/6 rounded to float32 in torch, whatever the
    dtype.
    """
    return (x + 3).clamp(0, 6) / 6


_EXACT: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.hardsigmoid.default: _hard_sigmoid,
    torch.ops.aten.hardsigmoid_.default: lambda x: x.copy_(_hard_sigmoid(x)),
}


Change = Callable[[OperationCall, Any, Any, Callable[[Any], Any]], Any]
"""(call, arguments, keyword arguments, get) -> results, in place of the call; `get` returns the tensor of a `Ref`."""


def _changed(
    call: OperationCall, change: Change, args: Any, kwargs: Any, get: Callable[[Any], Any]
) -> list[Any]:
    """Return the results of a changed call.

    What the call writes into memory is written there, too.
    """
    if not call.mutates or not isinstance(args[0], torch.Tensor):
        made = flat(change(call, args, kwargs, get))
        # later calls may be views that fit the memory of the result that was recorded
        return [v.contiguous() if isinstance(v, torch.Tensor) else v for v in made]
    made = flat(change(call, [args[0].clone(), *args[1:]], kwargs, get))
    # later calls read the memory, and not the result
    args[0].copy_(made[0])
    return [args[0], *made[1:]]


def _numbered(kind: str, values: Sequence[Any]) -> dict[Any, torch.Tensor]:
    """Return the tensors among some values by their kind and place."""
    return {(kind, i): v for i, v in enumerate(values) if isinstance(v, torch.Tensor)}


class TorchProgram:
    """The operations of a module's forward and of the loss, at one state and one input.

    Args:
        module: in the state at which it is recorded.
        inputs: arrays.
        targets: arrays.
        kwargs: further arguments of the module.
        ends: (output, *targets) -> the outputs to compare, and the loss.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[Any],
        targets: Sequence[Any],
        kwargs: Mapping[str, Any],
        ends: Callable[..., tuple[Any, torch.Tensor]],
    ) -> None:
        every = module.state_dict(keep_vars=True)
        own = {n: v for n, v in every.items() if isinstance(v, torch.Tensor)}
        self.names = list(own)
        named = module.named_parameters(remove_duplicate=False)
        self.parameters = {n for n, p in named if p.requires_grad}
        arguments = [as_tensor(x) for x in inputs]
        wanted = [as_tensor(x) for x in targets]
        self.given: dict[Any, torch.Tensor] = _numbered("input", arguments)
        self.given |= _numbered("target", wanted)
        self.state = {n: v.detach().clone() for n, v in own.items()}
        self._recorder = _OperationRecorder({("state", n): v for n, v in own.items()} | self.given)
        with ExitStack() as stack:
            stack.enter_context(self._modules(module))
            stack.enter_context(default_dtype())
            stack.enter_context(_attention_in_steps(self._recorder))
            self._recorder.before_each = stack.enter_context(watched_calls(self._recorder.function))
            stack.enter_context(self._recorder)
            out = module(*arguments, **pytree.tree_map(as_tensor, dict(kwargs)))
            self._recorder.stack.append(LOSS)
            kept, loss = ends(out, *wanted)
        self._put_back(own)
        self.calls = self._recorder.calls
        self.mutates = any(c.mutates for c in self.calls)
        tensors = [t for t in flat_output(kept) if isinstance(t, torch.Tensor)]
        self._note_ends(tensors, loss)

    def _put_back(self, own: Mapping[str, torch.Tensor]) -> None:
        """Put a module's state back, and note what the forward wrote into it and the inputs."""
        # a leaf that is written into cannot have a gradient
        self.written = {k for k, v in self.given.items() if v._version}
        buffers = {n: v for n, v in own.items() if n not in self.parameters}
        self.after = {n: v.detach().clone().numpy() for n, v in buffers.items()}
        with torch.no_grad():
            for n, v in own.items():
                v.copy_(self.state[n])
        self._memory = {n: (v.data_ptr(), tuple(v.shape)) for n, v in own.items()}

    def _note_ends(self, tensors: Sequence[torch.Tensor], loss: torch.Tensor) -> None:
        """Note which calls make the outputs and the loss, and what is needed for them."""
        self.outs = [self._recorder.ref(t) for t in tensors]
        self.loss = self._recorder.ref(loss)
        self.given |= self._recorder.constants
        self.ends = [r for r in (*self.outs, self.loss) if isinstance(r, Ref)]
        for tensor, ref in zip(tensors, self.outs, strict=True):
            self.ends += self._recorder.writers(tensor, ref)
        self.needed = self._needed()

    @contextmanager
    def _modules(self, module: nn.Module) -> Iterator[None]:
        names = {id(m): n for n, m in module.named_modules()}
        stack = self._recorder.stack
        hooks = nn.modules.module

        def enter(part: nn.Module, _: Any) -> None:
            stack.append(names.get(id(part), stack[-1] if stack else ""))

        def leave(*_: Any) -> None:
            stack.pop()

        with (
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, always_call=True),
        ):
            yield

    def _needed(self) -> set[int]:
        # what writes into memory may change a tensor that it does not return, as through a view
        todo = [r.kind for r in self.ends] + [i for i, c in enumerate(self.calls) if c.mutates]
        found: set[int] = set()
        while todo:
            index = todo.pop()
            if isinstance(index, int) and index not in found:
                found.add(index)
                todo += [r.kind for r in self.calls[index].refs]
        return found

    def has_gradient(self, key: Any) -> bool:
        """Return whether the gradient by an input can be compared.

        Its numbers have to be real and different: with zeros or equal ones, as of padding, a
        maximum has several gradients that are right.
        """
        value = self.given[key]
        if key[0] != "input" or key in self.written or not value.is_floating_point():
            return False
        different = len(torch.unique(value)) == value.numel()
        return bool(different and value.all() and (value != value.round()).any())

    def leaves(self, grad: bool = False) -> dict[Any, torch.Tensor]:
        """Return fresh tensors of the state and the inputs; tied names share one."""
        found = dict(self.given)
        made = dict[Any, torch.Tensor]()
        for key, value in self.given.items():
            if grad and self.has_gradient(key):
                found[key] = value.detach().clone().requires_grad_()
        for name in self.names:
            if self._memory[name] not in made:
                made[self._memory[name]] = self.state[name].clone()
                if grad and name in self.parameters:
                    made[self._memory[name]].requires_grad_()
            found["state", name] = made[self._memory[name]]
        return found

    def run(
        self, changes: Mapping[int, Change], leaves: dict[Any, torch.Tensor], grad: bool = False
    ) -> TorchRun:
        """Run all calls, some of them changed.

        Args:
            changes: index of a call -> what is done in its place.
            leaves: state and inputs.
            grad: whether autograd records.
        """
        values: list[list[Any]] = []
        seen: list[list[Any]] = []

        def get(ref: Any) -> Any:
            return lookup(ref, values, leaves)

        opened = self._opened(changes) if grad else set[int]()
        for index, call in enumerate(self.calls):
            made: list[Any] = []
            if index in self.needed:
                args = with_tensors(call.args, get)
                kwargs = with_tensors(call.kwargs, get)
                with torch.set_grad_enabled(grad and (call.grad or index in opened)):
                    change = changes.get(index)
                    # autograd goes through the operations inside, so that the Function is skipped
                    if index in opened and isinstance(call.op, OwnFunction):
                        made = [args[0]]
                    elif change is None:
                        made = flat(_EXACT.get(call.op, call.op)(*args, **kwargs))
                    else:
                        made = _changed(call, change, args, kwargs, get)
            values.append(made)
            # only where something is written in place may a result change after its call
            copies = (
                [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in made]
                if self.mutates
                else made
            )
            seen.append(copies)
        return TorchRun(
            values,
            seen,
            [get(r) for r in self.outs],
            get(self.loss),
            leaves,
        )

    def _opened(self, changes: Mapping[int, Change]) -> set[int]:
        """Return the calls of Functions whose forward is changed.

        The author's backward is that of another function then: the operations have their own.
        """
        found = set[int]()
        for index, call in enumerate(self.calls):
            if isinstance(call.op, OwnFunction):
                inside = range(call.op.start, index)
                if not changes.keys().isdisjoint(inside):
                    found.update(inside, (index,))
        return found

    @cached_property
    def readers(self) -> dict[Ref, list[int]]:
        """The calls that read each tensor."""
        found: dict[Ref, list[int]] = {}
        for index, call in enumerate(self.calls):
            for ref in call.refs:
                found.setdefault(ref, []).append(index)
        return found
