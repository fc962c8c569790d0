"""A few linear functions of a gradient: what is kept of it, in place of a copy.

A sample of 16 elements is taken of every state of `.grad`; projections onto 8 vectors of random
signs, which see every element, are added in the windows that are looked at in full. Both are
linear, so the sample of a sum is the sum of the samples. Nothing here waits for a device: the
sample of a gradient on a GPU is a tensor there until `read_samples` is called.

On a device one kernel gathers the elements of all gradients of one dtype. On a CPU numpy computes
them, so that no autocast, dispatch mode or profiler of the program sees an operation, and without
BLAS, which would take all threads of the machine whatever the program has set.
"""

from __future__ import annotations

import contextlib
import ctypes
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradcheck_suite.auditing.vectors import ELEMENTS, PROJECTIONS, Vector

TILE = 4096
MOST_TILES = 256


class Gathered:
    """Elements of several tensors, in a row on a device, which are brought over together.

    Attributes:
        on_device: the elements of all.
        on_host: the same once they are read, None before.
    """

    __slots__ = ("on_device", "on_host")

    def __init__(self, on_device: torch.Tensor) -> None:
        self.on_device = on_device
        self.on_host: Vector | None = None


@dataclass(frozen=True, slots=True)
class GatheredSample:
    """The sample of one tensor among those whose elements were gathered.

    Attributes:
        of: the elements of all.
        begin: the place of its first one there.
        number: of its elements.
    """

    of: Gathered
    begin: int
    number: int

    def on_host(self) -> Vector:
        """Return the sample, once the elements were read."""
        found = np.zeros(ELEMENTS)
        if self.of.on_host is not None:
            found[: self.number] = self.of.on_host[self.begin : self.begin + self.number]
        return found


Raw = torch.Tensor | Vector | GatheredSample
"""A sample that may still lie on a device."""

OWN = frozenset((torch.Tensor, torch.nn.Parameter))
"""Classes whose tensors have a memory of their own."""
NOTHING: Vector = np.zeros(ELEMENTS)
"""The sample of an arrival that is not looked at."""
_DTYPES: dict[torch.dtype, Any] = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: np.int16,
}
_random = np.random.default_rng(20260101)
_SIGNS = _random.choice([-1.0, 1.0], (PROJECTIONS, TILE))


