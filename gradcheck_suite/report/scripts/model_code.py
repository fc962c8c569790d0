"""A generated model as ordinary `torch.nn` code: a `Sequential` of constructor calls, and its forward.

A call's arguments are read from the built module, which keeps them as attributes of the same names, as torch's modules
do. Parameters have the names that they have in the suite, such as `0.weight`.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.utils import parametrize

from gradcheck_suite.catalogue import input_signal, layer_definition, out_signal
from gradcheck_suite.catalogue.build import extra_keys, needs_batch
from gradcheck_suite.catalogue.signals import Signal, feature_axis
from gradcheck_suite.report.scripts.copied_source import PACKAGE, CopiedSource
from gradcheck_suite.schema.spec import Layer, ProblemSpec

MODEL = """\
class Model(torch.nn.Sequential):
    def __init__(self):
        super().__init__(
{calls}
        )
{ties}
    def forward(self, {argument}):
{forward}
        return x"""


def model_text(problem: ProblemSpec, model: torch.nn.Module, sources: CopiedSource) -> str:
    """Return the class `Model`, whose forward takes a batch, or its `x` where it needs nothing else.

    Args:
        problem: whose input and layers it has.
        model: the built model, from which constructor calls are read.
        sources: gets the classes that it uses.
    """
    calls = "\n".join(_calls(problem.layers, model, sources))
    whole = needs_batch(problem)
    first = ['x = batch["x"]'] if whole else []
    forward = "\n".join([*first, *_forward(problem.layers, input_signal(problem.input), ())])
    return MODEL.format(
        calls=textwrap.indent(calls, " " * 12),
        argument="batch" if whole else "x",
        forward=textwrap.indent(forward, " " * 8),
        ties="".join(f"        {_place(name)} = {_place(original)}\n" for name, original in problem.ties),
    )


def _place(name: str) -> str:
    """Return the expression for a module or a parameter by its name, such as `self[2].weight`."""
    return "self" + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in name.split("."))


def _calls(layers: Sequence[Layer], chain: torch.nn.Module, sources: CopiedSource) -> Iterator[str]:
    # not `children()`, which leaves out a module's second place
    for layer, module in zip(layers, chain._modules.values(), strict=True):
        assert module is not None
        if layer_definition(layer).wraps:
            yield "torch.nn.Sequential("
            yield from (f"    {line}" for line in _calls(layer.layers, module, sources))
            yield "),"
        else:
            yield f"{constructor_call(module, sources)},"


def _forward(layers: Sequence[Layer], signal: Signal, place: tuple[int, ...], start: int = 0) -> Iterator[str]:
    """Yield the statements that apply layers to `x`; `place` is their index path in the model, such as `(1, 0)`."""
    for i, layer in enumerate(layers, start):
        path = ".".join(map(str, (*place, i)))
        kind, suffix = layer_definition(layer), path.replace(".", "_")
        if kind.parallel:
            yield f"input_{suffix}, outputs_{suffix} = x, []"
            for b, branch in enumerate(layer.layers):
                yield f"x = input_{suffix}"
                yield from _forward([branch], signal, (*place, i), b)
                yield f"outputs_{suffix}.append(x)"
            axis = feature_axis(signal)
            yield f"x = sum(outputs_{suffix})" if kind.wraps == "sum" else f"x = torch.cat(outputs_{suffix}, {axis})"
        elif kind.wraps == "residual":
            yield f"shortcut_{suffix} = x"
            yield from _forward(layer.layers, signal, (*place, i))
            yield f"x = shortcut_{suffix} + x"
        elif kind.wraps == "shared":
            yield "for _ in range(2):  # the same weights twice"
            yield from (f"    {line}" for line in _forward(layer.layers, signal, (*place, i)))
        else:
            given = [f'{name}=batch["{key}"]' for name, key in extra_keys(layer, signal, path).items()]
            yield f"x = self{''.join(f'[{j}]' for j in (*place, i))}({', '.join(['x', *given])})"
        signal = out_signal(layer, signal)


def constructor_call(module: torch.nn.Module, sources: CopiedSource) -> str:
    """Return the call that builds a module like this one, without its parameters' values."""
    kind = type(module)
    if parametrize.is_parametrized(module, "weight"):
        norm = module.get_submodule("parametrizations.weight.0")
        plain = _call("torch.nn", kind.__bases__[0], module, sources)
        return f"torch.nn.utils.parametrizations.weight_norm({plain}, dim={norm.dim})"
    if kind.__module__.partition(".")[0] == PACKAGE:
        sources.add(kind.__module__, kind.__name__)
        return _call("", kind, module, sources)
    sources.add_import("torch")
    return _call("torch.nn", kind, module, sources)


def _call(prefix: str, kind: type, module: torch.nn.Module, sources: CopiedSource) -> str:
    arguments = []
    for parameter in _parameters(kind):
        if not hasattr(module, parameter.name):
            assert parameter.default is not parameter.empty, f"{kind.__name__} does not keep {parameter.name}"
            continue
        value = getattr(module, parameter.name)
        if parameter.name == "bias":
            value = value is not None and value is not False
        if parameter.default is parameter.empty and prefix:
            arguments.append(_argument(value, sources))
        elif not _same(value, parameter.default):
            arguments.append(f"{parameter.name}={_argument(value, sources)}")
    return f"{prefix}{'.' * bool(prefix)}{kind.__name__}({', '.join(arguments)})"


def _parameters(kind: type) -> list[inspect.Parameter]:
    parameters = dict(inspect.signature(kind).parameters)
    if issubclass(kind, torch.nn.RNNBase):
        # RNN, GRU and LSTM take *args and **kwargs and pass them to RNNBase
        further = {"nonlinearity": inspect.Parameter("nonlinearity", inspect.Parameter.KEYWORD_ONLY, default="tanh")}
        parameters = {**inspect.signature(torch.nn.RNNBase).parameters, **further}
        del parameters["mode"]
    return [p for p in parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _same(value: Any, default: Any) -> bool:
    """Return whether a value is the default, which torch spreads over the axes of a convolution."""
    return value == default or (isinstance(value, tuple) and not isinstance(default, tuple) and set(value) == {default})


def _argument(value: Any, sources: CopiedSource) -> str:
    return constructor_call(value, sources) if isinstance(value, torch.nn.Module) else repr(value).replace("'", '"')
