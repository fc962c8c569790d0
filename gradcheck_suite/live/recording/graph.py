"""The scalar end of an autograd graph: which recognised losses a tensor is made of, and what else."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

SCALAR_NODES = {
    f"{name}Backward{version}"
    for version in (0, 1)
    for name in (
        *("Add", "Sub", "Rsub", "Mul", "Div", "Neg", "Mean", "Sum", "Dot", "Pow", "Exp", "Cumsum", "ClampMin"),
        *("Stack", "Cat", "Where", "Index", "MaskedSelect", "MaskedFill", "MaskedScatter"),
        *("Select", "Slice", "Split", "Unbind"),
        *("ToCopy", "Clone", "View", "UnsafeView", "ReshapeAlias", "Expand", "Squeeze", "Unsqueeze", "Permute", "T"),
        *("Transpose", "Alias", "NanToNum"),
    )
}
"""Arithmetic between the results of losses and what goes backward."""
REDUCTIONS = ("MeanBackward0", "MeanBackward1", "SumBackward0", "SumBackward1")
OPAQUE = ("torch::autograd::AccumulateGrad", "CheckpointFunctionBackward")
"""Nodes that say nothing about a loss: parameters, and regions that are computed again in backward."""
LOG_PROBABILITIES = ("ChunkedLogProbFunctionBackward",)
"""Functions of other packages whose first result is the log-probability of each target: trl's fused head and loss."""
MAX_NODES = 2000


KEY = "gradcheck_suite call"
"""The entry of a node's metadata that refers to the call that made it, weakly: a reference from the call to the node
would be a cycle through C++ that keeps the graph of a loss that never goes backward."""


def mark(node: Any, call: Any) -> None:
    """Note which call made the result that a node belongs to."""
    node.metadata[KEY] = weakref.ref(call)


@dataclass
class Reached:
    """What a node is made of by arithmetic.

    Attributes:
        calls: recognised calls of losses.
        log_probabilities: nodes that compute the log-probability of each target.
        other: the name of the first node that is none of these.
        summands: call -> node of the elements that a mean, sum or dot product adds up and that the call is part of,
            such as the product of an unreduced loss and the weights of its samples.
    """

    calls: list[Any] = field(default_factory=list)
    log_probabilities: list[Any] = field(default_factory=list)
    other: str | None = None
    summands: dict[Any, Any] = field(default_factory=dict)


def reached(node: Any) -> Reached:
    """Return what a node is made of.

    Args:
        node: of the tensor that goes backward.
    """
    found = Reached()
    queue: list[tuple[Any, Any]] = [(node, None)]
    seen: dict[Any, Any] = {}
    added_twice = False
    while queue and len(seen) < MAX_NODES:
        current, summand = queue.pop()
        if current is None or current in seen:
            added_twice |= current is not None and seen[current] is not summand
            continue
        seen[current] = summand
        name, reference = current.name(), current.metadata.get(KEY)
        if reference is not None:
            call = reference()
            found.calls.append(call)
            if call is not None and summand is not None and summand is not current:
                found.summands[call] = summand
        elif name in SCALAR_NODES:
            below = current if name == "DotBackward0" else summand
            queue.extend((child, child if name in REDUCTIONS else below) for child, _ in current.next_functions)
        elif name in LOG_PROBABILITIES:
            found.log_probabilities.append(current)
        elif name not in OPAQUE:
            found.other = found.other or name
    if added_twice:
        # elements that several sums share have no common weight
        found.summands.clear()
    return found