def _stride(number: int) -> int:
    """Return an odd stride: the elements of a matrix with an even number of columns are then not
    all of one column.
    """
    step = max(1, number // ELEMENTS)
    return step - (step > 1 and step % 2 == 0)


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has values: on the meta device and under a fake mode operations have
    shapes alone.
    """
    return not tensor.is_meta and type(tensor).__name__ != "FakeTensor"


def _numbers(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return numbers: a bfloat16 number, which numpy lacks, is the upper half of a float32 number."""
    return array if array.dtype != np.int16 else (array.astype(np.int32) << 16).view(np.float32)


@cache
def _of_tiles(number: int) -> npt.NDArray[np.float64]:
    return np.random.default_rng(number).choice([-1.0, 1.0], number)


@cache
def _on_device(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_SIGNS).to(device)


# gradients may be infinite, and the script's output stays what it was
@np.errstate(invalid="ignore")
def _projected(array: npt.NDArray[Any]) -> Vector:
    """Return the projections of flat numbers: the sign of a tile times the sign of a place in it."""
    if not array.any():  # as far below in a deep model, and of rows that no item has
        return np.zeros(PROJECTIONS)
    whole = len(array) // TILE
    tiles = array[: whole * TILE].reshape(whole, TILE)
    signs = _of_tiles(whole)
    columns = np.zeros(TILE)
    for begin in range(0, whole, MOST_TILES):  # numbers of bfloat16 are a copy
        some = slice(begin, begin + MOST_TILES)
        columns += np.einsum("i,ij->j", signs[some], _numbers(tiles[some]))
    rest = _numbers(array[whole * TILE :])
    columns[: len(rest)] += rest
    # small gradients are many: a tile that has no other element is not read to its end
    used = TILE if whole else len(rest)
    return np.einsum("ij,j->i", _SIGNS[:, :used], columns[:used])


def _projected_on_device(flat: torch.Tensor) -> torch.Tensor:
    whole = flat.numel() // TILE
    tiles = (
        flat[: whole * TILE]
        .view(whole, TILE)
        .to(torch.float64 if flat.dtype == torch.float64 else torch.float32)
    )
    columns = torch.from_numpy(_of_tiles(whole)).to(tiles) @ tiles
    rest = flat[whole * TILE :].to(columns)
    columns[: rest.numel()] += rest
    return _on_device(flat.device) @ columns.double()


def _of_sparse(tensor: torch.Tensor) -> torch.Tensor:
    """Return linear functions of a sparse gradient: its rows times numbers that a row's index
    decides, added up.
    """
    if tensor.layout != torch.sparse_coo:  # compressed rows, or a layout of a library of kernels
        tensor = tensor.to_dense().to_sparse_coo()
    indices = tensor._indices()
    values = tensor._values().detach()
    rows = values.reshape(indices.shape[1], -1).double()
    key = sum((d + 1.7548776662) * indices[d].double() for d in range(indices.shape[0]))
    phases = torch.arange(1, PROJECTIONS + 1, device=rows.device).double()
    projected = torch.cos(phases[:, None] * key + phases[:, None]) @ rows
    if not projected.numel():
        return projected.new_zeros(ELEMENTS)
    return torch.cat([projected[:, 0], projected.sum(1)])


_LOWEST = 1 << 12
_HIGHEST = 1 << 56
"""Addresses between which a process of 64 bits has its memory: 47 bits of them on x86-64, 48 or 52
on aarch64, 56 with pages of five levels.
"""


@cache
def _memory(dtype: Any) -> npt.NDArray[Any]:
    """Return the memory of this process as numbers: one index reads elements of many tensors at
    once.
    """
    whole: Any = (ctypes.c_char * (_HIGHEST - _LOWEST)).from_address(_LOWEST)
    return np.frombuffer(whole, dtype)


@lru_cache(maxsize=64)
def _places(numbers: tuple[int, ...]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """Return the places of the sampled elements in tensors of so many elements, and which of these
    there are.
    """
    places = np.array([_stride(number) for number in numbers])[:, None] * np.arange(ELEMENTS)
    exist = places < np.array(numbers)[:, None]
    return np.where(exist, places, 0), exist


def is_on_device(tensor: torch.Tensor) -> bool:
    """Return whether to read a tensor's values waits for a device."""
    return not tensor.is_cpu


def is_freed(tensor: torch.Tensor) -> bool:
    """Return whether the storage of a tensor has no room for its elements, as FSDP frees that of what
    it has gathered: to read it ends the process.
    """
    return tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size()


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a place in the memory of the process."""
    return type(tensor) in OWN and tensor.layout == torch.strided and not is_on_device(tensor)


@dataclass(frozen=True)
class _Spot:
    """Where a tensor lies.

    Attributes:
        dtype: of its numbers.
        first: the address of its first element over the size of one.
        number: of its elements.
        shape: where they do not lie in a row.
        strides: likewise.
    """

    dtype: Any
    first: int
    number: int
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    def places(self) -> npt.NDArray[np.intp]:
        """Return where the sampled elements lie, from the first one on: the same elements however
        they lie.
        """
        (places,), _ = _places((self.number,))
        if not self.strides:
            return places
        indices = np.unravel_index(places, self.shape)
        found: npt.NDArray[np.intp] = np.tensordot(self.strides, np.stack(indices), 1)
        return found


def _spot(tensor: torch.Tensor) -> _Spot | None:
    """Return where a tensor lies, None where that is not in the memory of this process."""
    dtype = _DTYPES.get(tensor.dtype)
    if not is_plain(tensor) or dtype is None or not tensor.numel():
        return None
    size = tensor.element_size()
    address = tensor.data_ptr()
    if address % size or not _LOWEST <= address < _HIGHEST:
        return None
    in_a_row = tensor.is_contiguous()
    if not in_a_row and tensor.is_nested:
        return None
    # a tensor at the begin of a freed storage has no address, and was told by that
    number = tensor.numel()
    if tensor.storage_offset() and is_freed(tensor):
        return None
    first = (address - _LOWEST) // size
    if in_a_row:
        return _Spot(dtype, first, number)
    # of a convolution in `channels_last` or of tied weights: a copy of all for 16 elements would
    # take the program's time
    return _Spot(
        dtype,
        first,
        number,
        tuple(tensor.shape),
        tensor.stride(),
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that has the values of another one: those of this rank, real ones, in memory
    in a row.
    """
    tensor = local(tensor.detach())
    if tensor.is_complex():
        # `view_as_real` refuses a lazily conjugated tensor
        tensor = torch.view_as_real(tensor.resolve_conj())
    in_memory = tensor.layout == torch.strided and not is_on_device(tensor)
    return tensor.contiguous() if in_memory else tensor


_WEIGHTS = _random.integers(1 << 63, size=ELEMENTS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_SEEN = torch.Tensor.data_ptr, torch.Tensor.numel, attrgetter("dtype"), torch.Tensor.is_contiguous
"""What tells that tensors lie where others did."""


def _marks(some: npt.NDArray[Any]) -> list[int]:
    """Return a checksum of the bits of each row."""
    bits = some.view(f"u{some.itemsize}")
    if some.itemsize == 8:
        # odd multiples of the highest bits alone, as of signs, may add up to 0
        bits = bits ^ bits >> np.uint64(32)
    marks: list[int] = (bits @ _WEIGHTS).tolist()
    return marks


@dataclass(frozen=True)
class _Rows:
    """Where the elements of some tensors of one dtype lie.

    Attributes:
        tensors: their indices.
        where: (T, 16) the places of the sampled elements in memory.
        exist: (T, 16) which of these there are.
        spots: of each tensor.
    """

    tensors: list[int]
    where: npt.NDArray[np.intp]
    exist: npt.NDArray[np.bool_]
    spots: list[_Spot]


def _rows_of(found: Sequence[tuple[int, _Spot]]) -> _Rows:
    indices = [i for i, _ in found]
    spots = [spot for _, spot in found]
    places, exist = _places(tuple(spot.number for spot in spots))
    where = np.array([spot.first for spot in spots])[:, None] + places
    for row, spot in enumerate(spots):
        if spot.strides:
            where[row] = spot.first + spot.places()
    return _Rows(
        indices,
        where,
        exist,
        spots,
    )


class BatchedSampler:
    """Reads tensors at once.

    Where the elements of those that it reads again and again lie is computed once.
    """

    def __init__(self) -> None:
        self._known: list[Any] | None = None
        self._where: dict[Any, _Rows] = {}

    def _find(self, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], list[int]]:
        """Find where the elements of tensors lie.

        Return what is to be read, and which are not in memory in a row.
        """
        known = None
        if OWN.issuperset(map(type, tensors)):
            with contextlib.suppress(RuntimeError):  # a sparse tensor has no address
                known = [list(map(of, tensors)) for of in _SEEN]
                known += [] if all(known[-1]) else [list(map(torch.Tensor.stride, tensors))]
            if known is not None and known == self._known:
                return tensors, []
        spots = list(map(_spot, tensors))
        kept = list(tensors)
        elsewhere = list[int]()
        rows: dict[Any, list[tuple[int, _Spot]]] = {}
        for i, at in enumerate(spots):
            if at is None:
                known = None
                if not _can_be_gathered(tensors[i]):
                    kept[i] = _plain(tensors[i])
                    at = _spot(kept[i])
            if at is None:
                elsewhere.append(i)
            else:
                rows.setdefault(at.dtype, []).append((i, at))
        self._known = known
        self._where = {dtype: _rows_of(of) for dtype, of in rows.items()}
        return kept, elsewhere

    def marks(self, tensors: Sequence[torch.Tensor]) -> list[int | None]:
        """Return the checksums of `taken` alone, None for what is not in the memory of the process."""
        found: list[int | None] = [None] * len(tensors)
        kept, elsewhere = self._find(tensors)
        for i in elsewhere:
            if kept[i].layout == torch.strided and not is_on_device(kept[i]):
                found[i] = _taken_elsewhere(kept[i], whole=False)[1]
        for dtype, rows in self._where.items():
            for i, mark in zip(rows.tensors, _marks(_memory(dtype)[rows.where]), strict=True):
                found[i] = mark
        return found

    def taken(
        self, tensors: Sequence[torch.Tensor], *, whole: bool, sparse: Collection[int] = ()
    ) -> tuple[list[Raw], list[int | None]]:
        """Return linear functions of gradients, and checksums of the elements: 16, and 8
        projections if `whole`.

        Versions alone do not tell of a change: `GradScaler.unscale_`, `.grad.data.mul_()` and numpy
        leave them as they are. None in place of a checksum where reading the elements would wait
        for a device.

        Args:
            tensors: of any shapes, layouts, dtypes or devices; of a distributed one the local shard
                is read.
            whole: whether the projections are taken.
            sparse: the indices of tensors of which they are taken in any case.
        """
        found: list[Any] = [None] * len(tensors)
        marks: list[int | None] = [None] * len(tensors)
        kept, elsewhere = self._find(tensors)
        if not whole:
            gathered = _gathered(
                {i: kept[i] for i in elsewhere if i not in sparse and _can_be_gathered(kept[i])}
            )
            for i, sampled in gathered.items():
                found[i] = sampled
            elsewhere = [i for i in elsewhere if i not in gathered]
        for i in elsewhere:
            found[i], marks[i] = _taken_elsewhere(kept[i], whole=whole or i in sparse)
        for dtype, rows in self._where.items():
            some = _memory(dtype)[rows.where]
            taken = _numbers(some).astype(np.float64)
            taken[~rows.exist] = 0.0
            for i, spot, elements, mark in zip(
                rows.tensors, rows.spots, taken, _marks(some), strict=True
            ):
                is_whole = whole or i in sparse
                found[i] = (
                    np.concatenate([elements, _projected(_flat(kept[i], spot))])
                    if is_whole
                    else elements
                )
                marks[i] = mark
        return found, marks


def _flat(tensor: torch.Tensor, spot: _Spot) -> npt.NDArray[Any]:
    """Return all elements of a tensor in a row, which is a copy where they do not lie so."""
    memory = _memory(spot.dtype)
    if not spot.strides:
        return memory[spot.first : spot.first + spot.number]
    copy = tensor.detach().contiguous()
    spot = _Spot(spot.dtype, (copy.data_ptr() - _LOWEST) // copy.element_size(), spot.number)
    return _flat(copy, spot).copy()  # before the copy is let go of


@lru_cache(maxsize=256)
def _places_of_some(
    number: int, step: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> npt.NDArray[np.intp]:
    """Return where every so many-th element of a tensor lies, from the first one on."""
    indices = np.unravel_index(np.arange(0, number, step), shape)
    found: npt.NDArray[np.intp] = np.tensordot(strides, np.stack(indices), 1)
    return found


def some_of(tensor: torch.Tensor, most: int) -> Any | None:
    """Return a copy of at most so many elements of a tensor, as an array or where it lies on a device,
    None where it has no memory.
    """
    number = tensor.numel()
    step = max(1, -(-number // most))
    step = step + (step > 1 and step % 2 == 0)
    spot = _spot(tensor)
    if spot is not None and spot.strides:
        # a copy of all would take the memory of the gradient
        places = _places_of_some(number, step, spot.shape, spot.strides)
        return _numbers(_memory(spot.dtype)[spot.first + places])
    if spot is not None:
        return _numbers(_flat(tensor, spot)[::step]).copy()
    if not _can_be_gathered(tensor):
        return None
    with torch.no_grad():
        return tensor.detach().reshape(-1)[::step].clone()


def are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether all elements of two tensors in the memory of the process are equal, NaN to NaN."""
    first = _spot(one)
    second = _spot(other)
    if first is None or second is None or first.strides or second.strides:
        return torch.equal(one, other)
    then = _numbers(_flat(one, first))
    now = _numbers(_flat(other, second))
    if then.shape != now.shape:
        return False
    is_same = then == now
    return bool(is_same.all() or (is_same | (np.isnan(then) & np.isnan(now))).all())


def _can_be_gathered(tensor: torch.Tensor) -> bool:
    """Return whether one kernel may read some elements of a tensor together with those of others."""
    return (
        type(tensor) in OWN
        and tensor.layout == torch.strided
        and tensor.dtype in _DTYPES
        and is_on_device(tensor)
        and not tensor.is_nested
        and tensor.numel() > 0
        and not is_freed(tensor)
    )


def _gathered(tensors: Mapping[int, torch.Tensor]) -> dict[int, GatheredSample]:
    """Sample tensors on a device: one kernel for all of one device and dtype, whatever their number."""
    groups: dict[Any, list[int]] = {}
    for i, tensor in tensors.items():
        groups.setdefault((tensor.device, tensor.dtype), []).append(i)
    found = dict[int, GatheredSample]()
    for members in groups.values():
        views = list[torch.Tensor]()
        numbers = list[int]()
        with torch.no_grad():
            for i in members:
                some = _some_elements(tensors[i])
                numbers.append(sum(map(len, some)))
                views += some
            of = Gathered(torch.cat(views))
        begin = 0
        for i, number in zip(members, numbers, strict=True):
            found[i] = GatheredSample(of, begin, number)
            begin += number
    return found


def _some_elements(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the sampled elements of a tensor as views, in the order of its rows."""
    number = tensor.numel()
    step = _stride(number)
    count = min(ELEMENTS, -(-number // step))
    if tensor.is_contiguous():
        return [tensor.as_strided((count,), (step,))]
    # of a convolution in `channels_last`: the elements have no stride, and a copy of all would take
    # the program's time
    places = _Spot(
        None,
        0,
        number,
        tuple(tensor.shape),
        tensor.stride(),
    ).places()
    first = tensor.storage_offset()
    return [tensor.as_strided((1,), (1,), first + int(place)) for place in places[:count]]


def _taken_elsewhere(tensor: torch.Tensor, *, whole: bool) -> tuple[Raw, int | None]:
    if tensor.layout == torch.strided and (not tensor.numel() or is_freed(tensor)):
        return np.zeros(ELEMENTS + PROJECTIONS * whole), 0
    with torch.no_grad(), torch.autocast(tensor.device.type, enabled=False):
        if tensor.layout != torch.strided:
            # its values have no fixed places: strided elements would compare other rows
            found = _of_sparse(tensor)
            return (found if is_on_device(found) else found.numpy()), None
        flat = tensor.reshape(-1)
        step = _stride(tensor.numel())
        picked = flat[: step * (ELEMENTS - 1) + 1 : step].double()
        picked = torch.nn.functional.pad(picked, (0, ELEMENTS - picked.numel()))
        return (torch.cat([picked, _projected_on_device(flat)]) if whole else picked), None


def sample(gradient: torch.Tensor, *, whole: bool) -> Raw:
    """Return linear functions of one gradient."""
    return BatchedSampler().taken([gradient], whole=whole)[0][0]


Fingerprint = int | Raw
"""What tells whether the values of a tensor have changed: a checksum of all its bytes, or a sample on a device."""


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """Return what tells whether any value of a tensor has changed, also without torch's knowledge.

    A version does not tell of memory that numpy shares. Nothing here waits for a device.
    """
    if not is_plain(tensor):
        try:
            return sample(tensor, whole=True)
        except Exception:  # a nested tensor, or another class that has no rows: nothing tells
            return 0
    plain = _plain(tensor)
    size = plain.numel() * plain.element_size()
    if not size or is_freed(plain) or not plain.is_contiguous():
        return 0
    memory: Any = (ctypes.c_char * size).from_address(plain.data_ptr())
    return zlib.crc32(memory)


def fingerprint_in_place(tensor: torch.Tensor) -> Fingerprint:
    """Return what tells whether any value of a tensor has changed, compared with one of the same
    tensor alone: the elements are read in the order in which they lie, so that none is copied.
    """
    if tensor.layout != torch.strided or tensor.is_contiguous() or tensor.is_nested:
        return fingerprint(tensor)
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=strides.__getitem__, reverse=True)
    in_a_row = tensor.detach().permute(order)
    return fingerprint(in_a_row if in_a_row.is_contiguous() else tensor)


def is_same_fingerprint(then: Fingerprint, now: Fingerprint) -> bool:
    """Return whether two fingerprints of one tensor are those of the same values.

    Waits for a device where the tensor lies on one.
    """
    if isinstance(then, int) or isinstance(now, int):
        return isinstance(then, int) and isinstance(now, int) and then == now
    one, other = read_samples([then, now])
    return np.array_equal(one, other, equal_nan=True)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a distributed tensor, any other tensor as it is."""
    shard = getattr(tensor, "to_local", None)
    found: torch.Tensor = tensor if shard is None else shard()
    return found


def is_shard(parameter: torch.Tensor) -> bool:
    """Return whether this rank has only a part of a parameter: a distributed tensor, or one that
    FSDP has flattened.
    """
    return hasattr(parameter, "to_local") or getattr(parameter, "_fsdp_flattened", False)


def read_samples(samples: Sequence[Raw]) -> list[Vector]:
    """Return samples as arrays.

    Those that lie on a device are brought over together, which waits for it once.
    """
    waiting: dict[torch.device, list[torch.Tensor]] = {}
    gathered: dict[int, Gathered] = {}
    for one in samples:
        if isinstance(one, torch.Tensor):
            waiting.setdefault(one.device, []).append(one)
        elif isinstance(one, GatheredSample) and one.of.on_host is None:
            gathered[id(one.of)] = one.of
    for of in gathered.values():
        waiting.setdefault(of.on_device.device, []).append(of.on_device)
    over = {device: iter(_brought_over(tensors)) for device, tensors in waiting.items()}
    found: list[Any] = [next(over[s.device]) if isinstance(s, torch.Tensor) else s for s in samples]
    for of in gathered.values():
        of.on_host = next(over[of.on_device.device])
    return [s.on_host() if isinstance(s, GatheredSample) else s for s in found]


def _brought_over(tensors: Sequence[torch.Tensor]) -> list[Vector]:
    """Return vectors of one device as arrays; waits for it once."""
    # a lower precision becomes the highest one among them, which is exact
    flat = torch.cat(list(tensors)).cpu().double().numpy()
    found: list[Vector] = np.split(flat, np.cumsum([len(s) for s in tensors])[:-1])
    return found
