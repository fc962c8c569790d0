"""Differences that the given inputs do not show: other sizes, ids, numbers and graphs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as torch's documents call it
from torch import nn

from gradcheck_suite import UsageError
from gradcheck_suite.port.compare import judge_function
from gradcheck_suite.port.drawing import author_points, spans_of
from gradcheck_suite.port.result import PortResult
from gradcheck_suite.port.sides import Point
from gradcheck_suite.port.sizes import groups, is_made_for, numbers_in, varied
from gradcheck_suite.port.torch_program import TorchProgram
from tests.port.pairs import drawn, head, pair_of

X = drawn(4, 3)


def judged(pair: dict[str, Any]) -> PortResult:
    return judge_function(lambda: pair, "pair")


def named(result: PortResult) -> list[tuple[str, str]]:
    return [(f.place, f.cause) for f in result.differences]


def dense(p: Any, x: Any, name: str = "") -> Any:
    return x @ p[f"{name}weight"].T + p[f"{name}bias"]


class Reach(nn.Module):
    """Relative positions, clipped to six."""

    def __init__(self, activated: bool = False) -> None:
        super().__init__()
        self.table, self.activated = nn.Embedding(13, 3), activated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        t = torch.arange(x.shape[1])
        rows = self.table((t[None] - t[:, None]).clamp(-6, 6) + 6)
        return torch.einsum("bqd,qkd->bqk", F.gelu(x) if self.activated else x, rows)


def reach(clipped: bool, activated: bool = False, **more: Any) -> dict[str, Any]:
    """Return a port that wraps around from length 8 on where it does not clip."""
    torch.manual_seed(0)

    def apply(p: Any, x: Any) -> Any:
        t = jnp.arange(x.shape[1])
        far = t[None] - t[:, None]
        rows = p["table.weight"][(jnp.clip(far, -6, 6) if clipped else far) + 6]
        return jnp.einsum("bqd,qkd->bqk", jax.nn.gelu(x) if activated else x, rows)

    return pair_of(Reach(activated), apply, (drawn(2, 5, 3),), **more)


@pytest.mark.share(4)
def test_lengths_beyond_the_limits_of_the_program_are_drawn():
    result = judged(reach(clipped=False))
    assert [f.place for f in result.differences] == ["table"]
    assert "both sides agree at the given inputs" in result.differences[0].words
    assert "exclude them by `sizes`" in result.differences[0].words
    sound = judged(reach(clipped=True))
    assert sound.verdict == "holds"
    assert "length 1 to 27" in str(sound)  # 27 is beyond two times the table


@pytest.mark.parametrize(
    "sizes", ["given", {1: range(1, 8)}, {(0, 1): (4, 5, 6)}, lambda x: x.shape[1] < 8]
)
def test_sizes_that_the_pair_excludes_are_not_drawn(sizes):
    assert judged(reach(clipped=False, sizes=sizes)).verdict == "holds"


@pytest.mark.parametrize("sizes", [3, "all", {"length": 3}])
def test_sizes_of_a_wrong_kind_get_one_clear_line(sizes):
    with pytest.raises(UsageError, match="sizes: expected"):
        judged(reach(clipped=True, sizes=sizes))


def test_what_is_accepted_is_left_out_and_the_rest_is_judged():
    accept = ("gelu-approximation",)
    result = judged(reach(clipped=False, activated=True, accept=accept))
    assert [f.place for f in result.differences] == ["table"]
    assert [f.cause for f in result.accepted] == list(accept)
    sound = judged(reach(clipped=True, activated=True, accept=accept))
    assert (sound.verdict, [f.cause for f in sound.accepted]) == ("holds", list(accept))
    assert "drawn input" in str(sound)


def image(size: int, padding: Any) -> dict[str, Any]:
    torch.manual_seed(0)

    def apply(p: Any, x: Any) -> Any:
        kernel, numbers = p["weight"].transpose(2, 3, 1, 0), ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(
            x.transpose(0, 2, 3, 1), kernel, (2, 2), padding, dimension_numbers=numbers
        )
        return (y + p["bias"]).transpose(0, 3, 1, 2)

    return pair_of(nn.Conv2d(2, 3, 3, 2, 1), apply, (drawn(2, 2, size, size),))


@pytest.mark.parametrize("size", [7, 8])
def test_images_are_drawn_odd_and_even(size):
    """SAME is torch's padding at odd sizes alone."""
    result = judged(image(size, "SAME"))
    assert named(result) == [("", "padding")]
    assert judged(image(size, ((1, 1), (1, 1)))).verdict == "holds"


