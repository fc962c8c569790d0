"""What goes backward, read off its own autograd graph: a loss as a sum of terms, each of so many
items.

The walk down the graph gives the topology: names of nodes, shapes, saved integers. Every number,
such as the factor that a term is multiplied by, is the gradient that arrives at the term's node,
which a hook on the node sees. So a division in a trainer, a loss scale or an all-reduced divisor
needs no rule of its own.

No saved tensor is unpacked but the total weight and the targets of `nll_loss` and the numbers that
something is multiplied or divided by, and those only where no saved-tensor hook has packed them:
unpacking runs the forward again under a checkpoint, and kills the backward that follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd.function import BackwardCFunction

from gradcheck_suite.auditing.loss_terms import Term
from gradcheck_suite.auditing.modes import Apart
from gradcheck_suite.auditing.places import in_trace
from gradcheck_suite.auditing.samples import Raw, is_on_device, read_samples
from gradcheck_suite.auditing.vectors import Vector
from gradcheck_suite.run.functions import is_of_program

COARSE = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""The unit roundoff of the dtypes in which a loss's factors are rounded noticeably."""
ROUNDINGS = 16
"""Roundings of a coarse dtype that a factor may have gone through."""
MARK = "gradcheck_suite audit"
DECLARED = "gradcheck_suite objective"
"""Entries of a node's metadata: it has gone backward; the count and the reduction that the program declares for it."""
RAW = "_raw_saved_"
"""What the names of a node begin with that hold saved tensors before their hooks have run."""
WITHOUT_VALUE = "with value None"
"""What torch says where hooks are asked for and nothing was saved."""

# The table of nodes. `scalar` says what a node does to one number on its way from the loss to a
# term, `below` what it does to the elements under a term's reduction.
PASS = "pass"
EACH = "each live input"
TERM = "term"
OPAQUE = "opaque"
WEIGHTED = "pass, with weights"
PARTIAL = "partial reduction"
ITEMS = "items"


@dataclass(frozen=True)
class Node:
    """How the walk treats a node.

    Attributes:
        scalar: on a tensor of one element: `PASS`, `EACH`, `TERM` or `OPAQUE`.
        below: under a reduction, where one input has a gradient: `PASS`, `WEIGHTED`, `PARTIAL` or
            `ITEMS`.
    """

    scalar: str
    below: str


def _rows(names: str, scalar: str, below: str) -> dict[str, Node]:
    return {name: Node(scalar, below) for name in names.split()}


NODES = {
    **_rows(
        "Alias AsStrided Clone Contiguous Detach Expand Flatten Flip NanToNum Neg Permute Real",
        PASS,
        PASS,
    ),
    **_rows(
        "ReshapeAlias Roll Select Slice Split SplitWithSizes Squeeze T ToCopy Transpose Unbind"
        " Unflatten",
        PASS,
        PASS,
    ),
    **_rows("Unfold UnsafeSplit UnsafeView Unsqueeze View ViewAs", PASS, PASS),
    # functions in Python that are linear in what passes through them
    **_rows("_AllReduce _DDPSink _ToTorchTensor Identity", PASS, PASS),
    **_rows("Gather Index IndexSelect MaskedSelect Take", PASS, WEIGHTED),
    **_rows("Mul Div", PASS, WEIGHTED),
    **_rows("Add Sub Rsub", EACH, PASS),
    **_rows("CopySlices IndexPut MaskedFill Where", EACH, WEIGHTED),
    **_rows("Addcdiv Addcmul", OPAQUE, PASS),
    **_rows("Cat Stack", EACH, ITEMS),
    **_rows("Mean Sum", TERM, PARTIAL),
    **_rows("Bmm Dot Mm Mv Vdot", TERM, ITEMS),
}
"""The nodes that the walk goes through; every other one ends it."""
UNKNOWN = Node(OPAQUE, ITEMS)
PRODUCTS = ("Bmm", "Dot", "Mm", "Mv", "Vdot")
"""Reductions of two tensors, both of which may have a gradient: a sum over the elements of either."""
ARITHMETIC = ("Add", "Div", "Mul", "Rsub", "Sub")
OF_PARAMETERS = frozenset(
    str.split(
        "Abs Add Cat Div Exp Expm1 LinalgVectorNorm Log Log1P LogSoftmax Mean Mul Neg Norm Pow Prod"
        " Reciprocal Rsub Select Sigmoid Softmax Softplus Split Sqrt Squeeze Stack Sub Sum Tanh"
        " Unbind Unsqueeze View"
    )
)
"""Nodes through which a function of parameters alone stays one: no data is saved in them, numbers aside."""
OF_ROWS = ("MultiMarginLoss", "MultilabelMarginLoss")
"""Reduced losses of torch that divide by the rows of their input; the others divide by its elements."""
MEAN = 1
"""The value of a saved `reduction` that divides; 2 is a sum and 0 reduces nothing."""

