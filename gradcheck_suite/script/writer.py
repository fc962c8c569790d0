"""A violation as one Python file that needs torch alone: model, data, loop, right gradient, and the check."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils import parametrize

from gradcheck_suite.catalogue.definitions import Signal, feature_axis
from gradcheck_suite.catalogue.description import describe_case, details_of, error_text, violation_title
from gradcheck_suite.catalogue.tables import (
    extra_keys,
    input_signal,
    layer_definition,
    loss_definition,
    needs_batch,
    out_signal,
)
from gradcheck_suite.core.case import Case, Layer, ProblemSpec
from gradcheck_suite.core.comparison import Vector
from gradcheck_suite.core.contract import DEFAULT_TIME_LIMIT, Loop, Problem, TrainingRun
from gradcheck_suite.core.results import Violation
from gradcheck_suite.loops.trainers import TRAINERS
from gradcheck_suite.reference.large_batch import parameter_gradients
from gradcheck_suite.run.instance import Instance, Items, Pairs, instance_of, leaves, loader_over, map_leaves, to_dtype
from gradcheck_suite.run.observer import Observer, structure
from gradcheck_suite.run.optimizers import OPTIMIZERS, NoOpOptimizer, in_groups
from gradcheck_suite.script import runtime
from gradcheck_suite.script.copied_source import PACKAGE, CopiedSource
from gradcheck_suite.script.runtime import load

# Tensors as Python source that evaluates to exactly the same numbers.


WIDTH = 132


def literal(value: Any, indent: int = 0, before: int = 0) -> str:
    """Return a number or nested lists of numbers as source, on several lines where one is too long.

    Args:
        value: the data; `nan` and `inf` come out by name.
        indent: of the line that the text begins on.
        before: number of characters before it on that line.
    """
    text = repr(value)
    if not isinstance(value, list) or indent + before + len(text) <= WIDTH:
        return text
    inside = " " * (indent + 4)
    if any(isinstance(entry, list) for entry in value):
        lines = [f"{inside}{literal(entry, indent + 4, 1)}," for entry in value]
    else:
        lines = textwrap.wrap(text[1:-1] + ",", WIDTH, initial_indent=inside, subsequent_indent=inside)
    return "\n".join(["[", *lines, f"{' ' * indent}]"])


def values(tensor: torch.Tensor) -> Any:
    """Return a tensor's entries as nested lists of Python numbers, without rounding: float64 has every float value."""
    tensor = tensor.detach().cpu()
    return (tensor.to(torch.float64) if tensor.is_floating_point() else tensor).tolist()


def tensor_text(tensor: torch.Tensor, indent: int) -> str:
    """Return the call of `torch.tensor` that makes an equal tensor of floats, integers or booleans on the device."""
    options = ", dtype=DTYPE, device=DEVICE" if tensor.is_floating_point() else ", device=DEVICE"
    return f"torch.tensor({literal(values(tensor), indent, 32 + len(options))}{options})"


def table(name: str, entries: Mapping[str, Any]) -> str:
    """Return the assignment of a dict to a name, each entry on a line of its own."""
    lines = [f'    "{key}": {literal(value, 4, len(key) + 5)},' for key, value in entries.items()]
    return "\n".join([f"{name} = {{", *lines, "}"])


# A generated model as ordinary `torch.nn` code: a `Sequential` of constructor calls, and its forward.
#
# A call's arguments are read from the built module, which keeps them as attributes of the same names, as torch's
# modules do. Parameters have the names that they have in the suite, such as `0.weight`.


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


# The parts of a script that say what is trained, on which data, and by which loop and optimizer.


def is_imported(name: str) -> bool:
    """Return whether a loop or a problem of this name, as the command line takes it, is imported from its place."""
    return ":" in name or name in TRAINERS


def loop_text(loop: Loop, name: str, sources: CopiedSource) -> str:
    """Return `load_loop`: it imports the user's loop from its place, or returns one of the suite's, printed in full."""
    if is_imported(name):
        loaded = _loaded(TRAINERS[name].place if name in TRAINERS else name, sources)
    else:
        loaded = _expression(loop, sources)
    return _function("load_loop()", "Return the loop under test.", f"return {loaded}")


def _loaded(name: str, sources: CopiedSource) -> str:
    """Return the call that loads what `FILE.py:NAME` or `package.module:NAME` stands for."""
    sources.copy(load)
    place, _, attribute = name.rpartition(":")
    folder = Path.cwd()
    if place.endswith(".py"):
        folder, place = Path(place).resolve().parent, Path(place).name
    return f"load({place!r}, {attribute!r}, folder={folder.as_posix()!r})".replace("'", '"')


