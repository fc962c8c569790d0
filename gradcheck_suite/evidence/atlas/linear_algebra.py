"""Distances of equal points, and factorisations of singular and symmetric matrices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from gradcheck_suite.evidence.atlas.point import Point

F = torch.nn.functional
_POINT = [[1.0, 2.0]]
_IDENTITY, _RANK_1, _ZERO = [[1.0, 0.0], [0.0, 1.0]], [[1.0, 2.0], [2.0, 4.0]], [[0.0, 0.0], [0.0, 0.0]]

_ADJUGATE = "the gradient is the transposed adjugate, as JAX has it: https://github.com/pytorch/pytorch/issues/104675"


def _distance(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.linalg.norm(x - y)


def _cosine(x: jax.Array, y: jax.Array) -> jax.Array:
    norms = jnp.maximum(jnp.linalg.norm(x), 1e-8) * jnp.maximum(jnp.linalg.norm(y), 1e-8)
    return (x * y).sum() / norms


POINTS: tuple[Point, ...] = (
    Point("cdist", "the same point twice", (_POINT, _POINT), torch.cdist, _distance),
    Point(
        "pairwise_distance",
        "the same point twice",
        (_POINT, _POINT),
        lambda x, y: F.pairwise_distance(x, y, eps=0.0),
        _distance,
    ),
    Point("cosine_similarity", "x = [0, 0]", ([[0.0, 0.0]], _POINT), lambda x, y: F.cosine_similarity(x, y), _cosine),
    Point("det", "a matrix of rank 1", (_RANK_1,), torch.det, jnp.linalg.det, note=_ADJUGATE),
    Point("det", "the zero matrix", (_ZERO,), torch.det, jnp.linalg.det),
    Point("slogdet", "the identity", (_IDENTITY,), lambda x: x.slogdet().logabsdet, lambda x: jnp.linalg.slogdet(x)[1]),
    Point(
        "matrix_norm(fro)",
        "the zero matrix",
        (_ZERO,),
        torch.linalg.matrix_norm,
        jnp.linalg.norm,
    ),
    Point(
        "matrix_norm(2)",
        "the identity: equal singular values",
        (_IDENTITY,),
        lambda x: torch.linalg.matrix_norm(x, 2),
        lambda x: jnp.linalg.norm(x, 2),
    ),
    Point(
        "matrix_norm(nuc)",
        "a matrix of rank 1",
        (_RANK_1,),
        lambda x: torch.linalg.matrix_norm(x, "nuc"),
        lambda x: jnp.linalg.norm(x, "nuc"),
    ),
    Point(
        "eigvalsh",
        "the identity: equal eigenvalues",
        (_IDENTITY,),
        lambda x: torch.linalg.eigvalsh(x)[0],
        lambda x: jnp.linalg.eigvalsh(x)[0],
    ),
    Point(
        "eigh, largest eigenvector squared",
        "the identity: equal eigenvalues",
        (_IDENTITY,),
        lambda x: torch.linalg.eigh(x).eigenvectors[0, 1] ** 2,
        lambda x: jnp.linalg.eigh(x)[1][0, 1] ** 2,
    ),
    Point(
        "svdvals",
        "a matrix of rank 1",
        (_RANK_1,),
        lambda x: torch.linalg.svdvals(x).sum(),
        lambda x: jnp.linalg.svd(x, compute_uv=False).sum(),
    ),
    Point(
        "pinv", "the zero matrix", (_ZERO,), lambda x: torch.linalg.pinv(x).sum(), lambda x: jnp.linalg.pinv(x).sum()
    ),
)
