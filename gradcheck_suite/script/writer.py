"""A violation as one Python file that needs torch alone: model, data, loop, right gradient, and the check."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import symtable
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from pprint import pformat
from types import FunctionType
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
from gradcheck_suite.core.case import Case, Layer
from gradcheck_suite.core.comparison import Vector
from gradcheck_suite.core.contract import DEFAULT_TIME_LIMIT, Loop, Problem, TrainingRun
from gradcheck_suite.core.results import Violation
from gradcheck_suite.loops.trainers import TRAINERS
from gradcheck_suite.run.instance import Instance, Pairs, instance_of, leaves, loader_over, map_leaves
from gradcheck_suite.run.observer import Observer, structure, structure_changes
from gradcheck_suite.run.optimizers import OPTIMIZERS, NoOpOptimizer, in_groups
from gradcheck_suite.script import runtime

PACKAGE = __name__.partition(".")[0]
WIDTH = 120
AT_A_STEP = ("gradient", "none-pattern", "non-finite")
"""Kinds of violation that show in the gradients at one step."""
MOST_SHOWN = 4096
"""Largest number of elements of a parameter whose observed gradient a script contains."""
HANGS = ("timed-out", "endless")
"""Diagnoses for which a script limits the loop's time. A loop may catch the exception that should stop it."""
WRITTEN = frozenset(
    "DEVICE DTYPE TrainingRun Model make_model loss count FOUND PROBLEM DATA MICRO_BATCHES batch_of EXPECTED OBSERVED "
    "ALLOWED large_batch main model loader pairs optimizer steps run observer right observed large whole parts".split()
)
"""Names that a script itself gives a meaning to."""
UNUSUAL = re.compile(r"\b(pairs|criterion|dataset|\w*sampler|batch_size|collate_fn|getattr|vars|__dict__)\b")
"""What only some loops ask for: pairs, and more of a loader than its micro-batches and their number."""


# Definitions copied from modules, each with all that it needs: a name is looked up among its module's definitions.


class CannotCopyError(Exception):
    """A definition does not stand alone."""