def _expression(loop: Loop, sources: CopiedSource) -> str:
    """Return the expression of one of the suite's loops: its name, or the call of the function that makes it."""
    maker, _, inner = loop.__qualname__.partition(".<locals>.")
    sources.add(loop.__module__, maker)
    if not inner:
        return maker
    closed_over = inspect.getclosurevars(loop).nonlocals
    arguments = []
    for name in inspect.signature(inspect.getmodule(loop).__dict__[maker]).parameters:
        value = closed_over[name]
        if callable(value):
            sources.copy(value)
        arguments.append(f"{name}={value.__name__ if callable(value) else repr(value)}")
    return f"{maker}({', '.join(arguments)})"


def optimizer_text(case: Case, sources: CopiedSource) -> str:
    """Return `make_optimizer`: the case's real optimizer, or the one whose step changes nothing."""
    if case.optimizer is None:
        sources.copy(NoOpOptimizer)
        call = "NoOpOptimizer(parameters)"
    else:
        factory = OPTIMIZERS[case.optimizer]
        for own in inspect.getclosurevars(factory).globals.values():
            if isinstance(own, type):  # `torch` is a module
                sources.copy(own)
        line = inspect.getsource(factory).strip()
        call = re.sub(r"\bp\b", "parameters", line.partition("lambda p: ")[2].rstrip(","))
    if case.groups > 1:
        sources.copy(in_groups)
        call = f"in_groups({call}, {case.groups})"
    return _function("make_optimizer(parameters)", "Return the optimizer.", f"return {call}")


def generated_text(instance: Instance, sources: CopiedSource) -> str:
    """Return `Model`, `make_model`, `loss` and `count` of a generated problem, in ordinary torch."""
    spec = instance.case.spec
    assert spec is not None
    model, loss = instance.model(), loss_definition(spec.loss)
    sources.copy(loss.torch_loss, loss.count)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    make = [
        "model = Model().to(DEVICE, DTYPE)",
        "model.load_state_dict({name: torch.tensor(v, dtype=torch.float64) for name, v in PARAMETERS.items()})",
        *(f'model.get_parameter("{name}").requires_grad_(False)' for name in frozen),
        "return model.train()",
    ]
    output = "model(batch)" if needs_batch(spec) else 'model(batch["x"])'
    objective = f'return {loss.torch_loss.__name__}(LOSS_OPTIONS, {output}, batch, "{spec.loss.reduction}")'
    parts = [
        model_text(spec, model, sources),
        table("PARAMETERS", {name: values(tensor) for name, tensor in model.state_dict().items()}),
        _function("make_model()", "Return the model as it is before the first step.", "\n".join(make)),
        f"LOSS_OPTIONS = {dict(spec.loss.o)!r}".replace("'", '"'),
        _function("loss(model, batch)", f"Return the loss of a batch, its items' {spec.loss.reduction}.", objective),
        _count_text(f"{loss.count.__name__}(LOSS_OPTIONS, batch)", instance),
    ]
    return "\n\n\n".join(parts)


def problem_text(problem: Problem, instance: Instance, sources: CopiedSource) -> str:
    """Return `make_model`, `loss` and `count` of a user's problem, which is imported from its place."""
    name = instance.case.problem_name
    assert name is not None
    make = f"return PROBLEM.model({instance.case.seed}).to(DEVICE, DTYPE).train()"
    counted = "torch.as_tensor(PROBLEM.count(batch))"
    if problem.count is None:
        sources.copy(leaves)
        counted = "torch.tensor(len(next(leaves(batch))))"
    parts = [
        f"FOUND = {_loaded(name, sources)}\nPROBLEM = FOUND() if callable(FOUND) else FOUND",
        _function("make_model()", "Return the model as it is before the first step.", make),
        _function("loss(model, batch)", "Return the loss of a batch.", "return PROBLEM.loss(model, batch)"),
        _count_text(counted, instance),
    ]
    return "\n\n\n".join(parts)


def _count_text(counted: str, instance: Instance) -> str:
    dtype = torch.promote_types(torch.float32, instance.dtype)
    what = "Return what the mean over a batch divides by."
    return _function("count(batch)", what, f"return {counted}.to(DEVICE, {dtype})")


def _function(signature: str, what: str, body: str) -> str:
    return f'def {signature}:\n    """{what}"""\n{textwrap.indent(body, "    ")}'