Edge = tuple[Any, int]
"""A node and the index of its output."""


class Number(NamedTuple):
    """What something is multiplied or divided by.

    Attributes:
        name: of the node.
        value: the number.
        line: where the program does it, where the node has kept its stack; else None.
    """

    name: str
    value: torch.Tensor
    line: str | None


Numbers = tuple[Number, ...]


def kind(node: Any) -> str:
    """Return the name of a node without its ending: `Mul` of `MulBackward0`."""
    name = str(node.name()).rsplit("::", 1)[-1]
    head, found, tail = name.partition("Backward")
    return head if found and (not tail or tail.isdigit()) else name


def live(node: Any) -> list[Edge]:
    """Return the inputs of a node that have a gradient."""
    return [(f, i) for f, i in node.next_functions if f is not None]


def _shape(node: Any, index: int) -> tuple[int, ...] | None:
    try:
        return tuple(int(size) for size in node._input_metadata[index].shape)
    except (
        AttributeError,
        IndexError,
        RuntimeError,
        TypeError,
    ):
        # nested tensors, functions of one's own
        return None


def elements(node: Any, index: int) -> int:
    """Return the number of elements of an output of a node, -1 where it is not known."""
    shape = _shape(node, index)
    return -1 if shape is None else prod(shape)


def is_packed(node: Any, name: str) -> bool:
    """Return whether what a node has saved under a name cannot be read without running a hook, as a
    checkpoint's, which computes everything again. So it is where it has saved nothing.
    """
    raw = getattr(node, f"{RAW}{name}", None)
    several = raw if isinstance(raw, tuple | list) else (raw,)
    saved = [one for one in several if one is not None]
    if not saved:
        return True
    if hasattr(saved[0], "unpack_hook"):
        return any(one.unpack_hook is not None for one in saved)
    return _refuses_hooks(node, name, saved)


def _refuses_hooks(node: Any, name: str, saved: Sequence[Any]) -> bool:
    """Return whether saved tensors have hooks, where torch does not tell: it refuses further ones.

    torch tells since 2.13. Those without get hooks that do what torch does without any, once: a
    tensor has one pair.
    """
    mark = f"{MARK} {name}"
    if mark in node.metadata:
        return bool(node.metadata[mark])
    node.metadata[mark] = False
    for one in saved:
        try:
            one.register_hooks(lambda tensor: (tensor, tensor._version), _unpacked)
        except RuntimeError as error:
            if WITHOUT_VALUE not in str(error):
                node.metadata[mark] = True
    return bool(node.metadata[mark])


def _unpacked(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    tensor, version = saved
    if tensor._version != version:  # what torch says where no hooks are
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace"
            " operation"
        )
    return tensor


def _same(node: Any, index: int, inputs: list[Edge]) -> list[Edge]:
    """Return the input that DDP's node passes on as an output, nothing where that is not known.

    DDP sends all outputs of a model through one node, where it looks for unused parameters. Those
    that are no tensors have a number among the outputs and none among the inputs: then the shape
    tells, of a loss.
    """
    if len(node.next_functions) == len(node._input_metadata):
        return [(f, i) for f, i in node.next_functions[index : index + 1] if f is not None]
    found = [edge for edge in inputs if _shape(*edge) == _shape(node, index)]
    return found if len(found) == 1 else []


def _number(node: Any) -> torch.Tensor | None:
    """Return the number that a product or quotient multiplies or divides by.

    A sum or difference saves nothing.
    """
    name = "self" if node.next_functions[0][0] is None else "other"
    if is_packed(node, name):
        return None
    try:
        saved: torch.Tensor | None = getattr(node, f"_saved_{name}")
    except RuntimeError:  # it was changed in place
        return None
    return None if saved is None or saved.dim() or saved.is_complex() else saved.detach()


def factors_below(node: Any) -> tuple[list[float], bool]:
    """Return the numbers that a loss of one element is multiplied by, and whether it is a mean."""
    factors = list[float]()
    while (
        (name := kind(node)) != "Mean"
        and NODES.get(name, UNKNOWN).scalar == PASS
        and len(live(node)) == 1
    ):
        number = _number(node) if name in ("Mul", "Div") else None
        if number is not None:
            factors.append(_by(name, number))
        node = live(node)[0][0]
    return factors, name == "Mean"


def _of_parameters(edge: Edge) -> bool:
    """Return whether something is a function of parameters alone: the same in every micro-batch of
    a window.
    """
    stack = [edge[0]]
    seen = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        inputs = live(node)
        if is_leaf(node):
            if not isinstance(node.variable, torch.nn.Parameter):
                return False
        elif (name := kind(node)) not in OF_PARAMETERS or not inputs:
            return False
        elif len(inputs) < len(node.next_functions) and not (
            name == "Pow" or (name in ARITHMETIC and _number(node) is not None)
        ):
            return False  # a constant may be data
        stack.extend(below for below, _ in inputs)
    return True


