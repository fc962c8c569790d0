"""The bytes that one operation reads and writes, from its schema and its tensors alone.

An operation reads every tensor argument once, at elements x itemsize, and writes every tensor that it makes or changes
once. No cache is modelled, and a broadcast (expanded) operand counts at its expanded size. Operations that only make a
view or change metadata move nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from gradcheck_suite.errors import UsageError

OVERWRITES = frozenset(
    {
        *("zero_", "fill_", "copy_", "_foreach_zero_", "_foreach_copy_"),
        *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"),
    }
)
"""In-place operations that do not read the tensor that they change."""
METADATA = frozenset(
    {
        *("as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_"),
        *("transpose_", "unsqueeze_"),
    }
)
"""In-place operations that change a tensor's metadata, not its elements."""
UNFILLED = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
"""Operations that allocate and write nothing."""
FRESH = frozenset({"lift_fresh"})
"""Operations whose operand was allocated just before, invisible to dispatch modes (`torch.tensor(...)`)."""


@dataclass(frozen=True)
class Access:
    """What one operation did to memory.

    Attributes:
        name: the operation's name without `aten.` and overload, such as `"add_"` and `"_foreach_zero_"`.
        view: whether it only made a view or changed metadata.
        read: bytes read.
        written: bytes written.
        operands: storages of its tensor arguments.
        changed: storages that it wrote to in place.
        made: storages of its results that no argument has; no storage twice.
    """

    name: str
    view: bool
    read: int
    written: int
    operands: tuple[torch.UntypedStorage, ...]
    changed: tuple[torch.UntypedStorage, ...]
    made: tuple[torch.UntypedStorage, ...]


def access(func: torch._ops.OpOverload, args: Any, kwargs: Any, out: Any) -> Access:
    """Return what an operation that has just run did to memory.

    Raises:
        UsageError: one of its tensors is not dense (sparse, nested), and so has no storage to count.
    """
    name = _name(func)
    handed, changed = _operands(func, args, kwargs)
    results = list(_tensors(out))
    _check(name, (*handed, *changed, *results))
    operands = _storages((*handed, *changed))
    known = {} if name in FRESH else operands
    made = {key: storage for key, storage in _storages(results).items() if key not in known}
    view = name in METADATA or name in FRESH or (bool(results) and not changed and not made)
    read = 0 if view or _reads_nothing(name) else _bytes(handed)
    fresh = [] if name in UNFILLED else [t for t in results if t.untyped_storage()._cdata in made]
    return Access(
        name=name,
        view=view,
        read=read,
        written=0 if view else _bytes((*changed, *fresh)),
        operands=tuple(operands.values()),
        changed=() if view else tuple(_storages(changed).values()),
        made=tuple(made.values()),
    )


@cache
def _name(func: torch._ops.OpOverload) -> str:
    return str(func.overloadpacket).removeprefix("aten.")


def _reads_nothing(name: str) -> bool:
    """Return whether an operation uses only shape, dtype and device of its operand."""
    return name.startswith("new_") or name.endswith("_like") or name in UNFILLED


def _operands(func: torch._ops.OpOverload, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that an operation reads and the tensors that it changes; the two overlap."""
    overwrites = _name(func) in OVERWRITES
    read: list[torch.Tensor] = []
    changed: list[torch.Tensor] = []
    for i, (name, writes, is_out) in enumerate(_parameters(func)):
        value = args[i] if i < len(args) else kwargs.get(name)
        if value is None:
            continue
        tensors = list(_tensors(value))
        if writes:
            changed += tensors
        if not (writes and (overwrites or is_out)):
            read += tensors
    return read, changed


@cache
def _parameters(func: torch._ops.OpOverload) -> tuple[tuple[str, bool, bool], ...]:
    """Return each argument's name, whether it is written to, and whether it is an `out`."""
    return tuple((a.name, a.alias_info is not None and a.alias_info.is_write, a.is_out) for a in func._schema.arguments)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _check(name: str, tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise UsageError(
                f"ledger: {name} has a tensor of layout {tensor.layout} and shape {tuple(tensor.shape)}, and only "
                "dense (torch.strided) tensors can be counted: use dense gradients (sparse=False) in what is recorded"
            )


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the tensors' storages by address, each once."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage
    return found


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return elements x itemsize; tensors with the same storage, offset, shape and strides count once."""
    places = {(t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride()): t for t in tensors}
    return sum(t.numel() * t.itemsize for t in places.values())