def data_text(instance: Instance, sources: CopiedSource) -> str:
    """Return `DATA`, the items of one epoch, and `MICRO_BATCHES`, the items of each micro-batch."""
    case, plan = instance.case, instance.case.plan
    sources.copy(Items)
    if case.spec is not None:
        lines = [f'    "{name}": {tensor_text(tensor, 4)},' for name, tensor in instance.data.items()]
        data = "\n".join(["DATA = {", *lines, "}"])
    else:
        sources.copy(map_leaves)
        moved = "t.to(DEVICE, DTYPE) if t.is_floating_point() else t.to(DEVICE)"
        data = f"DATA = map_leaves(lambda t: {moved}, PROBLEM.batch({plan.total_items}, {case.seed}))"
    cuts = ", ".join(str(plan.items(j)) for j in range(len(plan.micro_batches)))
    chosen = _function(
        "batch_of(items)", "Return some of the items as one batch.", "return Items(DATA).__getitems__(items)"
    )
    return f"{data}\nMICRO_BATCHES = [{cuts}]\n\n\n{chosen}"


# The check of a script: tables of the expected, observed and allowed values, the large batch, and `main`.
#
# The values are read from the violation's evidence; no loop is run.


AT_A_STEP = ("gradient", "none-pattern", "non-finite")
"""Kinds of violation that show in the gradients at one step."""
MOST_SHOWN = 4096
"""Largest number of elements of a parameter whose observed gradient a script contains."""
HANGS = ("timed-out", "endless")
"""Diagnoses for which a script limits the loop's time. A loop may catch the exception that should stop it."""
MAIN = '''\
def main():
    """Return 1 while the fault is there and 0 when it is gone."""
{body}
    print("the fault is gone" if right else "the fault is there")
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(exit_status(main))'''
RUN = """\
loop, model, loader, pairs = load_loop(), make_model(), loader_over(DATA, MICRO_BATCHES), Pairs(loss)
optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
run = TrainingRun(
    model=model,
    optimizer=optimizer,
    loader=loader,
    loss=loss,
    pairs=pairs.over(loader),
    criterion=pairs.criterion,
    count=count,
    accumulation_steps={plan.accumulation_steps},
    epochs={plan.epochs},
    reduction="{reduction}",
    device=DEVICE,
    dtype=DTYPE,
)
observer = Observer(model, optimizer, limit={plan.step_limit})
torch.manual_seed({seed})"""


def allowed_text(violation: Violation) -> str:
    """Return the table `ALLOWED` of the parameter with the largest error."""
    evidence = violation.evidence
    assert evidence is not None
    name = violation.parameter or ""
    return table("ALLOWED", {name: _short(evidence.layout.part(evidence.allowed, name))})


def has_literal(violation: Violation) -> bool:
    """Return whether the script compares with the expected gradient as numbers.

    Otherwise it compares with the large batch that it computes: the expected gradient depends on the parameters where
    the loop has changed them, and the gradient of a user's model may be large.
    """
    return violation.case.spec is not None and not _moves(violation)


def _moves(violation: Violation) -> bool:
    """Whether the parameters at the step may depend on the loop: under a real optimizer, or where it edits them."""
    return violation.moved or violation.case.optimizer is not None


def numbers_text(violation: Violation) -> str:
    """Return the tables `EXPECTED`, `OBSERVED` and `ALLOWED` of a step's gradients."""
    evidence = violation.evidence
    assert evidence is not None, f"a violation of kind {violation.kind} comes with the gradients that show it"
    layout, tables = evidence.layout, []
    names, allowed = [violation.parameter or ""], {violation.parameter or "": violation.allowed}
    if violation.case.spec is not None:
        names = list(layout.names)
        allowed = {name: _short(layout.part(evidence.allowed, name)) for name in names}
    if has_literal(violation):
        tables.append(table("EXPECTED", {name: layout.part(evidence.expected, name).tolist() for name in names}))
    seen = {name: evidence.seen(name) for name in names}
    observed = {n: None if g is None else g.tolist() for n, g in seen.items() if g is None or g.size <= MOST_SHOWN}
    return "\n\n".join([*tables, table("OBSERVED", observed), table("ALLOWED", allowed)])


def _short(allowed: Vector) -> Any:
    """Return the bounds of a parameter's elements as nested lists, or as one number where all are equal."""
    return allowed.flat[0].item() if np.ptp(allowed) == 0 else allowed.tolist()


def large_batch_text(violation: Violation, sources: CopiedSource) -> str:
    """Return `large_batch`, which computes the expected gradient of the violated window in torch."""
    sources.copy(parameter_gradients, to_dtype)
    index, moved = violation.window or 0, _moves(violation)
    lines = [
        f"def large_batch({'parameters' if moved else ''}):",
        f'    """Return the gradient of window {index}\'s items in one batch, in float64."""',
        "    model = make_model().double()",
        *(["    model.load_state_dict(parameters, strict=False)"] if moved else []),
        f"    batch = to_dtype(batch_of({violation.case.plan.window_items(index)}), torch.float64)",
        "    return parameter_gradients(loss(model, batch), model)",
    ]
    return "\n".join(lines)