def _concatenated_inputs(edge: Edge) -> tuple[list[Edge], bool, bool]:
    """Return the losses of one element each that a tensor joins, as in a weighted `stack`.

    Returns:
        the losses; whether the tensor is a linear function of them; whether something else with a
        gradient, that is no function of parameters alone, meets them.
    """
    stack = [edge]
    seen = set[Edge]()
    found = list[Edge]()
    linear = True
    others = False
    while stack:
        node, index = here = stack.pop()
        if here in seen:
            continue
        seen.add(here)
        name = kind(node)
        inputs = live(node)
        row = NODES.get(name, UNKNOWN)
        if row == NODES["Cat"] and all(elements(*below) == 1 for below in inputs):
            found += inputs
            continue
        if len(inputs) > 1 and name in ARITHMETIC:
            inputs = [below for below in inputs if not _of_parameters(below)]
            linear = linear and (len(inputs) < 2 or row.scalar == EACH)
        if name == "Div" and node.next_functions[0] not in inputs:
            linear = False
        ends = row.below not in (PASS, WEIGHTED) or (len(inputs) > 1 and name not in ARITHMETIC)
        if ends or any(elements(*below) != elements(node, index) for below in inputs):
            others = True
        else:
            stack += inputs
    return found, linear, others


def _valid(node: Any) -> torch.Tensor | None:
    """Return how many targets an unreduced loss does not ignore, or the chunks of one that `cat`
    joins.
    """
    name = kind(node)
    inputs = live(node)
    if name.startswith("Nll"):
        return (
            None
            if is_packed(node, "target")
            else (node._saved_target != node._saved_ignore_index).sum()
        )
    if name in ("CtcLoss", "Where"):
        return _targets_of_sequences(node)
    if name == "Cat" or (NODES.get(name) == Node(PASS, PASS) and len(inputs) == 1):
        found = [_valid(below) for below, _ in inputs]
        known = [valid for valid in found if valid is not None]
        return torch.stack(known).sum() if known and len(known) == len(found) else None
    return None


def _targets_of_sequences(node: Any) -> torch.Tensor | None:
    """Return how many targets the sequences of a CTC loss have, each of which is one item."""
    while kind(node) == "Where" and len(live(node)) == 1:  # what is infinite is left out
        node = live(node)[0][0]
    lengths = getattr(node, "_saved_target_lengths", None)
    return torch.tensor(sum(lengths)) if isinstance(lengths, tuple) else None


def line_of(node: Any) -> str | None:
    """Return the line that has made a node, where it has kept its stack."""
    return in_trace(node.metadata.get("traceback_", ()))


def _line_of_number(node: Any) -> str | None:
    """Return the user's line that multiplies or divides; None where a library does it, as a trainer
    whose call is no line to change.
    """
    return in_trace(node.metadata.get("traceback_", ()), through_libraries=False)


def _by(name: str, number: torch.Tensor | float) -> float:
    """Return the factor that a product or a quotient with a number is."""
    by = float(number)
    return by if name == "Mul" else 1 / by if by else float("inf")


