"""Whether what a backward reads is what the forward has saved for it.

A node keeps references to tensors, and torch knows of those writes alone that go through it: memory
that numpy shares, or `.data`, is written without a trace. Two things tell nevertheless:

- When a call of an outermost module returns, what the nodes of its graph have saved gets a
  fingerprint, which is compared when the backward begins. Parameters, buffers, targets of a module
  that is a loss, and what is computed inside are all the same to it.
- What is computed outside of modules is seen at the beginning of its backward only. Then the value
  of the loss is known, and `loss_values` computes it once more from what the nodes have saved.

Nothing is hooked, and no tensor is unpacked that hooks of the program have packed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from gradcheck_suite.auditing import samples
from gradcheck_suite.auditing.samples import (
    BatchedSampler,
    Fingerprint,
    fingerprint_in_place,
    is_plain,
    is_same_fingerprint,
)
from gradcheck_suite.auditing.terms import MARK, RAW, is_leaf, is_packed, kind, line_of
from gradcheck_suite.run.functions import nodes_from

NOTE = f"{MARK} saved"
"""Where the node of an output of a module keeps the fingerprints of what the call has saved."""
MOST_NODES = 20_000
"""Nodes of one call that are looked at."""
MOST_BYTES = 1 << 22
"""Size of a tensor above which a few elements tell, and no checksum of all."""


@dataclass(frozen=True)
class Written:
    """Something that a backward reads and that was written since the forward.

    Attributes:
        name: of the fault.
        sentence: what was written.
    """

    name: str
    sentence: str


@dataclass(eq=False)
class Noted:
    """What a call of a module has saved for its backward.

    Attributes:
        module: a reference to the module.
        below: the nodes of its inputs, where its graph ends.
        inputs: the memory of its inputs, where these are compared elsewhere.
        marks: a fingerprint of each saved tensor, in the order of the walk.
        is_checked: whether a backward has begun already, which may write to what it reads.
    """

    module: weakref.ref[torch.nn.Module]
    below: Sequence[Any]
    inputs: frozenset[int]
    marks: list[Fingerprint] = field(default_factory=list)
    is_checked: bool = False


@dataclass(frozen=True)
class Saved:
    """A tensor that a node has saved."""

    node: Any
    tensor: torch.Tensor


@cache
def _names_of(kind_of_node: type) -> tuple[str, ...]:
    """Return the names under which nodes of a class save tensors."""
    return tuple(name.removeprefix(RAW) for name in dir(kind_of_node) if name.startswith(RAW))


def saved_tensors(node: Any, name: str) -> tuple[torch.Tensor, ...]:
    """Return what a node has saved under a name; nothing where it is packed, or was changed in
    place.
    """
    if is_packed(node, name):
        return ()
    try:
        found = node.saved_tensors if name == "tensors" else getattr(node, f"_saved_{name}")
    except (AttributeError, RuntimeError):
        return ()
    several = found if isinstance(found, tuple | list) else (found,)
    return tuple(one for one in several if isinstance(one, torch.Tensor))


def _is_read(node: Any, name: str) -> bool:
    """Return whether the backward of a node reads what it has saved under a name."""
    if isinstance(node, BackwardCFunction):
        return not vars(type(node))["_forward_cls"].__module__.startswith("torch.")
    # a batch norm that trains reads the statistics of its batch
    return not (name.startswith("running_") and getattr(node, "_saved_training", False))


def _saved_by_call(output: Any, below: Sequence[Any]) -> Iterator[Saved]:
    """Yield what the nodes of a call have saved, always in the same order."""
    stack = [output]
    ends = set(below)
    seen = set[Any]()
    while stack and len(seen) < MOST_NODES:
        node = stack.pop()
        if node is None or node in seen or is_leaf(node):
            continue
        if node in ends or (node is not output and NOTE in node.metadata):
            continue
        seen.add(node)
        of_node: Any = type(node)
        for name in _names_of(of_node):
            if _is_read(node, name):
                for tensor in saved_tensors(node, name):
                    if not tensor.is_nested:  # its rows have no common shape to be sampled
                        yield Saved(node, tensor)
        stack += [one for one, _ in node.next_functions]


def _marks(tensors: Sequence[torch.Tensor]) -> list[Fingerprint]:
    """Return a fingerprint of each tensor; those on a device are read by one kernel."""
    whole = {
        i
        for i, tensor in enumerate(tensors)
        if is_plain(tensor) and tensor.numel() * tensor.element_size() <= MOST_BYTES
    }
    some = [tensor for i, tensor in enumerate(tensors) if i not in whole]
    sampled = iter(BatchedSampler().taken(some, whole=False)[0] if some else ())
    return [fingerprint_in_place(t) if i in whole else next(sampled) for i, t in enumerate(tensors)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass(frozen=True)
class SavedByCall:
    """What a call keeps for its backward.

    Attributes:
        size: in bytes, without the parameters.
        constants: name of a parameter that it computes with as a constant -> the line that does.
    """

    size: int
    constants: dict[str, str | None]


def saved_by_call(
    module: torch.nn.Module, outputs: Iterable[torch.Tensor], below: Sequence[Any]
) -> SavedByCall:
    """Return what the nodes of a call keep for its backward.

    Args:
        module: that was called.
        outputs: of the call.
        below: the nodes that its inputs had.
    """
    own = {name: p for name, p in module.named_parameters() if _has_storage(p)}
    parameters = set(map(_memory, own.values()))
    trained = {
        _memory(parameter): name for name, parameter in own.items() if parameter.requires_grad
    }
    sizes = dict[int, int]()
    constants = dict[str, str | None]()
    for output in outputs:
        for saved in _saved_by_call(output.grad_fn, below):
            if not _has_storage(saved.tensor):
                continue
            where = _memory(saved.tensor)
            if where not in parameters:
                sizes[where] = saved.tensor.untyped_storage().nbytes()
            elif where in trained and _is_constant(saved):
                constants[trained[where]] = line_of(saved.node)
    return SavedByCall(sum(sizes.values()), constants)


def _is_constant(saved: Saved) -> bool:
    """Return whether a node computes with a tensor through which no gradient flows. What a function
    of the program's saves is its own, and it may give a gradient to what it was made of.
    """
    return not saved.tensor.requires_grad and not isinstance(saved.node, BackwardCFunction)


def _has_storage(tensor: torch.Tensor) -> bool:
    return type(tensor) in samples.OWN and tensor.layout == torch.strided


def note_call(
    module: torch.nn.Module,
    inputs: Iterable[Any],
    outputs: Iterable[torch.Tensor],
    below: Sequence[Any],
) -> None:
    """Note what a call of a module has saved, when it returns.

    Nothing of a device: what a backward reads there is compared with nothing.

    Args:
        module: that was called.
        inputs: what it was given.
        outputs: through which a gradient may come.
        below: the nodes that the inputs had before the call, which may have written to them.
    """
    outputs = list(outputs)
    if any(map(samples.is_on_device, outputs)):
        return
    tensors = [one for one in inputs if isinstance(one, torch.Tensor)]
    # those of a call that is recorded are compared with what they were
    is_recorded = any(p.requires_grad for p in module.parameters())
    known = frozenset(_memory(one) for one in tensors if is_recorded and is_plain(one))
    nodes: list[Any] = [one.grad_fn for one in outputs if one.grad_fn is not None]
    noted = {
        node: Noted(weakref.ref(module), below, known)
        for node in nodes
        if node not in below and NOTE not in node.metadata
    }
    for node, one in noted.items():
        node.metadata[NOTE] = one
    for node, one in noted.items():
        one.marks = _marks([saved.tensor for saved in _saved_by_call(node, below)])


def written_since(roots: Iterable[Any]) -> Written | None:
    """Return what was written since it was saved, of all that is below some nodes; None for nothing.

    Waits for a device where tensors lie on one.
    """
    for node in nodes_from(roots):
        noted = None if is_leaf(node) else node.metadata.get(NOTE)
        if noted is not None and not noted.is_checked:
            noted.is_checked = True
            if (found := _changed(node, noted)) is not None:
                return found
    return None


def _changed(output: Any, noted: Noted) -> Written | None:
    """Return what a call has saved and that has other values now."""
    saved = [*_saved_by_call(output, noted.below)]
    if len(saved) != len(noted.marks):
        return None  # something is packed, freed or known to be changed now
    now = _marks([one.tensor for one in saved])
    for one, before, after in zip(saved, noted.marks, now, strict=True):
        if not is_same_fingerprint(before, after) and (found := _named(one, noted)) is not None:
            return found
    return None


def _named(saved: Saved, noted: Noted) -> Written | None:
    """Say what a tensor is that was written; None where another instrument compares it."""
    module = noted.module()
    if module is None:
        return None
    where = _memory(saved.tensor)
    of = type(module).__name__
    reads = f"between a call of {of} and its backward, which reads it ({kind(saved.node)})"
    for name, parameter in module.named_parameters():
        if _memory(parameter) == where:
            return Written("stale-parameters", f"parameter {name} was written {reads}")
    for name, buffer in module.named_buffers():
        if _memory(buffer) == where:
            return Written("changed-batch", f"buffer {name} was written {reads}")
    if where in noted.inputs:
        return None
    leaves = (node.variable for node in nodes_from([saved.node]) if is_leaf(node))
    if any(_memory(leaf) == where for leaf in leaves):
        return Written("stale-parameters", f"a parameter outside of {of} was written {reads}")
    return Written(
        "changed-batch", f"a tensor that {of} was given or has computed was written {reads}"
    )