def test_each_axis_of_an_image_is_varied_by_itself():
    assert "height 6 to 15, width 6 to 15" in str(judged(image(7, ((1, 1), (1, 1)))))


def fixed_rows(rows: int | None) -> dict[str, Any]:
    torch.manual_seed(0)

    def apply(p: Any, x: Any) -> Any:
        return dense(p, x).reshape(-1 if rows is None else rows, 2, 1)

    class Split(nn.Linear):
        """Two parts of each row."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).unflatten(-1, (2, 1))

    return pair_of(Split(3, 2), apply, (X,))


def test_a_port_that_raises_at_other_sizes_differs():
    result = judged(fixed_rows(4))
    assert named(result) == [("", "raises")]
    assert "TypeError at test_drawn_inputs.py" in result.differences[0].words
    assert judged(fixed_rows(None)).verdict == "holds"


def test_a_port_that_returns_other_shapes_at_other_sizes_differs():
    torch.manual_seed(0)
    result = judged(pair_of(nn.Linear(3, 2), lambda p, x: dense(p, x)[:4], (X,)))
    assert named(result) == [("", "shape")]


class Masked(nn.Module):
    """Embeddings without those of the last id, a mask token."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.a = nn.Embedding(12, 3), nn.Linear(3, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.a(self.e(tokens).masked_fill((tokens == 11)[..., None], 0.0))


@pytest.mark.parametrize("masked", [True, False])
def test_ids_over_the_whole_table_are_drawn(masked):
    torch.manual_seed(0)

    def apply(p: Any, t: Any) -> Any:
        h = p["e.weight"][t]
        return dense(p, jnp.where((t == 11)[..., None], 0.0, h) if masked else h, "a.")

    tokens = np.array([[0, 3, 8, 2], [5, 1, 1, 7]])
    result = judged(pair_of(Masked(), apply, (tokens,)))
    if masked:
        assert result.verdict == "holds"
        assert "ids 0 to 11" in str(result)
    else:
        assert [f.cause for f in result.differences] == ["missing-mask"]
        assert "input 0 has 11, which the given one has not" in result.differences[0].words


@pytest.mark.parametrize(("limit", "verdict"), [(2, "holds"), (3, "differs")])
def test_numbers_that_reach_a_limit_are_drawn(limit, verdict):
    class Clipped(nn.Linear):
        """Clipped to two."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.hardtanh(super().forward(x), -2, 2)

    torch.manual_seed(0)
    result = judged(pair_of(Clipped(3, 4), lambda p, x: jnp.clip(dense(p, x), -2, limit), (X,)))
    assert result.verdict == verdict
    assert [f.cause for f in result.differences] == ["constant"] * (verdict == "differs")


class Largest(nn.Linear):
    """The largest of the edges into each node, zero where none ends."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        h = super().forward(x)
        into = target[:, None].expand_as(h)
        return torch.zeros_like(h).scatter_reduce(0, into, h, "amax", include_self=False)


def largest(empty: float, **more: Any) -> dict[str, Any]:
    def apply(p: Any, x: Any, target: Any) -> Any:
        top = jax.ops.segment_max(dense(p, x), target, num_segments=len(x))
        return jnp.where(jnp.isinf(top), empty, top)

    torch.manual_seed(0)
    return pair_of(Largest(3, 2), apply, (X, np.array([2, 0, 3, 1])), **more)