@dataclass
class _PendingTerm:
    """A term while its backward runs, and until its numbers are read.

    Attributes:
        term: what is known of it.
        node: of its reduction; let go when the backward has ended.
        has_dimension: whether the reduction's result is a tensor of one element, and no number.
        inner: for each partial reduction below, whether it divides, and by how much it reduces.
        outside: the number of those above the items' weights.
        above: the numbers above the reduction.
        numbers_below: those under it.
        sampled: whether a tensor of weights is under the reduction.
        seen: what hooks saw: what `arrived`, the gradient of `items` or `rows`; and what the loss
            saved.
        is_given: whether what arrived is no scalar: the program has given a gradient.
        measured: a few numbers of each of these, which may still lie on a device.
    """

    term: Term
    node: Any = None
    has_dimension: bool = False
    inner: list[tuple[bool, int]] = field(default_factory=list)
    outside: int = 0
    above: Numbers = ()
    numbers_below: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    sampled: bool = False
    seen: dict[str, torch.Tensor] = field(default_factory=dict)
    is_given: bool = False
    measured: dict[str, Raw] = field(default_factory=dict)

    def measure(self) -> None:
        """Keep a few numbers of what the hooks saw, once the backward has run.

        Nothing here waits for a device, on which the numbers stay.
        """
        seen = self.seen
        self.seen = {}
        arrived = seen.pop("arrived", None)
        if arrived is None:
            return
        found = dict[str, torch.Tensor]()
        if arrived.is_complex():
            arrived, imaginary = torch.view_as_real(arrived.resolve_conj()).unbind(-1)
            found[IMAGINARY] = imaginary.any()
        self.term.by_data = any(
            one.value.is_floating_point() and one.value.dtype != torch.float64 for one in self.above
        )
        self.term.divisions = frozenset(one.line for one in self.above if one.line is not None)
        if arrived.dtype in COARSE:
            self.term.tolerance = ROUNDINGS * COARSE[arrived.dtype]
        self.is_given = arrived.numel() != 1
        if not self.is_given:
            found[ARRIVED] = arrived
        for name, value in seen.items():
            if name not in MEASURES:
                found[name] = value
        # the program may declare a count that lies on a device
        counts: Mapping[str, Any] = self.term.counts
        for name, count in counts.items():
            if isinstance(count, torch.Tensor):
                found[COUNT.format(name)] = count
        for i, one in enumerate(self.above):
            found[ABOVE.format(i)] = one.value
        for i, (_, number) in enumerate(self.numbers_below):
            found[BELOW.format(i)] = number
        self.measured = {name: _copied(value) for name, value in found.items()}
        if self.is_given:
            self.measured[ARRIVED] = _Weights.measured(arrived)
        for name in MEASURES.keys() & seen.keys():
            self.measured[name] = MEASURES[name](seen[name])

    def numbers(self, read: Mapping[str, Vector]) -> None:
        """Complete the term by the numbers that were measured.

        Args:
            read: the names of what was measured -> its numbers.
        """
        term = self.term
        if ARRIVED not in read:
            return
        if read.get(IMAGINARY, NOTHING).any():
            term.opaque = "backward is given a complex gradient, which tells no weight"
            return
        for name, count in term.counts.items():
            term.counts[name] = float(read.get(COUNT.format(name), (count,))[0])
        weight = self._weight(read[ARRIVED])
        for name, one in (("total_weight", "counted"), ("valid", "valid"), ("rows", "counted")):
            if name in read:
                term.counts[one] = float(read[name][0])
        if term.mean:
            own = term.counts.get("counted", term.counts.get("elements", 0.0))
            weight = weight / own if own else float("nan")
        self._note_factors(read)
        if "items" in read:
            self._weigh_items(_Weights.of(read["items"]), weight)
        term.weight = weight
        self._go_deeper(weight)

    def _weight(self, arrived: Vector) -> float:
        """Return the one weight that has arrived at the reduction."""
        if not self.is_given:
            return float(arrived[0])
        given = _Weights.of(arrived)
        self.term.counts["nonzero"] = given.number
        if given.smallest < given.largest * (1 - self.term.tolerance):
            # as of representations that are computed once more, by chunks: it came back through
            # another graph
            self.term.opaque = (
                "backward is given a gradient whose elements differ, which tells no weight"
            )
        return given.largest

    def _note_factors(self, read: Mapping[str, Vector]) -> None:
        """Note what the term is multiplied by above its reduction, and its elements below it."""
        term = self.term
        term.factors = tuple(
            _by(one.name, read[ABOVE.format(i)][0]) for i, one in enumerate(self.above)
        )
        term.factor = prod(
            _by(name, read[BELOW.format(i)][0]) for i, (name, _) in enumerate(self.numbers_below)
        )

    def _weigh_items(self, weights: _Weights, weight: float) -> None:
        """Count items by the weights that arrived at them.

        Args:
            weights: of the items.
            weight: of each element of what the reduction reduces.
        """
        term = self.term
        below = self.inner[self.outside :]
        term.counts["nonzero"] = weights.number / prod(number for _, number in below)
        if weight:
            sums = prod(number for is_mean, number in below if not is_mean)
            term.counts["weights"] = weights.total / abs(weight) / sums
        if weights.smallest >= weights.largest * (1 - term.tolerance):
            term.item = weights.largest, weights.number
        if self.sampled:
            term.hides = not (self._are_ones(weight) or self._are_normal())

    def _are_ones(self, weight: float) -> bool:
        """Return whether the tensor of weights under the reduction has no others than 0 and 1."""
        term = self.term
        if term.item is None:
            return False
        one = abs(weight * term.factor) / prod(size for divides, size in self.inner if divides)
        return abs(term.item[0] - one) <= term.tolerance * one

    def _are_normal(self) -> bool:
        """Return whether the weights under the reduction are 1 on average."""
        own = self.term.counts["elements"]
        total = self.term.counts.get("weights", 0.0)
        sums = [total / abs(f) for f in (1.0, self.term.factor) if f]
        # the roundings of a sum that was made 1 on average are more than those of one factor
        return any(abs(found - own) <= 10 * self.term.tolerance * own for found in sums)

    def _go_deeper(self, weight: float) -> None:
        """Note the weight and the number of the elements under each partial reduction."""
        divisor = 1.0
        number = self.term.counts.get("elements", 1.0)
        for divides, size in self.inner:
            divisor = divisor * (size if divides else 1)
            number = number * size
            self.term.deeper = *self.term.deeper, (weight / divisor, number)


