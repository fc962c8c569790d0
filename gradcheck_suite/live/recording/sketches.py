"""Sketches of gradients: a few +-1 projections in float64, from which sums are compared without a copy of anything.

The signs are products of a row sign and a column sign. One matrix-vector product contracts the rows of a gradient; its
result is short, so the `PROJECTIONS` column signs cost next to nothing. The projections are functions of the logical
shape alone: strides, sparsity and device do not matter. On a CPU numpy computes them, so that no autocast, dispatch
mode or profiler of the user's program sees an operation.

The bound. Let a sum of r arrivals a_j be computed in a dtype of unit roundoff u: its element i is off by e_i with
|e_i| <= u * (the sum over j > 1 of |a_i1| + ... + |a_ij|), and a factor applied afterwards (clipping, unscaling) adds
a few roundings (`FURTHER_ROUNDINGS`). The signs are independent of the e_i, so by Hoeffding's inequality the
projection of e exceeds `SPREAD` times its 2-norm with probability `FALSE_ALARM`. The contraction of d rows, computed
with unit roundoff v, is off by SPREAD * sqrt(d) * v times the norm with the same probability (Higham and Mary, as in
`bounds`). W. Hoeffding, J. Amer. Stat. Assoc. 58 (1963), theorem 2; N. Alon, Y. Matias, M. Szegedy, J. Comput. Syst.
Sci. 58 (1999), for the norm from the same projections.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradcheck_suite.numerics.bounds import FALSE_ALARM, FURTHER_ROUNDINGS, UNIT_ROUNDOFF

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