@cache
def _module(name: str) -> tuple[str, ast.Module, dict[str, Any]]:
    """Return a module's source, its tree, and for each top-level name its statement, or the import that it comes from."""
    source = inspect.getsource(importlib.import_module(name))
    tree, found = ast.parse(source), dict[str, Any]()
    guarded = [n for node in tree.body if _is_guard(node, "TYPE_CHECKING") for n in getattr(node, "body", ())]
    for node in [*guarded, *tree.body]:
        if isinstance(node, ast.Import):
            found |= {a.asname or a.name.partition(".")[0]: (a.name, None, a.asname) for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {a.asname or a.name: (node.module, a.name, a.asname) for a in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {n.id: node for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return source, tree, found


def _is_guard(node: ast.stmt, *tests: str) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in tests


def _is_copyable(node: ast.stmt) -> bool:
    """Return whether a statement of a user's module does nothing when it runs but give names a meaning.

    What else a module does, and what modules of the user's it imports, may be what the loop's fault comes from.
    """
    if isinstance(node, ast.Import | ast.ImportFrom):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else ["." * node.level + (node.module or "")]
        return {name.partition(".")[0] for name in modules} <= {*sys.stdlib_module_names, "torch", PACKAGE}
    if isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, ast.FunctionDef | ast.ClassDef) or _is_guard(node, "TYPE_CHECKING", "__name__ == '__main__'")


def _global_names(text: str) -> list[str]:
    """Return the names that a definition takes from outside of it; parameters and local variables are none of them."""
    tables = [symtable.symtable(text, "definition", "exec")]
    top = tables[0]
    for table in tables:
        tables += table.get_children()
    symbols = [s for t in tables for s in t.get_symbols() if s.is_referenced() and (s.is_global() or t is top)]
    return sorted({symbol.get_name() for symbol in symbols})


def _plain(text: str) -> str:
    """Return a definition of the suite without the types of its parameters, and with the first lines of docstrings."""
    data, cuts = text.encode(), []
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def end_of(node: Any) -> int:
        return starts[node.end_lineno - 1] + node.end_col_offset

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.arg) and node.annotation:
            cuts.append((starts[node.lineno - 1] + node.col_offset + len(node.arg), end_of(node.annotation)))
        if isinstance(node, ast.FunctionDef):
            cuts += [(data.rindex(b" ->", 0, end_of(node.returns)), end_of(node.returns))] if node.returns else []
            inner = [n for n in ast.walk(node) if isinstance(n, ast.AnnAssign) and n.value]
            cuts += [(end_of(n.target), end_of(n.annotation)) for n in inner]
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and "\n" in (ast.get_docstring(node) or ""):
            docstring = node.body[0]
            cuts.append((data.index(b"\n", starts[docstring.lineno - 1]), end_of(docstring) - 3))
    for start, end in sorted(set(cuts), reverse=True):
        data = data[:start] + data[end:]
    return re.sub(r"  # type: ignore\[[\w-]+\]", "", data.decode())


class Sources:
    """Definitions and imports gathered so far; a definition comes after those it needs."""

    def __init__(self) -> None:
        self._imports: set[tuple[str, str | None, str | None]] = set()
        self._texts: dict[str, str] = {}
        self._taken: set[str] = set()

    def copy(self, *objects: Any) -> None:
        """Gather some functions and classes, and all that they need."""
        for what in objects:
            self.add(what.__module__, what.__name__)

    def add(self, module: str, *names: str) -> None:
        """Gather what some names mean in a module.

        Raises:
            CannotCopyError: one means nothing there, or something that cannot stand in this script.
        """
        for name in names:
            found = _module(module)[2].get(name)
            if isinstance(found, tuple):
                source, original, renamed = found
                if source.partition(".")[0] != PACKAGE:
                    self._imports.add(found)
                elif original is None or renamed is not None:
                    raise CannotCopyError(f"{name} of {module} has another name where it is defined")
                elif name not in WRITTEN:
                    self.add(source, original)
            elif found is not None:
                self._define(module, name, found)
            elif not hasattr(builtins, name):
                raise CannotCopyError(f"{name} is not defined in {module}")

    def _define(self, module: str, name: str, node: Any) -> None:
        source, _, names = _module(module)
        is_own = module.partition(".")[0] == PACKAGE

        def says_something(decorator: ast.expr) -> bool:
            # one of the suite's says something to the suite only
            first = names.get(next(n.id for n in ast.walk(decorator) if isinstance(n, ast.Name)))
            return not (first[0].partition(".")[0] == PACKAGE if isinstance(first, tuple) else is_own and first)

        kept = [f"@{ast.get_source_segment(source, d)}" for d in getattr(node, "decorator_list", ()) if says_something(d)]
        text = "\n".join([*kept, *source.splitlines()[node.lineno - 1 : node.end_lineno]])
        text = _plain(text) if is_own else text
        if self._texts.get(name, text) != text or (name in WRITTEN and name != "TrainingRun"):
            raise CannotCopyError(f"{name} of {module} and of another module cannot stand in one script")
        if name not in self._texts and name not in WRITTEN:
            self._texts[name] = text
            self.add(module, *_global_names(text))
            # what it needs has come in between
            self._texts[name] = self._texts.pop(name)

    def call(self, function: Any, *arguments: Any) -> str:
        """Return the call of a function of the suite, written out where the function is one expression.

        Args:
            function: to copy, or to write out.
            arguments: the text of each, or a mapping whose entries are written out.
        """
        _, tree, names = _module(function.__module__)
        node = names.get(function.__name__)
        if function.__name__ == "<lambda>":
            line = function.__code__.co_firstlineno
            node = next(n for n in ast.walk(tree) if isinstance(n, ast.Lambda) and n.lineno == line)
        given = dict(zip(inspect.signature(function).parameters, arguments, strict=True))

        class Put(ast.NodeTransformer):
            def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
                if isinstance(node.value, ast.Name) and isinstance(given.get(node.value.id), Mapping):
                    return ast.Constant(given[node.value.id][ast.literal_eval(node.slice)])
                return self.generic_visit(node)

            def visit_Name(self, node: ast.Name) -> ast.AST:
                found = names.get(node.id)
                if node.id in given:
                    return ast.parse(_text(given[node.id]), mode="eval").body
                return found.value if isinstance(getattr(found, "value", None), ast.Attribute) else node

        uses = Counter(n.id for n in ast.walk(node or tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
        for statement in [ast.Return(node.body)] if isinstance(node, ast.Lambda) else getattr(node, "body", ()):
            if isinstance(statement, ast.Expr):  # the docstring
                continue
            if any(uses[name] > 1 and "(" in value for name, value in given.items() if isinstance(value, str)):
                break  # it would be computed twice
            if not isinstance(statement, ast.Return | ast.Assign) or statement.value is None:
                break
            # of a copy: the tree is kept
            text = _text(ast.unparse(Put().visit(ast.parse(ast.unparse(statement.value), mode="eval"))))
            if isinstance(statement, ast.Return):
                ours = {name for argument in arguments for name in _global_names(_text(argument))}
                self.add(function.__module__, *sorted({*_global_names(text)} - ours))
                return text
            given[ast.unparse(statement.targets[0])] = text
        return f"{self.expression(function)}({', '.join(map(_text, arguments))})"

    def expression(self, function: Any) -> str:
        """Return the name of a function of the suite, or the call of the function that makes it."""
        maker, _, inner = function.__qualname__.partition(".<locals>.")
        self.add(function.__module__, maker)
        if not inner:
            return str(maker)
        closed_over, arguments = inspect.getclosurevars(function).nonlocals, []
        for name in inspect.signature(sys.modules[function.__module__].__dict__[maker]).parameters:
            value = closed_over[name]
            arguments.append(f"{name}={self.expression(value) if callable(value) else repr(value)}")
        return f"{maker}({', '.join(arguments)})"

    def add_import(self, module: str, name: str | None = None) -> None:
        """Have the script import a module, or a name from it."""
        self._imports.add((module, name, None))

    def take(self) -> list[str]:
        """Return the texts gathered since the last call, each after those it needs."""
        texts = [text for text in dict.fromkeys(self._texts.values()) if text not in self._taken]
        self._taken.update(texts)
        return texts

    def imports(self) -> str:
        """Return the import statements, those of Python's own modules first."""
        groups: tuple[set[str], set[str]] = (set(), set())
        for module, name, renamed in self._imports:
            named = sorted({f"{n} as {r}" if r else n for m, n, r in self._imports if m == module and n})
            line = f"from {module} import {', '.join(named)}" if name else f"import {module}{f' as {renamed}' * bool(renamed)}"
            groups[module.partition(".")[0] not in sys.stdlib_module_names].add(line)
        in_order = [sorted(group, key=lambda line: (line.startswith("from"), line)) for group in groups]
        return "\n\n".join("\n".join(group) for group in in_order if group)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _text(value: Any) -> str:
    return (value if isinstance(value, str) else repr(dict(value))).replace("'", '"')


def literal(value: Any, column: int = 0) -> str:
    """Return numbers, nested lists or dicts of them as source that evaluates to the same; `nan` and `inf` by name."""
    text = pformat(value, width=WIDTH - column, compact=True, sort_dicts=False).replace("'", '"')
    return text.replace("\n", "\n" + " " * column)


def _values(tensor: torch.Tensor) -> Any:
    """Return a tensor's entries as nested lists of Python numbers, without rounding: float64 has every float value."""
    tensor = tensor.detach().cpu()
    return (tensor.to(torch.float64) if tensor.is_floating_point() else tensor).tolist()


def _function(signature: str, what: str, body: str) -> str:
    return f'def {signature}:\n    """{what}"""\n{textwrap.indent(body, "    ")}'


# A generated model as ordinary `torch.nn` code. A call's arguments are read from the built module, which keeps them as
# attributes of the same names, as torch's modules do. Parameters have the names that they have in the suite.


def _calls(layers: Sequence[Layer], chain: torch.nn.Module, sources: Sources) -> Iterator[str]:
    # not `children()`, which leaves out a module's second place
    for layer, module in zip(layers, chain._modules.values(), strict=True):
        if layer_definition(layer).wraps:
            assert module is not None
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


def constructor_call(module: Any, sources: Sources) -> str:
    """Return the call that builds a module like this one, without its parameters' values."""
    kind, prefix = type(module), "torch.nn."
    if parametrize.is_parametrized(module, "weight"):
        norm, kind = module.get_submodule("parametrizations.weight.0"), kind.__bases__[0]
        return f"torch.nn.utils.parametrizations.weight_norm({_call(prefix, kind, module, sources)}, dim={norm.dim})"
    if kind.__module__.partition(".")[0] == PACKAGE:
        sources.copy(kind)
        prefix = ""
    return _call(prefix, kind, module, sources)


def _call(prefix: str, kind: type, module: Any, sources: Sources) -> str:
    parameters, arguments = dict(inspect.signature(kind).parameters), []
    if issubclass(kind, torch.nn.RNNBase):
        # RNN, GRU and LSTM take *args and **kwargs and pass them to RNNBase
        nonlinearity = inspect.Parameter("nonlinearity", inspect.Parameter.KEYWORD_ONLY, default="tanh")
        parameters = {**inspect.signature(torch.nn.RNNBase).parameters, "nonlinearity": nonlinearity}
        del parameters["mode"]
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if not hasattr(module, name):
            assert parameter.default is not parameter.empty, f"{kind.__name__} does not keep {name}"
            continue
        value, default = getattr(module, name), parameter.default
        if name == "bias":
            value = value is not None and value is not False
        text = constructor_call(value, sources) if isinstance(value, torch.nn.Module) else repr(value).replace("'", '"')
        if default is parameter.empty and prefix:
            arguments.append(text)
        # torch spreads a default over the axes of a convolution
        elif value != default and not (isinstance(value, tuple) and set(value) == {default}):
            arguments.append(f"{name}={text}")
    return f"{prefix}{kind.__name__}({', '.join(arguments)})"


# The parts of a script that say what is trained, on which data, and by which loop and optimizer.


def generated_text(instance: Instance, sources: Sources) -> Iterator[str]:
    """Yield `make_model`, `loss` and `count` of a generated problem, in ordinary torch."""
    spec, model = instance.case.spec, instance.model()
    assert spec is not None
    definition, whole = loss_definition(spec.loss), needs_batch(spec)
    wraps = any(layer_definition(layer).wraps for layer in spec.layers)
    calls = list(_calls(spec.layers, model, sources))
    inside = calls[0].rstrip(",") if len(calls) == 1 else "\n" + textwrap.indent("\n".join(calls), "    ") + "\n"
    if whole or wraps:
        forward = ['x = batch["x"]'] * whole + [*_forward(spec.layers, input_signal(spec.input), ()), "return x"]
        signature, lines = f"forward(self, {'batch' if whole else 'x'})", textwrap.indent("\n".join(forward), "        ")
        yield f"class Model(torch.nn.Sequential):\n    def {signature}:\n{lines}"
    built = "Model" if whole or wraps else "torch.nn.Sequential"
    place = "".join
    ties = [
        " = ".join("model" + place(f"[{p}]" if p.isdigit() else f".{p}" for p in n.split(".")) for n in tie)
        for tie in spec.ties
    ]
    make = [
        f"model = {built}({inside}).to(DEVICE, DTYPE)",
        *ties,
        f"values = {literal({name: _values(tensor) for name, tensor in model.state_dict().items()}, 9)}",
        "model.load_state_dict({name: torch.tensor(v, dtype=torch.float64) for name, v in values.items()})",
        *(f'model.get_parameter("{n}").requires_grad_(False)' for n, p in model.named_parameters() if not p.requires_grad),
        "return model.train()",
    ]
    yield _function("make_model()", "Return the model as it is before the first step.", "\n".join(make))
    output = "model(batch)" if whole else 'model(batch["x"])'
    objective = sources.call(definition.torch_loss, spec.loss.o, output, "batch", f'"{spec.loss.reduction}"')
    yield _function("loss(model, batch)", f"Return the loss of a batch, its items' {spec.loss.reduction}.", f"return {objective}")
    yield _count_text(sources.call(definition.count, spec.loss.o, "batch"), instance)


def problem_text(problem: Problem, instance: Instance, sources: Sources) -> Iterator[str]:
    """Yield `make_model`, `loss` and `count` of a user's problem, which is imported from its place."""
    sources.copy(map_leaves, leaves)
    yield f"FOUND = {_loaded(str(instance.case.problem_name), sources)}\nPROBLEM = FOUND() if callable(FOUND) else FOUND"
    make = f"return PROBLEM.model({instance.case.seed}).to(DEVICE, DTYPE).train()"
    yield _function("make_model()", "Return the model as it is before the first step.", make)
    yield _function("loss(model, batch)", "Return the loss of a batch.", "return PROBLEM.loss(model, batch)")
    count = "torch.tensor(len(next(leaves(batch))))" if problem.count is None else "torch.as_tensor(PROBLEM.count(batch))"
    yield _count_text(count, instance)


def _count_text(counted: str, instance: Instance) -> str:
    dtype = torch.promote_types(torch.float32, instance.dtype)
    return _function("count(batch)", "Return what the mean over a batch divides by.", f"return {counted}.to(DEVICE, {dtype})")


def data_text(instance: Instance) -> Iterator[str]:
    """Yield `DATA`, the items of one epoch, `MICRO_BATCHES`, the items of each micro-batch, and `batch_of`."""
    plan, lines, item = instance.case.plan, [], "t[list(items)].to(dtype if t.is_floating_point() else t.dtype)"
    if instance.case.spec is None:
        moved = "t.to(DEVICE, DTYPE) if t.is_floating_point() else t.to(DEVICE)"
        chosen = f"map_leaves(lambda t: {item}, DATA)"
        data = f"DATA = map_leaves(lambda t: {moved}, PROBLEM.batch({plan.total_items}, {instance.case.seed}))"
    else:
        chosen = f"{{name: {item} for name, t in DATA.items()}}"
        for name, tensor in instance.data.items():
            dtype = "dtype=DTYPE, " * tensor.is_floating_point()
            lines.append(f'    "{name}": torch.tensor({literal(_values(tensor), len(name) + 22)}, {dtype}device=DEVICE),\n')
        data = f"DATA = {{\n{''.join(lines)}}}"
    yield f"{data}\nMICRO_BATCHES = [{', '.join(str(plan.items(j)) for j in range(len(plan.micro_batches)))}]"
    what = "Return copies of some of the items as one batch."
    yield _function("batch_of(items, dtype=DTYPE)", what, f"return {chosen}")


def _loaded(name: str, sources: Sources) -> str:
    """Return the call that loads what `FILE.py:NAME` or `package.module:NAME` stands for."""
    sources.copy(runtime.load)
    place, _, attribute = name.rpartition(":")
    folder = Path.cwd()
    if place.endswith(".py"):
        folder, place = Path(place).resolve().parent, Path(place).name
    return f"load({place!r}, {attribute!r}, folder={folder.as_posix()!r})".replace("'", '"')


def _loop(loop: Any, name: str, sources: Sources, *, copied: bool) -> tuple[str, list[str]]:
    """Return the expression of the loop, and the texts it needs: of a user's own, its definition or its import.

    Raises:
        CannotCopyError: the loop is to be copied, and does not stand alone.
    """
    if name not in TRAINERS and ":" not in name:
        return sources.expression(loop), []
    if not copied:
        place = TRAINERS[name].place if name in TRAINERS else name
        return "loop", [f"loop = {_loaded(place, sources)}"]
    attribute = name.rpartition(":")[2]
    if not isinstance(loop, FunctionType) or loop.__qualname__ != attribute or name in TRAINERS:
        raise CannotCopyError(f"{name} is no function of a module")
    if not all(map(_is_copyable, _module(loop.__module__)[1].body)):
        raise CannotCopyError(f"{loop.__module__} does more than to define functions")
    sources.add(loop.__module__, attribute)
    return attribute, []


def _optimizer(case: Case, parameters: str, sources: Sources) -> str:
    """Return the expression of the case's real optimizer, or of the one whose step changes nothing."""
    if case.optimizer is None:
        sources.copy(NoOpOptimizer)
        call = f"NoOpOptimizer({parameters})"
    else:
        call = sources.call(OPTIMIZERS[case.optimizer], parameters)
    if case.groups > 1:
        sources.copy(in_groups)
    return call if case.groups == 1 else f"in_groups({call}, {case.groups})"


# The check of a script: the expected, observed and allowed values, the large batch, and `main`.


MAIN = '''\
def main():
    """Return 1 while the fault is there and 0 when it is gone."""
    model = make_model()
{body}
    print("the fault is gone" if right else "the fault is there")
    return 0 if right else 1


if __name__ == "__main__":
    try:
        status = main()
    except BaseException as error:
        traceback.print_exc()
        print("This is another failure than the fault that the script shows.", file=sys.stderr)
        status = 130 if isinstance(error, KeyboardInterrupt) else 2
    raise SystemExit(status)'''
RUN = """\
loader = {loader}
optimizer = {optimizer}
steps = recorded(model, optimizer, limit={plan.step_limit})
given = dict(
    model=model, optimizer=optimizer, loader=loader, loss=loss, count=count, {pairs} reduction="{reduction}",
    accumulation_steps={plan.accumulation_steps}, epochs={plan.epochs}, device=DEVICE, dtype=DTYPE, rank=0, world_size=1,
)
run = make_dataclass("TrainingRun", given, frozen=True)(**given)
torch.manual_seed({seed})"""


def _moves(violation: Violation) -> bool:
    """Whether the parameters at the step may depend on the loop: under a real optimizer, or where it edits them."""
    return violation.moved or violation.case.optimizer is not None


def _has_literal(violation: Violation) -> bool:
    """Return whether the script compares with the expected gradient as numbers, not with the large batch it computes.

    The expected gradient depends on the parameters where the loop has changed them, and that of a user's model may be
    large.
    """
    return violation.case.spec is not None and not _moves(violation)


def numbers_text(violation: Violation) -> str:
    """Return the tables `EXPECTED`, `OBSERVED` and `ALLOWED` of a step's gradients, as far as the check needs them."""
    evidence, shown = violation.evidence, dict[str, Any]()
    assert evidence is not None, f"a violation of kind {violation.kind} comes with the gradients that show it"
    names = list(evidence.layout.names) if violation.case.spec is not None else [violation.parameter or ""]
    if _has_literal(violation):
        shown["EXPECTED"] = {name: evidence.layout.part(evidence.expected, name).tolist() for name in names}
    seen = {name: evidence.seen(name) for name in names}
    shown["OBSERVED"] = {n: g if g is None else g.tolist() for n, g in seen.items() if g is None or g.size <= MOST_SHOWN}
    shown["ALLOWED"] = {name: _short(evidence.layout.part(evidence.allowed, name)) for name in names}
    if violation.case.spec is None:
        shown["ALLOWED"] = {names[0]: violation.allowed}
    return "\n".join(f"{name} = {literal(value, len(name) + 3)}" for name, value in shown.items())


def _short(allowed: Vector) -> Any:
    """Return the bounds of a parameter's elements as nested lists, or as one number where all are equal."""
    return allowed.flat[0].item() if np.ptp(allowed) == 0 else allowed.tolist()


def large_batch_text(violation: Violation) -> str:
    """Return `large_batch`, which computes the expected gradient of the violated window in torch."""
    index, moved = violation.window or 0, _moves(violation)
    body = [
        "model = make_model().double()",
        *["model.load_state_dict(parameters, strict=False)"] * moved,
        f"large = loss(model, batch_of({violation.case.plan.window_items(index)}, torch.float64))",
        "if large.requires_grad:",
        "    large.backward()",
        "named = ((name, p.grad) for name, p in model.named_parameters() if p.requires_grad)",
        "return {name: None if gradient is None else gradient.to_dense() for name, gradient in named}",
    ]
    what = f"Return the gradient of window {index}'s items in one batch, in float64."
    return _function(f"large_batch({'parameters' * moved})", what, "\n".join(body))


def _check(violation: Violation, call: str, time_limit_s: float | None, sources: Sources) -> list[str]:
    """Return the statements that run the loop and decide what `right` is."""
    case, plan = violation.case, violation.case.plan
    if violation.diagnosis in HANGS and time_limit_s:
        sources.add_import("faulthandler")
        before = f"faulthandler.dump_traceback_later({time_limit_s:g}, exit=True)"
        lines = [before, call, "faulthandler.cancel_dump_traceback_later()", "right = True"]
    elif violation.kind == "raised":
        shown = ["traceback.print_exc(file=sys.stdout)", 'print("the loop raised this exception")', "right = False"]
        caught = ["except KeyboardInterrupt:", "    raise", "except BaseException:", *(f"    {line}" for line in shown)]
        return ["try:", f"    {call}", "    right = True", *caught]
    elif violation.diagnosis == "changed-model":
        sources.copy(structure, structure_changes)
        shown = """print(f"changes to the model's parameters other than their values: {right or 'none'}")"""
        return ["before = structure(model)", call, "right = structure_changes(before, structure(model))", shown, "right = not right"]
    elif violation.kind == "parameters":
        sources.copy(Observer, runtime.parameters_are_right)
        make = "None" if case.optimizer is None else f"lambda parameters: {_optimizer(case, 'parameters', sources)}"
        observer = f"observer = Observer(model, optimizer, limit={plan.step_limit + 1})"
        return [observer, call, f"right = parameters_are_right(observer, {make})"]
    else:
        lines = [call]
    if violation.kind == "raised":
        return lines
    counted = f'print(f"optimizer.step() was called {{len(steps)}} times, expected {plan.steps}: one call per window")'
    if violation.kind == "step-count":
        return [*lines, counted, f"right = len(steps) == {plan.steps}"]
    return [*lines, counted, f"if right := len(steps) == {plan.steps}:", *_gradient(violation, sources)]


def _gradient(violation: Violation, sources: Sources) -> list[str]:
    sources.copy(runtime.gradient_is_right, runtime.largest_difference)
    plan, window, epoch = violation.case.plan, violation.window or 0, violation.epoch or 0
    step, literal_ = epoch * len(plan.windows) + window, _has_literal(violation)
    beside = """print(f"torch's large batch differs from EXPECTED by at most {largest_difference(EXPECTED, large):.3g}")"""
    lines = [
        f'print("step {step}, window {window} of epoch {epoch} (micro-batches {list(plan.windows[window])}):")',
        f"observed, large = steps[{step}][0], large_batch({f'steps[{step}][1]' * _moves(violation)})",
        *[beside] * literal_,
        f"right = gradient_is_right(observed, {'EXPECTED' if literal_ else 'large'}, ALLOWED)",
        'print(f"the gradient differs from OBSERVED by at most {largest_difference(OBSERVED, observed):.3g}")',
    ]
    return [f"    {line}" for line in lines]


def _objective(violation: Violation, reduction: str, sources: Sources) -> list[str]:
    plan, counted, window = violation.case.plan, "count" if reduction == "mean" else None, violation.window
    items, members = range(plan.total_items), range(len(plan.micro_batches))
    function, allowed = runtime.is_sum_over_items, ""
    if window is not None:
        function, allowed = runtime.gradient_accumulates, ", ALLOWED"  # type: ignore[assignment]
        items, members = plan.window_items(window), range(plan.windows[window][0], plan.windows[window][-1] + 1)
    sources.copy(function)
    return [
        "model = model.double()",
        f"whole = batch_of({items}, torch.float64)",
        f"parts = [batch_of(MICRO_BATCHES[j], torch.float64) for j in {members}]",
        f"right = {function.__name__}(model, loss, {counted}, whole, parts{allowed})",
    ]


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
        name: of the loop as the command line takes it. A loop of `FILE.py:NAME` or `package.module:NAME` is printed in
            full where its module does nothing but define functions by means of torch and Python's own modules, and
            imported from its place otherwise; the suite's own loops are printed in full.
        violation: what the script shows; with its evidence, where there is one for its kind.
        problem: the user's problem that the violation's case names, if it is not a generated one.
        time_limit_s: seconds that the loop may take, which the script repeats for a loop that took longer.
    """
    try:
        return _script(loop, name, violation, problem, time_limit_s, copied=True)
    except CannotCopyError:
        return _script(loop, name, violation, problem, time_limit_s, copied=False)


def _script(
    loop: Loop, name: str, violation: Violation, problem: Problem | None, time_limit_s: float | None, *, copied: bool
) -> str:
    case, sources, parts = violation.case, Sources(), list[str]()
    instance = instance_of(case, problem)
    reduction = instance.problem.reduction

    def add(title: str, *texts: str) -> None:
        # definitions stand above the first text that needs them
        if texts := (*sources.take(), *texts):
            parts.append(f"# {title}\n" + "\n\n\n".join(texts))

    for module in ("sys", "traceback", "torch"):
        sources.add_import(module)
    parts.append(f'DEVICE, DTYPE = torch.device("{case.device}"), torch.{case.dtype}')
    if case.device == "cuda":
        parts[0] += '\ntorch.set_float32_matmul_precision("highest")\ntorch.backends.cudnn.allow_tf32 = False'
    add("The model and its loss", *(problem_text(problem, instance, sources) if problem else generated_text(instance, sources)))
    add("The data", *data_text(instance))
    expression = ""
    if violation.kind != "not-accumulable":
        expression, texts = _loop(loop, name, sources, copied=copied)
        add("The loop", *texts)
    is_plain = expression != "loop" and not UNUSUAL.search(parts[-1])
    numbers = []
    if violation.kind in AT_A_STEP:
        numbers = [numbers_text(violation), large_batch_text(violation)]
    elif violation.evidence is not None:
        name = violation.parameter or ""
        bounds = _short(violation.evidence.layout.part(violation.evidence.allowed, name))
        numbers = [f"ALLOWED = {literal({name: bounds}, 10)}"]
    if numbers:
        add("The gradient: expected, observed, and the error that rounding allows", *numbers)
    if violation.kind == "not-accumulable":
        body = _objective(violation, reduction, sources)
    else:
        body = _run(case, reduction, sources, plain=is_plain)
        body += _check(violation, f"{expression}(run)", time_limit_s, sources)
    add("The check", MAIN.format(body=textwrap.indent("\n".join(body), "    ")))
    text = "\n\n\n".join(parts)
    for special in ("inf", "nan"):
        if re.search(rf"(?<![\w.\"]){special}\b", text):
            sources.add_import("math", special)
    needs = ["the file of the loop, which may import other packages"] * (expression == "loop")
    if problem is not None:
        needs.append(f"{case.problem}, which imports gradcheck_suite for its Problem")
    # types of a user's functions stay as they are
    head = ["from __future__ import annotations"] * bool(re.search(r"(?m)^\s*(def .*(: \w.*\)|->)|\w+: \w)", text))
    return "\n\n".join([_docstring(name, violation, *needs), *head, sources.imports(), text]) + "\n"


def _run(case: Case, reduction: str, sources: Sources, *, plain: bool) -> list[str]:
    """Return the statements that make the argument of the loop; `plain` if the loop only passes over the loader."""
    sources.copy(runtime.recorded)
    sources.add_import("dataclasses", "make_dataclass")
    loader, pairs, first = "DataLoader(MICRO_BATCHES, batch_size=None, collate_fn=batch_of)", "pairs=None, criterion=None,", []
    if plain:
        sources.add_import("torch.utils.data", "DataLoader")
    else:
        sources.copy(loader_over, Pairs)
        loader, pairs = "loader_over(DATA, MICRO_BATCHES)", "pairs=pairs.over(loader), criterion=pairs.criterion,"
        first = ["pairs = Pairs(loss)"]
    optimizer = _optimizer(case, "[p for p in model.parameters() if p.requires_grad]", sources)
    run = RUN.format(plan=case.plan, reduction=reduction, seed=case.seed, loader=loader, pairs=pairs, optimizer=optimizer)
    return [*first, *run.split("\n")]


def _docstring(name: str, violation: Violation, *needs: str) -> str:
    where = f"Window {violation.window} of epoch {violation.epoch}"
    if violation.parameter is not None and violation.error is not None and violation.allowed is not None:
        where += f", {violation.parameter}: off by {error_text(violation.error, violation.allowed)}."
    details = details_of(violation) or [where] * (violation.window is not None)
    use = (
        "Run this file with Python: exit status 1 while the fault is there, 0 when it is gone, 2 where it fails otherwise. "
        f"It needs {', and '.join(['Python and torch alone', *needs])}. "
        f"Written by gradcheck-suite with torch {torch.__version__}, for case {violation.case.digest}."
    )
    lines = [
        f"{name}: {violation_title(violation.kind, violation.diagnosis)}.",
        "",
        *textwrap.wrap(violation.explanation, WIDTH),
        *(short for line in details for short in textwrap.wrap(line, WIDTH, subsequent_indent="  ") or [""]),
        "",
        *(f"    {line}" for line in describe_case(violation.case)),
        "",
        *textwrap.wrap(use, WIDTH),
    ]
    text = "\n".join(line.rstrip() for line in lines).replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    return f'"""{text}\n"""'