def _copied(number: torch.Tensor) -> Raw:
    """Return a copy of a number: the program may write to what it has multiplied a loss by."""
    if not is_on_device(number):
        return np.array([float(number)])
    return number.detach().reshape(1).to(torch.float64, copy=True)


def _declared(count: float | torch.Tensor, reduction: str, above: Numbers) -> _PendingTerm:
    """Return a term of which the program has declared what it counts."""
    counts: dict[str, Any] = {"counted": count}
    return _PendingTerm(Term(("declared",), counts=counts, mean=reduction == "mean"), above=above)


def _why_no_multiple(node: Any, name: str, inputs: Sequence[Edge]) -> str | None:
    """Return why a product or quotient is no multiple of one thing, None where it is."""
    # without an input at all, the factors are functions of parameters alone
    if len(inputs) != 1 and len(live(node)) > 1:
        return "a product or quotient of two things that have gradients"
    if name == "Div" and node.next_functions[0] not in inputs:
        return "one over something that has a gradient"
    return None


PendingTerm = _PendingTerm
"""A term whose numbers may still lie on a device."""


def read_numbers(found: Sequence[PendingTerm]) -> None:
    """Complete terms by their numbers; waits for a device once, for all of them together."""
    measured = chain.from_iterable(one.measured.values() for one in found)
    values = iter(read_samples(list(measured)))
    for one in found:
        numbers = {name: next(values) for name in one.measured}
        one.measured = {}
        one.numbers(numbers)


@dataclass(frozen=True)
class _Weights:
    """The weights that a gradient gives to elements.

    Attributes:
        number: of those that are not 0.
        total: their sum.
        largest: of all; 0 where there is none.
        smallest: of those that are not 0; 0 where there is none.
    """

    number: float
    total: float
    largest: float
    smallest: float

    @staticmethod
    def measured(gradient: torch.Tensor) -> torch.Tensor:
        """Return the four numbers, where the gradient lies."""
        size = gradient.detach().abs().double().flatten()
        if not size.numel():
            return size.new_zeros(4)
        # without a mask, which would wait for a device
        some = size > 0
        smallest = torch.where(some, size, torch.inf).min()
        return torch.stack([some.sum(dtype=torch.float64), size.sum(), size.max(), smallest])

    @staticmethod
    def of(read: Vector) -> _Weights:
        """Return the four numbers, once they were read."""
        number, total, largest, smallest = read.tolist()
        return _Weights(
            number,
            total,
            largest,
            smallest if number else 0.0,
        )


def _rows_with_weight(rows: torch.Tensor) -> torch.Tensor:
    """Return how many rows of a gradient are not 0."""
    by_row = rows.reshape(-1, rows.shape[-1]) if rows.dim() == 2 else rows.flatten(1)
    return (by_row != 0).any(1).sum(dtype=torch.float64).reshape(1)


MEASURES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "items": _Weights.measured,
    "rows": _rows_with_weight,
}
"""What is kept of a gradient that a hook saw, in place of all of it."""
ARRIVED = "arrived"
IMAGINARY = "imaginary"
ABOVE = "above {}"
BELOW = "below {}"
COUNT = "count {}"
"""Names of what is measured of a term."""
NOTHING: Vector = np.zeros(1)


MULTIPLES = frozenset(("Div", "Mul"))
"""Nodes of a number times, or over, another one."""


@dataclass(frozen=True)
class _PartOfSum:
    """One number that a loss is a linear function of.

    Attributes:
        node: of the number.
        index: of the node's output.
        above: what the number is multiplied or divided by.
    """

    node: Any
    index: int
    above: Numbers


def _factors(name: str, inputs: list[Edge]) -> list[Edge]:
    """Return the inputs of a node without those factors that are the same for the whole window.

    A factor that is a function of parameters alone, as a learned temperature, is.
    """
    if name not in MULTIPLES or len(inputs) < 2:
        return inputs
    return [edge for edge in inputs if not _of_parameters(edge)]


