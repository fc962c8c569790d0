"""The calls of an exported graph, each run in JAX and checked against the shape and dtype that torch recorded."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import jax
import torch
from torch import fx

from gradcheck_suite.bridge.dtypes import jax_dtype
from gradcheck_suite.bridge.errors import BridgeError, RandomnessError, WrongLowering
from gradcheck_suite.bridge.exporting import operation_of, random_message
from gradcheck_suite.bridge.op_table import is_dynamic, lowering_of
from gradcheck_suite.bridge.source_lines import source_line


@dataclass(frozen=True)
class GraphCall:
    """One call of the graph.

    Attributes:
        node: the graph's node.
        function: the JAX implementation, or the Python function that the graph calls.
        is_op: whether the node calls an ATen or custom operation.
        is_dynamic: whether the shape of the result depends on values.
    """

    node: fx.Node
    function: Callable[..., Any]
    is_op: bool
    is_dynamic: bool = False


def _after_token(lowering: Callable[..., Any]) -> Callable[..., Any]:
    """Return `with_effects` of an operation: (token, operation, arguments) -> (token, results)."""

    @wraps(lowering)
    def called(token: Any, _: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        out = lowering(*args, **kwargs)
        return (token, *(out if isinstance(out, tuple) else (out,)))

    return called


def graph_calls(graph_module: fx.GraphModule) -> list[GraphCall]:
    """Return the calls of a graph, in order of execution."""
    calls = []
    for node in graph_module.graph.nodes:
        if node.op != "call_function":
            continue
        op = operation_of(node)
        if isinstance(op, torch._ops.OpOverload):
            lowering = lowering_of(op)
            assert lowering is not None
            function = lowering if op is node.target else _after_token(lowering)
            calls.append(GraphCall(node, function, True, is_dynamic(op)))
        else:
            calls.append(GraphCall(node, node.target, False))
    return calls


def low_precision_operations(calls: tuple[GraphCall, ...]) -> tuple[str, ...]:
    """Return the operations whose results are floats of less than 64 bits, each with its source line."""
    found = []
    for call in calls:
        value = call.node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dtype.is_floating_point and value.dtype.itemsize < 8:
            # `getitem` picks one of several results; the operation is the call that made them
            source = call.node.args[0]
            node = source if call.node.target is operator.getitem and isinstance(source, fx.Node) else call.node
            found.append(f"{node.target}{source_line(node)}")
    return tuple(found)


def run_graph_call(call: GraphCall, values: dict[Any, Any]) -> Any:
    """Return the result of a call.

    Args:
        call: the call.
        values: the results of earlier calls, by node name.

    Raises:
        RandomnessError: the operation draws random numbers.
        WrongLowering: the JAX function failed, or its result has another shape or dtype than torch's.
    """
    node = call.node

    def value_of(argument: fx.Node) -> Any:
        return values[argument.name]

    args, kwargs = fx.map_arg(node.args, value_of), fx.map_arg(node.kwargs, value_of)
    if not call.is_op:
        out = call.function(*args, **kwargs)
    else:
        try:
            out = call.function(*args, **kwargs)
        except RandomnessError as error:
            raise RandomnessError(random_message(str(error), node)) from None
        except BridgeError:
            raise
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
            raise  # a Python decision on a traced value: the caller runs the program without jit instead
        except Exception as error:
            raise WrongLowering(
                f"the lowering of {node.target}{source_line(node)} failed: {type(error).__name__}: {error}"
            ) from error
    _check_shape_and_dtype(node, out)
    return out


def _check_shape_and_dtype(node: fx.Node, out: Any) -> None:
    """Compare a result with the shape and the dtype that torch recorded."""
    expected = node.meta.get("val")
    if not isinstance(expected, torch.Tensor):
        return
    dtype = jax_dtype(expected.dtype)
    shape = tuple(expected.shape)
    known = all(isinstance(n, int) for n in shape)
    weak = getattr(out, "weak_type", False)
    if getattr(out, "dtype", None) != dtype or (known and tuple(getattr(out, "shape", ())) != shape) or weak:
        got = f"{out.dtype}{list(out.shape)}" if hasattr(out, "dtype") else type(out).__name__
        raise WrongLowering(
            f"the lowering of {node.target}{source_line(node)} gives {got}{' (weakly typed)' if weak else ''} where "
            f"torch gives {dtype}{list(shape)}: correct the function registered for it"
        )