def main_text(violation: Violation, reduction: str, time_limit_s: float | None, sources: CopiedSource) -> str:
    """Return `main`, which checks what the violation says was wrong."""
    if violation.kind == "not-accumulable":
        body = _objective(violation, reduction, sources)
    else:
        sources.copy(loader_over, Pairs, Observer, runtime.completes)
        case, further = violation.case, ""
        if violation.diagnosis in HANGS and time_limit_s:
            further = f", seconds={time_limit_s:g}"
        elif violation.kind == "raised":
            further = ", may_raise=True"
        run = RUN.format(plan=case.plan, reduction=reduction, seed=case.seed)
        body = [run, *_check(violation, f"right = completes(loop, run, observer{further})", sources)]
    sources.copy(runtime.exit_status)
    return MAIN.format(body=textwrap.indent("\n".join(body), "    "))


def _check(violation: Violation, completes: str, sources: CopiedSource) -> list[str]:
    """Return the statements that run the loop and decide what `right` is.

    Args:
        violation: what was wrong.
        completes: the statement that runs the loop.
        sources: gets the functions that the statements call.
    """
    plan = violation.case.plan
    if violation.kind == "raised":
        return [completes]
    if violation.kind == "step-count" or violation.kind in AT_A_STEP:
        sources.copy(runtime.steps_are_right)
        steps = [f"{completes} and steps_are_right(observer, {plan.steps})"]
        return steps if violation.kind == "step-count" else [*steps, *_gradient(violation, sources)]
    if violation.diagnosis == "changed-model":
        sources.copy(structure, runtime.structure_is_kept)
        return ["before = structure(model)", f"{completes} and structure_is_kept(before, model)"]
    sources.copy(runtime.parameters_are_right)
    make = "None" if violation.case.optimizer is None else "make_optimizer"
    return [f"{completes} and parameters_are_right(observer, {make})"]


def _gradient(violation: Violation, sources: CopiedSource) -> list[str]:
    sources.copy(runtime.gradient_is_right, runtime.largest_difference)
    plan, window, epoch = violation.case.plan, violation.window or 0, violation.epoch or 0
    step = epoch * len(plan.windows) + window
    where = f"step {step}, window {window} of epoch {epoch} (micro-batches {list(plan.windows[window])}):"
    moved = "" if not _moves(violation) else f"observer.observations[{step}].parameters"
    expected, beside = "large", []
    if has_literal(violation):
        expected = "EXPECTED"
        beside = [
            'print(f"torch\'s large batch differs from EXPECTED by at most {largest_difference(EXPECTED, large):.3g}")'
        ]
    lines = [
        f'print("{where}")',
        f"observed, large = observer.observations[{step}].gradients, large_batch({moved})",
        *beside,
        f"right = gradient_is_right(observed, {expected}, ALLOWED)",
        'print(f"the gradient differs from OBSERVED by at most {largest_difference(OBSERVED, observed):.3g}")',
    ]
    return ["if right:", *(f"    {line}" for line in lines)]


def _objective(violation: Violation, reduction: str, sources: CopiedSource) -> list[str]:
    sources.copy(to_dtype)
    plan, counted = violation.case.plan, "count" if reduction == "mean" else None
    items, members, window = range(plan.total_items), range(len(plan.micro_batches)), violation.window
    if window is None:
        sources.copy(runtime.is_sum_over_items)
        right = f"is_sum_over_items(model, loss, {counted}, whole, parts)"
    else:
        sources.copy(runtime.gradient_accumulates)
        items, members = plan.window_items(window), range(plan.windows[window][0], plan.windows[window][-1] + 1)
        right = f"gradient_accumulates(model, loss, {counted}, whole, parts, ALLOWED)"
    return [
        "model = make_model().double()",
        f"whole = to_dtype(batch_of({items}), torch.float64)",
        f"parts = [to_dtype(batch_of(MICRO_BATCHES[j]), torch.float64) for j in {members}]",
        f"right = {right}",
    ]


WRITER_WIDTH = 110


