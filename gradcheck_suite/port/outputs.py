"""Which output of the port is compared with each of torch's: by name, place or numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from gradcheck_suite.errors import UsageError
from gradcheck_suite.port.jax_program import JaxRun
from gradcheck_suite.port.matching import array, outputs_error
from gradcheck_suite.port.number_sets import Array, error, turn, with_axes_aligned
from gradcheck_suite.port.pair import Port, flat_output, named_outputs


class OutputPairs:
    """The outputs of both sides, side by side.

    Attributes:
        names: of torch's outputs that are compared, empty where they have none.
        shapes: of torch's outputs at the point that the port is traced for.
        unmatched: outputs of torch that the port has not, in words.
        notes: which outputs are compared, where their names do not say it.
    """

    def __init__(self, pair: Port) -> None:
        self._pair = pair
        self.names: list[str] = []
        self.shapes: list[tuple[int, ...]] = []
        self.unmatched: list[str] = []
        self.notes: list[str] = []
        self._their_names: list[str] = []
        self._left_out: set[int] = set()
        self._partners: list[int] | None = None
        self._axes: dict[Any, tuple[int, ...]] = {}

    def kept(self, out: Any) -> Any:
        """Return what is compared of an output."""
        return out if self._pair.outputs is None else self._pair.outputs(out)

    def of_torch(self, out: Any, *targets: Any) -> tuple[Any, torch.Tensor]:
        """Return torch's outputs that are compared, and the loss.

        Raises:
            UsageError: the loss is no scalar.
        """
        named = [o for o in named_outputs(self.kept(out)) if isinstance(o.value, torch.Tensor)]
        named = [o for i, o in enumerate(named) if i not in self._left_out]
        self.names = [o.name for o in named]
        kept = [o.value for o in named]
        if self._pair.torch_loss is not None:
            loss = self._pair.torch_loss(out, *targets)
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise UsageError("torch_loss: expected a scalar tensor")
            return kept, loss.reshape(())
        total = torch.zeros((), dtype=torch.float64)
        for i, o in enumerate(kept):
            if isinstance(o, torch.Tensor) and o.is_floating_point():
                total = total + (o * torch.as_tensor(_cotangent(i, tuple(o.shape)))).sum()
        return kept, total

    def of_port(
        self, out: Any, extras: list[Any], targets: Any
    ) -> tuple[list[Any], list[Any], Any]:
        """Return the port's outputs in torch's order, what else it returns, and the loss.

        Args:
            out: what the port returns.
            extras: its updated state.
            targets: arrays of the loss.

        Raises:
            UsageError: the loss is no scalar.
        """
        count = len(self.shapes)
        if (
            isinstance(out, tuple)
            and len(out) == 2
            and len(flat_output(self.kept(out[0]))) == count != 0
        ):
            more = flat_output(out[1])
            if len(flat_output(out)) > count:  # (output, updated state)
                out = out[0]
                extras = [*extras, *more]
        named = named_outputs(self.kept(out))
        self._their_names = [o.name for o in named]
        order = self._order()
        flat = [jnp.asarray(named[i].value) for i in order[:count]]
        extras = [*(named[i].value for i in order[count:]), *extras]
        if self._pair.jax_loss is None:
            return flat, extras, self._sum_of(flat)
        loss = jnp.asarray(self._pair.jax_loss(out, *targets))
        if loss.size != 1:
            raise UsageError(f"jax_loss: expected a scalar, got an array of shape {loss.shape}")
        return flat, extras, loss.astype(jnp.float64).sum()

    def _sum_of(self, outs: Sequence[Any]) -> Any:
        """Return the loss of a pair that has none: the outputs times fixed random numbers."""
        total = jnp.zeros(())
        for i, (o, shape) in enumerate(zip(outs, self.shapes, strict=False)):
            if jnp.issubdtype(o.dtype, jnp.floating) and o.size == np.prod(shape):
                value = self._turned(o.astype(jnp.float64), shape)
                total = total + (value * _cotangent(i, shape)).sum()
        return total

    def _turned(self, value: Any, shape: tuple[int, ...]) -> Any:
        if value.shape == shape:
            return value
        axes = self._axes.get((value.shape, shape))
        return value.reshape(shape) if axes is None else value.transpose(axes)

    def turn(self, outs: Sequence[torch.Tensor], run: JaxRun) -> bool:
        """Find the axes of outputs that the port has in another layout; return whether there are
        any.
        """
        for o, r in zip(outs, run.outs, strict=False):
            axes = turn(r.shape, tuple(o.shape), r, array(o))
            if axes is not None:
                self._axes[r.shape, tuple(o.shape)] = axes
        return bool(self._axes)

    def _order(self) -> list[int]:
        """Return the places of the port's outputs in torch's order: by their names, where both
        sides have names, and else as they stand.
        """
        theirs = self._their_names
        chosen = self._partners
        if chosen is None and set(self.names) <= set(theirs) and all(self.names):
            left = list(range(len(theirs)))
            chosen = []
            for name in self.names:  # several outputs, as of a list, may have one name
                chosen.append(next((i for i in left if theirs[i] == name), left[0]))
                left.remove(chosen[-1])
        chosen = [i for i in chosen or [] if i < len(theirs)]
        return [*chosen, *(i for i in range(len(theirs)) if i not in chosen)]

    def find_partners(self, outs: Sequence[torch.Tensor], run: JaxRun) -> bool:
        """Find the partners of torch's outputs where names or shapes do not say them.

        What has no partner is noted as unmatched, and left out. Return whether anything is other
        than it was taken for.
        """
        theirs = list(run.outs)
        own = list(self.names)
        is_named = all(own) and all(self._their_names)
        others = set(own) - set(self._their_names) if is_named else set()
        if len(theirs) == len(outs) and not others and all(map(_same_size, outs, theirs)):
            return False
        every = [*theirs, *run.extras]
        order = self._order()
        left = list(range(len(every)))
        partners = list[int]()
        for i, out in enumerate(outs):
            fits = [k for k in left if _same_size(out, every[k]) and k < len(order)]
            fits = [k for k in fits if self._may_be_partner(i, k, order, is_named=is_named)]
            if not fits:
                self._left_out.add(i)
                self.unmatched.append(self._without_partner(i, out, theirs))
                continue
            wanted = array(out)
            errors = {k: error(with_axes_aligned(array(every[k]), wanted), wanted) for k in fits}
            best = min(fits, key=errors.__getitem__)
            left.remove(best)
            partners.append(order[best])
            if own[i] in others:
                theirs_name = self._their_names[order[best]]
                self.notes.append(
                    f"torch's output {own[i]!r} is compared with the port's {theirs_name!r}, whose"
                    " numbers are nearest: the names differ"
                )
        self._partners = partners
        return True

    def _may_be_partner(
        self, mine: int, other: int, order: Sequence[int], *, is_named: bool
    ) -> bool:
        """Return whether an output of the port may be one of torch's, by names or places.

        Args:
            mine: place of torch's.
            other: place of the port's, among those in `order`.
            order: places of the port's outputs.
            is_named: whether outputs have names on both sides.
        """
        if not is_named:
            return other == mine
        name = self._their_names[order[other]]
        if self.names[mine] in self._their_names:
            return name == self.names[mine]
        return name not in self.names

    def _without_partner(self, place: int, out: torch.Tensor, theirs: Sequence[Any]) -> str:
        """Return in words that an output of torch is none of the port's."""
        observed = f"one of shape {theirs[place].shape}" if place < len(theirs) else "none"
        label = f" {place}" if len(self.names) > 1 else ""
        label = f" {self.names[place]!r}" if self.names[place] else label
        shape = tuple(out.shape)
        return f"expected the output{label} of shape {shape}, observed {observed}"

    def labels(self) -> list[str]:
        """Return the names of torch's outputs, or their places."""
        return [repr(n) if n else str(i) for i, n in enumerate(self.names)]

    def exchange(self, order: Sequence[int]) -> None:
        """Compare torch's outputs with others of the port.

        Args:
            order: of each output of torch, the place of the port's among those that are compared.
        """
        before = self._order()
        self._partners = [before[k] for k in order]


def exchanged(
    mine: Sequence[torch.Tensor], theirs: Sequence[Any], allowed: float
) -> list[int] | None:
    """Return which of the port's outputs each of torch's is, None where they are not the same ones
    at other places.
    """
    left = list(range(len(theirs)))
    order = list[int]()
    for i, out in enumerate(mine):
        # its own comes first: equal outputs are not exchanged
        alike = [k for k in sorted(left, key=lambda k, i=i: k != i) if _same_size(out, theirs[k])]
        partner = next((k for k in alike if outputs_error([out], [theirs[k]]) <= allowed), None)
        if partner is None:
            return None
        left.remove(partner)
        order.append(partner)
    return None if order == sorted(order) else order


def _same_size(mine: torch.Tensor, other: Any) -> bool:
    return mine.numel() == np.size(other)


def _cotangent(index: int, shape: tuple[int, ...]) -> Array:
    """Return what an output is multiplied by where there is no loss."""
    return np.asarray(np.random.default_rng(index).normal(size=shape))