class Reader:
    """Reads the terms of one backward and hooks their nodes.

    Attributes:
        found: the terms.
        error: the exception of a hook, which must not leave it: autograd would raise it in the
            user's backward.
    """

    def __init__(self) -> None:
        self.found: list[_PendingTerm] = []
        self.error: Exception | None = None
        self._handles: list[Any] = []
        self._visited: set[Edge] = set()

    def read(self, roots: Iterable[Any]) -> None:
        """Read what goes backward from some tensors or gradient edges."""
        for root in roots:
            node, index = edge_of(root)
            if node is not None:
                (self._scalar if elements(node, index) == 1 else self._vector)(node, index, ())

    def measured(self) -> list[PendingTerm]:
        """Return the terms, of which a few numbers are kept; waits for no device."""
        for found in self.found:
            found.measure()
        return self.found

    def keep(self, handle: Any) -> None:
        """Keep the handle of a hook that is removed with the others."""
        self._handles.append(handle)

    def close(self) -> None:
        """Remove the hooks and let go of the graph."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._visited.clear()
        for found in self.found:
            found.node = None

    def _vector(self, node: Any, index: int, above: Numbers) -> None:
        """Read a tensor of several elements that goes backward with a gradient that was given."""
        found = _PendingTerm(
            Term(("given",), counts={"elements": elements(node, index)}), above=above
        )
        self._items(
            found,
            node,
            index,
            weighted=False,
        )
        self._add(found, node, index)

    def _scalar(self, node: Any, index: int, above: Numbers) -> None:
        """Go down from one number to the terms that it is a linear function of.

        Args:
            node: of the number.
            index: of the node's output.
            above: what the number is multiplied or divided by.
        """
        number: _PartOfSum | None = _PartOfSum(node, index, above)
        while number is not None:
            number = self._below(number)

    def _below(self, number: _PartOfSum) -> _PartOfSum | None:
        """Return the one number of which another one is a multiple.

        None where it was read to its end.
        """
        node = number.node
        index = number.index
        above = number.above
        if (node, index) in self._visited:
            return None
        self._visited.add((node, index))
        declared = node.metadata.get(DECLARED)
        if declared is not None:
            self._add(_declared(declared[0], declared[1], above), node, index)
            return None
        name = kind(node)
        inputs = live(node)
        if name == "_DDPSink":
            inputs = _same(node, index, inputs)
        inputs = _factors(name, inputs)
        why = _why_no_multiple(node, name, inputs) if name in MULTIPLES else None
        if why is not None:
            self._opaque(node, index, above, why)
            return None
        return self._through(number, name, inputs)

    def _through(self, number: _PartOfSum, name: str, inputs: list[Edge]) -> _PartOfSum | None:
        """Return the one number that a node takes; None where it takes several, or ends there.

        Args:
            number: that the node gives.
            name: of the node.
            inputs: of the node.
        """
        above = number.above
        way = NODES.get(name, UNKNOWN).scalar
        if way != OPAQUE and len(inputs) > 1 and name not in PRODUCTS:
            for edge in inputs:
                (self._scalar if elements(*edge) == 1 else self._vector)(*edge, above)
            return None
        is_number = way != OPAQUE and bool(inputs) and elements(*inputs[0]) == 1
        # a tensor of one element: losses that were added to `zeros(1)`, or a micro-batch of one item?
        has_shape = is_number and way == TERM and bool(_shape(*inputs[0]))
        if has_shape and self._are_made_of_scalars(inputs, above, opaque=False):
            return None
        if not is_number or has_shape:
            self._end(number.node, number.index, above, name, inputs)
            return None
        multiple = _number(number.node) if name in MULTIPLES else None
        if multiple is not None:
            above = *above, Number(name, multiple, _line_of_number(number.node))
        return _PartOfSum(*inputs[0], above)

    def _end(self, node: Any, index: int, above: Numbers, name: str, inputs: list[Edge]) -> None:
        reduction = getattr(node, "_saved_reduction", None)
        if isinstance(reduction, int) and reduction:
            return self._loss_function(
                node, index, above, name, inputs[0] if inputs else (node, index)
            )
        row = NODES.get(name, UNKNOWN)
        if row.scalar == TERM and (len(inputs) == 1 or name in PRODUCTS):
            return self._reduction(node, index, above, name, inputs)
        if row.scalar == PASS and inputs:
            return self._opaque(node, index, above, "one element of many")
        if name.startswith("Compiled"):
            return self._opaque(
                node, index, above, "it was computed inside torch.compile, which `--eager` opens"
            )
        what = (
            f"{name} of a number"
            if inputs and elements(*inputs[0]) == 1
            else f"{name}, which is not read as a sum"
        )
        return self._opaque(node, index, above, what)

    def _are_made_of_scalars(self, edges: Iterable[Edge], above: Numbers, *, opaque: bool) -> bool:
        """Read tensors of one element as numbers.

        Return False, and read nothing, where one is an item instead.
        """
        before = len(self.found)
        handles = len(self._handles)
        visited = set(self._visited)
        for edge in edges:
            self._scalar(*edge, above)
        new = self.found[before:]
        if new and not any(
            found.has_dimension or (found.term.opaque and not opaque) for found in new
        ):
            return True
        for handle in self._handles[handles:]:
            handle.remove()
        del self.found[before:], self._handles[handles:]
        self._visited = visited
        return False

    def _loss_function(self, node: Any, index: int, above: Numbers, name: str, below: Edge) -> None:
        """Read a node that is a reduced loss of torch: its `reduction` is saved."""
        term = Term(
            (name,), counts={"elements": elements(*below)}, mean=node._saved_reduction == MEAN
        )
        found = _PendingTerm(term, above=above)
        shape = _shape(*below) or (1,)
        term.rows = shape[0]
        if not term.mean:
            term.counts["rows"] = shape[0]
        if name in OF_ROWS:
            term.counts["elements"] = shape[0] if len(shape) > 1 else 1
        if name.startswith("Nll"):
            term.counts["elements"] /= shape[1] if len(shape) > 1 else max(shape[0], 1)
            if is_packed(node, "total_weight"):
                self._hook(
                    node,
                    found,
                    "rows",
                    0,
                    of_inputs=True,
                )
            else:
                found.seen["total_weight"] = node._saved_total_weight.detach()
        self._add(found, node, index)

    def _reduction(
        self, node: Any, index: int, above: Numbers, name: str, inputs: list[Edge]
    ) -> None:
        factors = [edge for edge in inputs if not _of_parameters(edge)] or inputs
        below = factors[0]
        joins = [_concatenated_inputs(edge) for edge in factors]
        losses, linear, others = next((join for join in joins if join[0]), joins[0])
        if losses and (others or len(factors) > 1):
            return self._opaque(
                node, index, above, "losses that are weighted by something that has a gradient"
            )
        if losses and linear and self._are_made_of_scalars(losses, above, opaque=True):
            return None
        found = _PendingTerm(
            Term((name,), counts={"elements": elements(*below)}, mean=name == "Mean"), above=above
        )
        found.term.of_parameters = _of_parameters((node, index))
        found.sampled = name in PRODUCTS and len(inputs) == 1
        self._add(found, node, index)
        return self._items(found, *below, weighted=name not in ("Sum", "Mean"))

    def _items(self, found: _PendingTerm, node: Any, index: int, *, weighted: bool) -> None:
        """Go down from a reduced tensor to the first node that is no linear function of one tensor:
        the items.
        """
        while True:
            name = kind(node)
            inputs = live(node)
            row = NODES.get(name, UNKNOWN)
            if (
                len(inputs) != 1
                or row.below == ITEMS
                or (name == "Div" and node.next_functions[0][0] is None)
            ):
                break
            if row.below == WEIGHTED:
                weighted = True
                found.outside = len(found.inner)
            if name in MULTIPLES:
                number = _number(node)
                found.sampled = found.sampled or number is None
                found.numbers_below += [] if number is None else [(name, number)]
            if row.below == PARTIAL:
                before = elements(node, index)
                after = elements(*inputs[0])
                if 0 < before < after:
                    found.inner.append((name == "Mean", after // before))
            elif elements(*inputs[0]) < elements(node, index):
                break  # what is broadcast counts once for each element that it becomes
            node, index = inputs[0]
        term = found.term
        term.expression = (
            *term.expression,
            "parameter" if term.of_parameters and is_leaf(node) else name,
        )
        if shape := _shape(node, index):
            term.rows = shape[0]
            if not term.mean:
                term.counts["rows"] = shape[0]
        if (valid := _valid(node)) is not None:
            found.seen["valid"] = valid
        if weighted:
            self._hook(node, found, "items", index)

    def _opaque(self, node: Any, index: int, above: Numbers, why: str) -> None:
        term = Term(
            (kind(node),), counts={"elements": 1}, of_parameters=_of_parameters((node, index))
        )
        term.opaque = None if term.of_parameters else why
        self._add(_PendingTerm(term, above=above), node, index)

    def _add(self, found: _PendingTerm, node: Any, index: int) -> None:
        found.node = node
        found.has_dimension = bool(_shape(node, index))
        found.term.line = line_of(node)
        self.found.append(found)
        self._hook(node, found, "arrived", index)

    def _hook(
        self, node: Any, found: _PendingTerm, name: str, index: int, *, of_inputs: bool = False
    ) -> None:
        def hook(*gradients: Sequence[torch.Tensor | None]) -> None:
            try:
                # a hook is called with the gradients of inputs and of outputs, a prehook with the
                # latter alone
                given = gradients[0][index] if len(gradients[0]) > index else None
                if given is not None:
                    with Apart():
                        found.seen.setdefault(name, given.detach())
            except Exception as error:
                self.error = error

        register: Callable[..., Any] = node.register_hook if of_inputs else node.register_prehook
        self._handles.append(register(hook))


def declare_terms(loss: torch.Tensor, count: float | torch.Tensor, reduction: str) -> None:
    """Note what a loss is a mean or a sum of, so that the walk ends there."""
    if loss.grad_fn is not None:
        with Apart():
            number = count.detach() if isinstance(count, torch.Tensor) else float(count)
        metadata: dict[Any, Any] = loss.grad_fn.metadata  # type: ignore[assignment]
        metadata[DECLARED] = number, reduction


def edge_of(root: Any) -> tuple[Any, int]:
    """Return the node and the output of a tensor or of a gradient edge.

    The node is None for a leaf.
    """
    if isinstance(root, torch.Tensor):
        return root.grad_fn, root.output_nr
    return getattr(root, "node", None), getattr(root, "output_nr", 0)


def is_leaf(node: Any) -> bool:
    """Return whether a node adds to the `.grad` of a leaf."""
    return bool(node.name() == "torch::autograd::AccumulateGrad")


with torch.inference_mode(False), torch.enable_grad():
    _joined: Any = torch.cat([torch.zeros(1, requires_grad=True)]).grad_fn
_LEAF = type(_joined.next_functions[0][0])
_CAT = type(_joined)
"""The classes of the nodes of a leaf and of `cat`: to ask a node for its name is a call into autograd."""


def leaves_below(
    nodes: Iterable[Any], beyond: Iterable[Any] = ()
) -> tuple[list[torch.Tensor], list[Any]]:
    """Return the leaves that a gradient reaches, and the nodes that join items with and without a
    gradient.

    Args:
        nodes: from which to go down.
        beyond: nodes that are not entered.
    """
    stack = [node for node in nodes if node is not None]
    leaves = []
    joins = []
    seen = {*beyond}
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node) is _LEAF:
            leaves.append(node.variable)
            continue
        inputs = node.next_functions
        for below, _ in inputs:
            if below is not None:
                stack.append(below)
        if (
            type(node) is _CAT
            and node._saved_dim == 0
            and any(below is None for below, _ in inputs)
        ):
            joins.append(node)
    return leaves, joins


def used_at(nodes: Iterable[Any]) -> dict[int, str]:
    """Return the id of each leaf below -> the line of the program that used it, where nodes keep
    their stacks.
    """
    stack = list(nodes)
    seen = set[Any]()
    found = dict[int, str]()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        below = [one for one, _ in node.next_functions if one is not None]
        stack += [one for one in below if not is_leaf(one)]
        line = line_of(node)
        found |= {id(one.variable): line for one in below if line and is_leaf(one)}
    return found


CALL = f"{MARK} call"
"""Where a node that gives the output of a recorded call keeps the nodes of its inputs."""


def mark_call(outputs: Iterable[torch.Tensor], below: Sequence[Any]) -> None:
    """Mark the nodes of the outputs of a recorded call, so that what is outside of it is known.

    Args:
        outputs: of the call.
        below: the nodes of what it was given.
    """
    for node in (output.grad_fn for output in outputs):
        if node is None or node in below:
            continue  # it has passed on what an earlier call may have marked
        metadata: dict[Any, Any] = node.metadata  # type: ignore[assignment]
        metadata[CALL] = below


@dataclass(frozen=True)
class Outside:
    """What a gradient passes that is part of no recorded call.

    Attributes:
        leaves: the tensors that it reaches.
        functions: the classes of custom functions on the way.
        reenters: whether there are functions in Python, torch's own included, whose backward may
            start further passes.
    """

    leaves: Sequence[torch.Tensor] = ()
    functions: frozenset[type] = frozenset()
    reenters: bool = False

    def __add__(self, other: Outside) -> Outside:
        return Outside(
            [*self.leaves, *other.leaves],
            self.functions | other.functions,
            self.reenters or other.reenters,
        )


def outside_of_calls(nodes: Iterable[Any]) -> Outside:
    """Return what is below some nodes and inside of no recorded call."""
    stack = [node for node in nodes if node is not None]
    leaves = list[torch.Tensor]()
    kinds = set[type]()
    seen = set[Any]()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if is_leaf(node):
            leaves.append(node.variable)
            continue
        inputs = node.metadata.get(CALL)
        if inputs is not None:
            stack += inputs
            continue
        if isinstance(node, BackwardCFunction):
            kinds.add(vars(type(node))["_forward_cls"])
        stack += [below for below, _ in node.next_functions]
    own = frozenset(filter(is_of_program, kinds))
    return Outside(leaves, own, bool(kinds))


def joined_share(join: Any) -> tuple[float, int]:
    """Return the share of a join's rows through which a gradient flows, and the index of its first
    such input.
    """
    whole = _shape(join, 0)
    rows = [_shape(*edge) for edge in live(join)]
    first = next(i for i, (node, _) in enumerate(join.next_functions) if node is not None)
    return (
        sum(shape[0] for shape in rows if shape) / whole[0] if whole and whole[0] else 0.0
    ), first
