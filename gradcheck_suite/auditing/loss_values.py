"""The value of a loss, computed once more from what its own graph has saved.

At the beginning of a backward the loss has the value that its forward gave it. What its nodes have
saved, such as predictions and targets, is what the backward reads. Where the loss that follows from
the latter has another value, something of it was written in between, also by ways of which torch
does not know (numpy, `.data`).

The same is asked of what is computed outside of recorded calls, as by weights that a program uses
itself: what a node has saved of its input, or of what it gives, as a tanh, must be what follows from
what the node below has saved. A parameter that is added and that no node has saved, as a bias, is
read by no backward: a value is known up to it, but where nobody has written to it since the pass
before.

A row of the table says how one node computes its output; from the first node on that has no row, or
whose inputs are not known, nothing is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.nn import functional

from gradcheck_suite.auditing.saved_values import Written, saved_tensors
from gradcheck_suite.auditing.terms import CALL, RAW, is_leaf, kind
from gradcheck_suite.core.comparison import UNIT_ROUNDOFF

MOST_ELEMENTS = 1 << 22
"""Elements of a tensor above which nothing is computed from it, but by a loss that is one kernel."""
DEEPEST = 100
"""Nodes from the loss on that are gone down."""
ROUNDINGS = 2.0**10
"""Unit roundoffs, relative to the sum of the sizes of what is added up, by which a value may differ."""
LOW_PRECISION = 2.0**-12
"""Unit roundoff from which on kernels add up in a higher precision, and round what they give once."""
OF_LOW_PRECISION = 16.0
"""Unit roundoffs by which what one node gives may differ there."""

NO_EDGE: tuple[Any, int] = (None, 0)
Inputs = Sequence[torch.Tensor]


@dataclass(frozen=True)
class NodeFormula:
    """How a node computes its output.

    Attributes:
        inputs: the names of its inputs, in the order of its edges; empty where it saves none.
        compute: the output, from the node and the inputs.
        adds: whether it adds up what may cancel: then its size is that of the absolute values.
        is_kernel: whether it needs no memory of the size of its inputs.
    """

    inputs: tuple[str, ...]
    compute: Callable[[Any, Inputs], torch.Tensor]
    adds: bool = False
    is_kernel: bool = False


@dataclass(frozen=True)
class Known:
    """The value of an output of a node.

    Attributes:
        value: of each element.
        size: the sum of the absolute values that were added up in it.
        added: the shape of a parameter that was added, of which the value then is not known; None
            for none.
        is_moved: whether it is a parameter that no node has saved, and an optimizer has stepped since
            it was used.
    """

    value: torch.Tensor
    size: torch.Tensor
    added: torch.Size | None = None
    is_moved: bool = False


def _optional(node: Any, name: str) -> torch.Tensor | None:
    found = saved_tensors(node, name)
    return found[0] if found else None


def _reduction(node: Any) -> str:
    return ("none", "mean", "sum")[node._saved_reduction]


def _signed(number: int) -> int:
    # a node tells negative numbers modulo 2^64 (torch/csrc/autograd/generated, no issue known)
    return number - (1 << 64) if number >= 1 << 63 else number


def _nll(node: Any, x: Inputs) -> torch.Tensor:
    return functional.nll_loss(
        x[0],
        x[1],
        _optional(node, "weight"),
        ignore_index=_signed(node._saved_ignore_index),
        reduction=_reduction(node),
    )


def _with_logits(node: Any, x: Inputs) -> torch.Tensor:
    return functional.binary_cross_entropy_with_logits(
        x[0],
        x[1],
        _optional(node, "weight"),
        pos_weight=_optional(node, "pos_weight"),
        reduction=_reduction(node),
    )


def _cross_entropy_of_probabilities(node: Any, x: Inputs) -> torch.Tensor:
    return functional.binary_cross_entropy(
        x[0], x[1], _optional(node, "weight"), reduction=_reduction(node)
    )


def _in_own_shape(node: Any, x: Inputs) -> torch.Tensor:
    shape = tuple(node._input_metadata[0].shape)
    return x[0].expand(shape) if x[0].numel() != torch.Size(shape).numel() else x[0].reshape(shape)


def _reduced(of: Callable[..., torch.Tensor]) -> Callable[[Any, Inputs], torch.Tensor]:
    def compute(node: Any, x: Inputs) -> torch.Tensor:
        dims = getattr(node, "_saved_dim", None)
        if dims is None:
            return of(x[0])
        return of(x[0], tuple(map(_signed, dims)), keepdim=node._saved_keepdim)

    return compute


PAIR = ("self", "target")
BOTH = ("self", "other")
ONE = ("self",)
UNSAVED = ("",)
ROWS: Mapping[str, NodeFormula] = {
    # losses
    "NllLoss": NodeFormula(PAIR, _nll, is_kernel=True),
    "NllLoss2D": NodeFormula(PAIR, _nll, is_kernel=True),
    "MseLoss": NodeFormula(
        PAIR, lambda n, x: functional.mse_loss(x[0], x[1], reduction=_reduction(n))
    ),
    "SmoothL1Loss": NodeFormula(
        PAIR,
        lambda n, x: functional.smooth_l1_loss(
            x[0], x[1], reduction=_reduction(n), beta=n._saved_beta
        ),
    ),
    "HuberLoss": NodeFormula(
        PAIR,
        lambda n, x: functional.huber_loss(
            x[0], x[1], reduction=_reduction(n), delta=n._saved_delta
        ),
    ),
    "SoftMarginLoss": NodeFormula(
        PAIR, lambda n, x: functional.soft_margin_loss(x[0], x[1], reduction=_reduction(n))
    ),
    "BinaryCrossEntropy": NodeFormula(PAIR, _cross_entropy_of_probabilities),
    "BinaryCrossEntropyWithLogits": NodeFormula(PAIR, _with_logits),
    # element by element
    "Clamp": NodeFormula(ONE, lambda n, x: x[0].clamp(n._saved_min, n._saved_max)),
    "ClampMax": NodeFormula(ONE, lambda n, x: x[0].clamp(max=n._saved_max)),
    "ClampMin": NodeFormula(ONE, lambda n, x: x[0].clamp(min=n._saved_min)),
    "Abs": NodeFormula(ONE, lambda n, x: x[0].abs()),
    "Log": NodeFormula(ONE, lambda n, x: x[0].log()),
    "Log1P": NodeFormula(ONE, lambda n, x: x[0].log1p()),
    "LogSigmoid": NodeFormula(ONE, lambda n, x: functional.logsigmoid(x[0])),
    "Pow": NodeFormula(ONE, lambda n, x: x[0].pow(n._saved_exponent)),
    "Softplus": NodeFormula(
        ONE, lambda n, x: functional.softplus(x[0], float(n._saved_beta), float(n._saved_threshold))
    ),
    "Logsumexp": NodeFormula(
        ONE,
        lambda n, x: x[0].logsumexp(tuple(map(_signed, n._saved_dim)), keepdim=n._saved_keepdim),
    ),
    "LinalgVectorNorm": NodeFormula(
        ONE,
        lambda n, x: torch.linalg.vector_norm(
            x[0],
            n._saved_ord,
            None if n._saved_dim is None else tuple(map(_signed, n._saved_dim)),
            keepdim=n._saved_keepdim,
        ),
    ),
    "Maximum": NodeFormula(BOTH, lambda n, x: torch.maximum(x[0], x[1])),
    "Minimum": NodeFormula(BOTH, lambda n, x: torch.minimum(x[0], x[1])),
    # arithmetic
    "Mul": NodeFormula(BOTH, lambda n, x: x[0] * x[1]),
    "Div": NodeFormula(BOTH, lambda n, x: x[0] / x[1]),
    "Add": NodeFormula(("", ""), lambda n, x: x[0] + n._saved_alpha * x[1], adds=True),
    "Sub": NodeFormula(("", ""), lambda n, x: x[0] - n._saved_alpha * x[1], adds=True),
    "Neg": NodeFormula(UNSAVED, lambda n, x: -x[0]),
    "Mean": NodeFormula(UNSAVED, _reduced(torch.mean), adds=True),
    "Sum": NodeFormula(UNSAVED, _reduced(torch.sum), adds=True),
    "Dot": NodeFormula(("self", "tensor"), lambda n, x: x[0].dot(x[1]), adds=True),
    "Addmm": NodeFormula(
        ("", "mat1", "mat2"),
        lambda n, x: torch.addmm(x[0], x[1], x[2], beta=n._saved_beta, alpha=n._saved_alpha),
        adds=True,
    ),
    "Mm": NodeFormula(("self", "mat2"), lambda n, x: x[0] @ x[1], adds=True),
    "Mv": NodeFormula(("self", "vec"), lambda n, x: x[0] @ x[1], adds=True),
    # elements in other places
    **dict.fromkeys(
        [
            "Alias",
            "Clone",
            "Contiguous",
            "Expand",
            "Reshape",
            "Squeeze",
            "ToCopy",
            "UnsafeView",
            "Unsqueeze",
            "View",
        ],
        NodeFormula(UNSAVED, _in_own_shape),
    ),
    "Diagonal": NodeFormula(
        UNSAVED,
        lambda n, x: x[0].diagonal(
            _signed(n._saved_offset), _signed(n._saved_dim1), _signed(n._saved_dim2)
        ),
    ),
    "Gather": NodeFormula(
        UNSAVED, lambda n, x: x[0].gather(_signed(n._saved_dim), saved_tensors(n, "index")[0])
    ),
    "IndexSelect": NodeFormula(
        UNSAVED, lambda n, x: x[0].index_select(_signed(n._saved_dim), saved_tensors(n, "index")[0])
    ),
    "MaskedSelect": NodeFormula(
        UNSAVED, lambda n, x: x[0].masked_select(saved_tensors(n, "mask")[0])
    ),
    "Permute": NodeFormula(UNSAVED, lambda n, x: x[0].permute(tuple(map(_signed, n._saved_dims)))),
    "Select": NodeFormula(
        UNSAVED, lambda n, x: x[0].select(_signed(n._saved_dim), _signed(n._saved_index))
    ),
    "T": NodeFormula(UNSAVED, lambda n, x: x[0].t()),
    "Transpose": NodeFormula(
        UNSAVED, lambda n, x: x[0].transpose(_signed(n._saved_dim0), _signed(n._saved_dim1))
    ),
}
"""Name of a node -> how it computes its output."""
RESULTS = frozenset(
    ["Exp", "LogSoftmax", "Relu", "Rsqrt", "Sigmoid", "Softmax", "Sqrt", "Tanh", "Reciprocal"]
)
"""Nodes that have saved what they give."""
REPEATED: Mapping[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "LogSoftmax": lambda n, x: x.log_softmax(_signed(n._saved_dim)),
    "Relu": lambda n, x: x.relu(),
    "Sigmoid": lambda n, x: x.sigmoid(),
    "Softmax": lambda n, x: x.softmax(_signed(n._saved_dim)),
    "Tanh": lambda n, x: x.tanh(),
}
"""Those of them that are computed again: none is steeper than `STEEPEST`."""
STEEPEST = 2.0
MOST_NODES = 1000
"""Nodes outside of recorded calls that are looked at."""
MOST_IN_ALL = 1 << 25
"""Elements that are computed again for one backward outside of recorded calls."""
LEADING = ("Add", "Addmm")
"""Nodes to which a parameter may be added that no node saves."""
OF_ONE = ("Alias", "Clone", "Expand", "Reshape", "Squeeze", "ToCopy", "Unsqueeze", "View")
"""Nodes between a parameter and where it is added, as under autocast."""
TURNED = ("Permute", "T", "Transpose")
"""Those between a parameter and what multiplies by it."""
IN_SHAPE = ("UnsafeView", "View")
"""Nodes that leave the last dimension as it is, along which a bias lies."""
PREIMAGES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "LogSoftmax": lambda y: y,
    "Relu": lambda y: y,
    "Sigmoid": lambda y: y.logit(),
    "Softmax": lambda y: y.log(),
    "Tanh": lambda y: y.atanh(),
}
"""What gives a result, for those that are computed again: of a softmax up to a number for each row."""
FLATTEST = {"Sigmoid": 0.5, "Tanh": 0.0}
"""The result at which a function is the steepest, so that its preimage is the most exact."""


@dataclass
class _Values:
    """The values of the nodes below a loss.

    Attributes:
        known: of each edge that was asked for.
        kinds: the nodes that have saved something that has a part in it.
        of_parameters: whether a parameter has.
        coarsest: the largest unit roundoff on the way.
        reads_leaves: whether a parameter that no node has saved may be added.
        unmoved: returns the ids of the parameters that are what they were at the forward.
        stepped_at: the number that autograd had for the next node when an optimizer stepped last.
        elements: that were computed.
    """

    reads_leaves: bool = False
    unmoved: Callable[[], Collection[int]] = frozenset
    stepped_at: int = 0
    elements: int = 0

    known: dict[tuple[Any, int], Known | None] = field(default_factory=dict)
    kinds: dict[str, None] = field(default_factory=dict)
    of_parameters: bool = False
    coarsest: float = 0.0

    def of(self, node: Any, index: int, depth: int = 0) -> Known | None:
        """Return the value of an output of a node; None where it is not known."""
        if node is None or index or depth > DEEPEST:
            return None
        if (node, index) not in self.known:
            self.known[node, index] = None
            with_value = self._computed(node, depth)
            if with_value is not None:
                unit = UNIT_ROUNDOFF.get(str(with_value.value.dtype).removeprefix("torch."), 0.0)
                self.coarsest = max(self.coarsest, unit)
            self.known[node, index] = with_value
        return self.known[node, index]

    def misread(self, node: Any) -> Any | None:
        """Return the node below one that gives something else than what the latter has saved of it;
        None for none.
        """
        if kind(node) in REPEATED:
            edge = node.next_functions[0]
            saved = self._saved(node, "result")
            return edge[0] if saved is not None and self._differs(edge, saved, node) else None
        for edge, tensor in _saved_inputs(node):
            saved = _known(tensor)
            if saved is not None and self._differs(edge, saved, None):
                return edge[0]
        return None

    def _differs(self, edge: tuple[Any, int], saved: Known, through: Any | None) -> bool:
        """Return whether what a node gives is another value than what was saved of it.

        Args:
            edge: the node.
            saved: what was saved.
            through: the node that has saved what it gives; None for what it was given.
        """
        below = self.of(*edge)
        if below is None or below.value.numel() > MOST_ELEMENTS:
            return False
        value = below.value
        size = below.size.max() if below.size.numel() else torch.zeros(())
        if below.added is not None:
            added = _added(below, saved.value, through)
            if added is None:
                return False
            value = value + added
            size = size + added.abs().max()
        now = value if through is None else REPEATED[kind(through)](through, value)
        if now.shape != saved.value.shape or now.dtype != saved.value.dtype or not now.numel():
            return False
        roundings = ROUNDINGS if self.coarsest < LOW_PRECISION else OF_LOW_PRECISION
        allowed = STEEPEST * roundings * self.coarsest * size
        off = (now - saved.value).abs().max()
        return bool(off > allowed) and math.isfinite(float(off))

    def _computed(self, node: Any, depth: int) -> Known | None:
        name = kind(node)
        if is_leaf(node):
            return _known(node.variable) if self.reads_leaves else None
        if name in RESULTS:
            return self._saved(node, "result")
        row = ROWS.get(name)
        if row is None:
            return None
        inputs = list[Known]()
        # what has no gradient, as targets that are indices, may have no edge
        edges = [*node.next_functions, *[NO_EDGE] * len(row.inputs)]
        for one, edge in zip(row.inputs, edges, strict=False):
            found = self._input_of(node, one, edge, depth)
            if found is None:
                return None
            inputs.append(found if one else self._as_added(name, edge, found))
        return self._of_inputs(node, row, inputs)

    def _input_of(
        self, node: Any, name: str | None, edge: tuple[Any, int], depth: int
    ) -> Known | None:
        """Return an input of a node: what it has saved under a name, else what is below it."""
        below, index = edge
        is_of_leaf = below is not None and is_leaf(below)
        saved = self._saved(node, name) if name else None
        if saved is not None:
            self.of_parameters = self.of_parameters or is_of_leaf
            return saved
        found = self.of(below, index, depth + 1)
        is_moved = is_of_leaf and node._sequence_nr() < self.stepped_at
        return replace(found, is_moved=True) if found is not None and is_moved else found

    def _as_added(self, name: str, edge: tuple[Any, int], found: Known) -> Known:
        """Return an input, of a bias alone its shape: no backward reads it, and it may be written as
        the program likes.
        """
        leaf = _leaf_of(edge[0]) if name in LEADING else None
        if leaf is None or id(leaf.variable) in self.unmoved():
            return found
        return replace(found, added=found.value.shape, is_moved=False)

    def _of_inputs(self, node: Any, row: NodeFormula, inputs: Sequence[Known]) -> Known | None:
        if not row.is_kernel and any(one.value.numel() > MOST_ELEMENTS for one in inputs):
            return None
        added = [one.added for one in inputs if one.added is not None]
        if len(added) > 1 or (added and not _keeps(node, inputs[0].added)):
            return None
        is_moved = any(one.is_moved for one in inputs)
        if is_moved and kind(node) not in (*OF_ONE, *TURNED):
            return None
        value = row.compute(node, [one.value for one in inputs])
        self.elements += value.numel()
        if self.elements > MOST_IN_ALL:
            return None
        made = node._input_metadata[0]
        if tuple(value.shape) != tuple(made.shape) or value.is_complex():
            return None
        value = value.to(made.dtype)
        of_parameter = added[0] if added else None
        if not row.adds:
            return Known(value, value.abs(), of_parameter, is_moved)
        sizes = [one.size for one in inputs]
        # a difference has the size of a sum
        whole = sizes[0] + sizes[1] if kind(node) in ("Add", "Sub") else row.compute(node, sizes)
        return Known(value, whole, of_parameter)

    def _saved(self, node: Any, name: str) -> Known | None:
        found = _optional(node, name)
        # to read a tensor that is packed would compute a checkpoint again
        is_tensor = hasattr(node, RAW + name)
        number = None if is_tensor else getattr(node, f"_saved_{name}", None)
        if isinstance(number, int | float):
            one = torch.tensor(number, dtype=torch.float64)
            return Known(one, one.abs())
        if found is None or found.layout != torch.strided or found.is_complex():
            return None
        self.kinds[kind(node)] = None
        return _known(found)


def _leaf_of(node: Any) -> Any | None:
    """Return the leaf of a parameter that a node gives, cast or laid out otherwise; None for none."""
    while node is not None and not is_leaf(node) and kind(node) in OF_ONE:
        node = node.next_functions[0][0]
    return node if node is not None and is_leaf(node) else None


def _keeps(node: Any, first: torch.Size | None) -> bool:
    """Return whether a parameter that is added below a node is added in what it gives, too.

    Args:
        node: the node.
        first: the shape of one that is added in its first input.
    """
    name = kind(node)
    if name in IN_SHAPE:
        made = node._input_metadata[0].shape
        return first is not None and len(first) == 1 and tuple(made[-1:]) == tuple(first)
    # of what is below the other inputs of a product nothing is known
    return name == "Add" or (name == "Addmm" and first is not None)


def _added(below: Known, saved: torch.Tensor, through: Any | None) -> torch.Tensor | None:
    """Return the parameter that was added in a value, from what was saved of it.

    None where it cannot be told: it is that of the one sample.

    Args:
        below: the value, with the parameter as it is now.
        saved: what was saved.
        through: the node that has saved what it gives; None for what it was given.
    """
    assert below.added is not None
    shape = torch.Size([1] * (below.value.dim() - len(below.added)) + list(below.added))
    rows = [at for at, n in enumerate(shape) if n == 1 and below.value.shape[at] > 1]
    if not rows or saved.shape != below.value.shape:
        return None
    if through is None:
        return (saved - below.value).mean(rows, keepdim=True)
    name = kind(through)
    off = PREIMAGES[name](saved) - below.value
    if name in ("LogSoftmax", "Softmax"):
        # each row of a softmax is known up to a number
        of_rows = off.mean(_signed(through._saved_dim), keepdim=True)
        return (off - of_rows).mean(rows, keepdim=True)
    flat = [at for at in range(saved.dim()) if at in rows]
    kept = [at for at in range(saved.dim()) if at not in rows]
    table = off.permute(*flat, *kept).flatten(0, len(flat) - 1)
    result = saved.permute(*flat, *kept).flatten(0, len(flat) - 1)
    if name == "Relu":
        best = result.argmax(0, keepdim=True)
        # where all are cut off, any number that is small enough will do
        lowest = -below.value.permute(*flat, *kept).flatten(0, len(flat) - 1).amax(0, keepdim=True)
        found = table.gather(0, best)
        found = torch.where(result.gather(0, best) > 0, found, lowest.clamp(max=0))
    else:
        best = (result - FLATTEST[name]).abs().argmin(0, keepdim=True)
        found = table.gather(0, best)
    return found.reshape(shape)


def _saved_inputs(node: Any) -> Iterator[tuple[tuple[Any, int], torch.Tensor]]:
    """Yield the nodes that give what a node has saved of its inputs, with what it has saved."""
    if isinstance(node, BackwardCFunction):
        below = {one for one, _ in node.next_functions}
        for tensor in saved_tensors(node, "tensors"):
            given = tensor.grad_fn
            if given is not None and given in below and not is_leaf(given):
                yield (given, tensor.output_nr), tensor
        return
    row = ROWS.get(kind(node))
    if row is None:
        return
    for name, edge in zip(row.inputs, node.next_functions, strict=False):
        if not name or edge[0] is None or is_leaf(edge[0]):
            continue
        for tensor in saved_tensors(node, name)[:1]:
            if tensor.layout == torch.strided and tensor.is_floating_point():
                yield edge, tensor


def _known(tensor: torch.Tensor) -> Known | None:
    """Return the value of a tensor; None where it has no memory."""
    # FSDP frees the storage of what it has gathered, and a read of it ends the process; not
    # `is_freed`, since an expanded tensor has less memory than elements
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return None
    found = tensor.detach()
    is_signed = found.dtype.is_signed and found.numel() <= MOST_ELEMENTS
    return Known(found, found.abs() if is_signed else found)


def rewritten_outside(
    loss: torch.Tensor,
    unmoved: Callable[[], Collection[int]] = frozenset,
    stepped_at: int = 0,
) -> Written | None:
    """Return what was written of that which nodes outside of recorded calls have saved.

    Waits for a device where it lies on one.

    Args:
        loss: that goes backward.
        unmoved: returns the ids of the parameters that are what they were at the forward.
        stepped_at: the number that autograd had for the next node when an optimizer stepped last.
    """
    values = _Values(reads_leaves=True, unmoved=cache(unmoved), stepped_at=stepped_at)
    with torch.no_grad(), torch.autocast(loss.device.type, enabled=False):
        for node in _nodes_outside(loss.grad_fn):
            below = values.misread(node)
            if below is not None:
                said = (
                    f"{kind(node)}, outside of the modules' calls, has saved something else than"
                    " follows now from what the nodes below it have saved for the backward: inputs,"
                    " or parameters, were written after it was computed, as through numpy or"
                    " `.data`"
                )
                is_of_weights = _reads_weights_alone(below)
                return Written("stale-parameters" if is_of_weights else "changed-batch", said)
    return None


def _reads_weights_alone(node: Any) -> bool:
    """Return whether all that a node has saved, and that no other node gives, are parameters."""
    if node is None or is_leaf(node):
        return False
    if kind(node) not in ROWS:
        return False
    names = ROWS[kind(node)].inputs
    edges = [below for below, _ in node.next_functions]
    if not any(names):
        return _reads_weights_alone(edges[0])
    saved = [below for name, below in zip(names, edges, strict=True) if name]
    return None not in saved


def _nodes_outside(root: Any) -> Iterator[Any]:
    """Yield the nodes below one, outside of recorded calls."""
    stack = [root]
    seen = set[Any]()
    while stack and len(seen) < MOST_NODES:
        node = stack.pop()
        if node is None or node in seen or is_leaf(node):
            continue
        seen.add(node)
        inputs = node.metadata.get(CALL)
        if inputs is not None and node not in inputs:
            stack += inputs
            continue
        yield node
        stack += [below for below, _ in node.next_functions]


def rewritten_loss(loss: torch.Tensor) -> Written | None:
    """Return what a loss says that goes backward: that what its nodes have saved gives another one.

    Waits for a device where it lies on one.

    Args:
        loss: one number.
    """
    if loss.numel() != 1 or not loss.is_floating_point() or loss.grad_fn is None:
        return None
    values = _Values()
    with torch.no_grad(), torch.autocast(loss.device.type, enabled=False):
        found = values.of(loss.grad_fn, loss.output_nr)
        if found is None or not values.kinds:
            return None
        then, now, size = (
            float(one) for one in (loss.detach(), found.value.detach(), found.size.detach())
        )
    allowed = ROUNDINGS * values.coarsest * max(size, abs(then), abs(now))
    # a comparison with what is not finite tells nothing
    if not abs(now - then) > allowed or not allowed < float("inf"):
        return None
    names = ", ".join(values.kinds)
    said = (
        f"the loss is {then:.6g}, and what its own graph ({names}) has saved for the backward gives"
        f" {now:.6g}: some of that was written after the loss was computed, as through numpy or"
        " `.data`"
    )
    return Written("stale-parameters" if values.of_parameters else "changed-batch", said)