def random_edges(seed: int) -> Any:
    return X, np.random.default_rng(seed).integers(0, 4, 4)


def test_empty_segments_are_drawn_and_said():
    result = judged(largest(-np.inf, draw=random_edges))
    assert named(result) == [("", "empty-segment")]
    assert "a node without an incoming edge" in result.differences[0].words
    assert "off by inf" not in str(result)
    assert judged(largest(0.0, draw=random_edges)).verdict == "holds"


class Shares(nn.Linear):
    """A softmax over the edges into each node: without an edge there is no number."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        weight = super().forward(x).exp()
        return torch.zeros_like(weight).index_add(0, target, weight) * x.sum()


def test_what_the_author_draws_is_the_domain_everywhere():
    """A port that divides by a sum which is 0 where no edge ends holds on graphs that have one."""

    def apply(p: Any, x: Any, target: Any) -> Any:
        weight = jnp.exp(dense(p, x))
        total = jax.ops.segment_sum(weight, target, num_segments=len(x))
        return total * total / total * x.sum()

    torch.manual_seed(0)
    edges = np.array([0, 1, 2, 3])
    rows = lambda seed: (drawn(4, 3 + seed % 2)[:, :3], edges)  # noqa: E731 - one use
    assert judged(pair_of(Shares(3, 2), apply, (X, edges), draw=rows)).verdict == "holds"
    edges = np.array([0, 1, 2, 2])
    result = judged(pair_of(Shares(3, 2), apply, (X, edges)))
    assert result.verdict == "differs"
    assert "the port gives nan at 2 elements, torch" in result.differences[0].words


# Parts.


def test_points_of_the_author_have_the_given_shapes():
    base = Point((X,), ())
    rows = lambda seed: (drawn(3 + seed % 2, 3),)  # noqa: E731 - one use
    points = author_points(base, rows, 2, 0)
    assert [p.shapes for p in points] == [base.shapes] * 2


def test_axes_of_equal_size_vary_together_and_each_by_itself():
    found = groups(Point((np.zeros((2, 5)), np.zeros((2, 5, 5))), ()))
    assert found[0] == ((0, 0), (1, 0))
    assert ((0, 1), (1, 1), (1, 2)) in found
    assert ((1, 2),) in found


def test_numbers_of_the_programs_give_sizes_beyond_them():
    torch.manual_seed(0)
    module = Reach().double()
    program = TorchProgram(module, (drawn(2, 5, 3),), (), {}, lambda out: (out, out.sum()))

    class Jax:
        """No equations."""

        all_equations: tuple[Any, ...] = ()
        constants: tuple[Any, ...] = ()

    found = numbers_in(program, Jax())  # type: ignore[arg-type]
    assert {7, 8, 14, 15} <= set(found)


@pytest.mark.parametrize(
    ("tokens", "low", "high"), [([[0, 3], [5, 1]], 0, 11), ([[2, 3], [5, 1]], 0, 11)]
)
def test_ids_are_those_of_the_table_that_torch_indexes(tokens, low, high):
    base = Point((np.array(tokens),), ())
    program = TorchProgram(Masked().double(), base.inputs, (), {}, lambda out: (out, out.sum()))
    span = spans_of(program, base)[0]
    assert (span.low, span.high) == (low, high)


def test_the_verdict_names_axes():
    points = [Point((np.zeros((n, 3, 8, w)),), ()) for n, w in ((2, 8), (1, 9))]
    assert varied(points) == "batch 1 to 2, width 8 to 9"
    assert varied([]) == ""


@pytest.mark.parametrize(
    ("sizes", "fits"), [(None, True), ("given", False), ({1: 4}, False), ({(0, 1): (5,)}, True)]
)
def test_a_pair_is_made_for_some_sizes(sizes, fits):
    base, other = Point((np.zeros((2, 4)),), ()), Point((np.zeros((2, 5)),), ())
    assert is_made_for(sizes, base, other) is fits


def test_a_sound_pair_says_what_was_varied():
    assert "(batch 0 to 12" in str(judged(head()))