def script_text(
    loop: Loop,
    name: str,
    violation: Violation,
    *,
    problem: Problem | None = None,
    time_limit_s: float | None = DEFAULT_TIME_LIMIT,
) -> str:
    """Return the text of a script that shows a violation: exit status 1 while it is there, 0 when it is gone.

    The numbers come from the violation's evidence; the loop is not run.

    Args:
        loop: the subject.
        name: of the loop as the command line takes it: `FILE.py:NAME` and `package.module:NAME` are imported from
            their place, the suite's own loops are printed in full.
        violation: what the script shows; with its evidence, where there is one for its kind.
        problem: the user's problem that the violation's case names, if it is not a generated one.
        time_limit_s: seconds that the loop may take, which the script repeats for a loop that took longer.
    """
    case, sources = violation.case, CopiedSource()
    sources.add_import("torch")
    parts = [f'DEVICE, DTYPE = torch.device("{case.device}"), torch.{case.dtype}']
    if case.device == "cuda":
        parts[0] += '\ntorch.set_float32_matmul_precision("highest")\ntorch.backends.cudnn.allow_tf32 = False'
    for title, text in _sections(loop, name, violation, problem, time_limit_s, sources):
        # definitions stand above the first text that needs them
        parts.append(f"# {title}\n\n{_joined([*sources.take(), *text])}")
    body = "\n\n\n".join(parts)
    for special in ("inf", "nan"):
        if re.search(rf"(?<![\w.\"]){special}\b", body):
            sources.add_import("math", special)
    head = [_docstring(name, violation), "from __future__ import annotations", sources.imports()]
    return "\n\n".join([*head, body]) + "\n"


def _sections(
    loop: Loop,
    name: str,
    violation: Violation,
    problem: Problem | None,
    time_limit_s: float | None,
    sources: CopiedSource,
) -> Iterator[tuple[str, list[str]]]:
    """Yield each section's title and its texts, with what they need gathered in `sources`."""
    case = violation.case
    instance = instance_of(case, problem)
    if violation.kind != "not-accumulable":
        sources.copy(TrainingRun)
        yield "The argument of a loop", []
        yield "The loop", [loop_text(loop, name, sources)]
        yield "The optimizer", [optimizer_text(case, sources)]
    if problem is None:
        yield "The model and its loss", [generated_text(instance, sources)]
    else:
        yield "The model and its loss", [problem_text(problem, instance, sources)]
    yield "The data", [data_text(instance, sources)]
    if violation.kind in AT_A_STEP:
        yield "The gradient: expected, observed, and the error that rounding allows", [numbers_text(violation)]
        yield "The expected gradient, computed by torch", [large_batch_text(violation, sources)]
    elif violation.evidence is not None:
        yield "The error that rounding allows", [allowed_text(violation)]
    yield "The check", [main_text(violation, instance.problem.reduction, time_limit_s, sources)]


def _joined(texts: list[str]) -> str:
    """Join definitions with two empty lines around functions and classes, and none between constants."""
    joined = ""
    for text in texts:
        is_line = "\n" not in text and joined and "\n" not in joined.rpartition("\n\n\n")[2]
        joined += ("\n" if is_line else "\n\n\n") + text if joined else text
    return joined


def _docstring(name: str, violation: Violation) -> str:
    kind = violation_title(violation.kind, violation.diagnosis)
    where = ""
    if violation.window is not None:
        where = f"Window {violation.window} of epoch {violation.epoch}"
        if violation.parameter is not None and violation.error is not None and violation.allowed is not None:
            where += f", {violation.parameter}: off by {error_text(violation.error, violation.allowed)}."
    needs = "It needs Python and torch alone"
    if violation.kind != "not-accumulable" and is_imported(name):
        needs += ", and the file of the loop, which may import other packages (gradcheck_suite too)"
    if violation.case.problem_name:
        needs += f", and {violation.case.problem}, which imports gradcheck_suite for its Problem"
    use = (
        f"Run this file with Python: exit status 1 while the fault is there, 0 when it is gone, 2 where something "
        f"cannot be imported or fails otherwise. {needs}."
    )
    lines = [
        f"{name}: {kind}.",
        "",
        *textwrap.wrap(violation.explanation, WRITER_WIDTH),
        *textwrap.wrap(where, WRITER_WIDTH),
        *(short for line in details_of(violation) for short in _within(line)),
        "",
        *(f"    {line}" for line in describe_case(violation.case)),
        "",
        *textwrap.wrap(use, WRITER_WIDTH),
        f"Written by gradcheck-suite with torch {torch.__version__}, for case {violation.case.digest}.",
    ]
    text = "\n".join(line.rstrip() for line in lines).replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    return f'"""{text}\n"""'


def _within(line: str) -> list[str]:
    return textwrap.wrap(line, WRITER_WIDTH, subsequent_indent="  ") if len(line) > WRITER_WIDTH else [line]
