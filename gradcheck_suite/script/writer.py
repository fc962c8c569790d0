"""Stand-alone scripts: a violation as one Python file that needs torch alone, to send to whoever
fixes the loop.

A script reads from top to bottom: model, data, loop, expected gradient, comparison. The numbers
come from the violation's evidence; no loop is run to write it. It is run once before it is
announced. That of a loop of JAX needs jax and optax alone. It has no model: the loss of each item
is linear, with the gradient that the item has in the case.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import subprocess
import symtable
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from pprint import pformat
from string import Template
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch.nn.utils import parametrize

from gradcheck_suite.catalogue import tables
from gradcheck_suite.catalogue.definitions import Signal, feature_axis
from gradcheck_suite.catalogue.description import describe_case
from gradcheck_suite.core.case import Case, Layer, is_probe, slopes_of
from gradcheck_suite.core.comparison import Comparison
from gradcheck_suite.core.contract import DEFAULT_TIME_LIMIT as LIMIT
from gradcheck_suite.core.contract import (
    EDITS_PARAMETERS,
    EDITS_SETTINGS,
    SCHEDULES_MICRO_BATCHES,
    Loop,
    Problem,
    assumptions_of,
    is_jax,
)
from gradcheck_suite.core.results import Violation, is_endless
from gradcheck_suite.core.text import error_text, violation_title
from gradcheck_suite.loops.trainers import TRAINERS
from gradcheck_suite.reference.large_batch import Reference, gradients_of
from gradcheck_suite.run import jax_run
from gradcheck_suite.run.instance import (
    Instance,
    Pairs,
    epoch_of,
    instance_of,
    loader_over,
    map_leaves,
    tensor_leaves,
)
from gradcheck_suite.run.observer import StepObserver, recorded_calls, structure, structure_changes
from gradcheck_suite.run.optimizers import (
    OPTIMIZERS,
    fault_before,
    fault_between,
    fault_of_step,
    in_groups,
)
from gradcheck_suite.run.torch_state import changes_undone
from gradcheck_suite.verification.check import of_torch
from gradcheck_suite.verification.separability import adds_up

PACKAGE = __name__.partition(".")[0]
WIDTH = 120
AT_A_STEP = ("gradient", "none-pattern", "non-finite")
"""Kinds of violation that show in the gradients at one step."""
MOST_SHOWN = 4096
"""Largest number of elements of a parameter whose observed gradient a script contains."""
TEMPLATE = (Path(__file__).parent / "template.txt").read_text(encoding="utf-8")
"""Of every script: `%% A B` stands above lines of those scripts that have A or B, and `%%` above those of all."""
SHOWN_OF_RANKS = (*AT_A_STEP, "step-count", "not-accumulable")
"""Kinds of violation that the script of a loop on several ranks shows."""
RANKS_S = 60.0
"""Seconds that a rank of a script may take after the ranks before it have ended."""
WRITTEN = {
    *re.findall(r"(?m)^(?:def |class )?(\w+)(?:\(| =|, )", TEMPLATE),
    "DTYPE",
    "Model",
    "TrainingRun",
}
"""Names that a script itself gives a meaning to."""
IMPORTS = (
    *(
        (module, None)
        for module in (
            "faulthandler",
            "importlib.util",
            "inspect",
            "os",
            "socket",
            "subprocess",
            "sys",
            "traceback",
            "torch",
        )
    ),
    *(("dataclasses", "make_dataclass"), ("operator", "attrgetter"), ("pathlib", "Path")),
    *(("math", "inf"), ("math", "nan"), ("torch.utils.data", "DataLoader")),
)
"""What the template and numbers need, where they name it."""
COPIED: dict[str, tuple[Any, ...]] = {
    "objective": (adds_up,),
    "pairs": (loader_over, Pairs),
    "structure": (structure, structure_changes),
    "process": (changes_undone,),
    "calls": (recorded_calls, epoch_of),
    "parameters": (StepObserver, recorded_calls, fault_before, fault_of_step, fault_between),
}
"""The suite's definitions that parts of the template call."""
OWN = {PACKAGE}
"""Packages whose definitions a script has copies of, in place of their imports; one of loops may add itself."""
UNUSUAL = re.compile(
    r"\b(pairs|criterion|dataset|\w*sampler|batch_size|collate_fn|getattr|vars|__dict__)\b"
)
"""What only some loops ask for: pairs, and more of a loader than its micro-batches and their number."""
NONLINEARITY = inspect.Parameter("nonlinearity", inspect.Parameter.KEYWORD_ONLY, default="tanh")


# Definitions copied from modules, each with all that it needs: a name is looked up among its
# module's definitions.


class CannotCopyError(Exception):
    """A definition does not stand alone."""


class NoScriptError(Exception):
    """Carries the reason why a violation has no script."""


@cache
def _module_source(name: str) -> tuple[str, ast.Module, dict[str, Any]]:
    """Return a module's source, its tree, and for each top-level name its statement or the import
    it comes from.
    """
    source = inspect.getsource(importlib.import_module(name))
    tree = ast.parse(source)
    found = dict[str, Any]()
    # a copied definition may name in an annotation what is imported for annotations alone
    guards = [node for node in tree.body if _is_guard(node, "TYPE_CHECKING")]
    guarded = chain.from_iterable(getattr(node, "body", ()) for node in guards)
    for node in [*guarded, *tree.body]:
        found |= _bound_by(node)
    return source, tree, found


def _bound_by(node: ast.stmt) -> dict[str, Any]:
    """Return what a top-level statement gives a name: itself, or the import that the name is of."""
    # `import a.b` binds `a`; with `as`, the name that it is given
    if isinstance(node, ast.Import):
        return {a.asname or a.name.partition(".")[0]: (a.name, None, a.asname) for a in node.names}
    if isinstance(node, ast.ImportFrom):
        return {a.asname or a.name: (node.module, a.name, a.asname) for a in node.names}
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name: node}
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return {}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    parts = chain.from_iterable(map(ast.walk, targets))
    return {part.id: node for part in parts if isinstance(part, ast.Name)}


def _is_own(module: str) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in OWN)


def _is_guard(node: ast.stmt, *tests: str) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in tests


def _is_copyable(node: ast.stmt) -> bool:
    """Return whether a statement of a user's module does nothing when it runs but give names a
    meaning.

    What else a module does, and what modules of the user's it imports, may be what the loop's fault
    comes from.
    """
    if isinstance(node, ast.Import | ast.ImportFrom):
        modules = (
            [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
        known = {*sys.stdlib_module_names, "torch", PACKAGE}
        return (
            not getattr(node, "level", 0)
            and {module.partition(".")[0] for module in modules} <= known
        )
    if isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign):
        # an assignment to an attribute or an item changes something that is there already
        reaches = any(isinstance(part, ast.Attribute | ast.Subscript) for part in ast.walk(node))
        return isinstance(node.value, ast.Constant) and not reaches
    names = isinstance(node, ast.FunctionDef | ast.ClassDef)
    return names or _is_guard(node, "TYPE_CHECKING", "__name__ == '__main__'")


def _global_names(text: str) -> list[str]:
    """Return the names that a definition takes from outside of it.

    Parameters and local variables are none of them.
    """
    # Python's own symbol tables know what is local: names alone do not say
    scopes = [symtable.symtable(text, "definition", "exec")]
    for scope in scopes:
        scopes += scope.get_children()
    # since Python 3.12, the variables of a comprehension are those of the scope around it: assigned
    # there
    outer = {
        s.get_name() for s in scopes[0].get_symbols() if s.is_referenced() and not s.is_assigned()
    }
    symbols = chain.from_iterable(scope.get_symbols() for scope in scopes[1:])
    inner = {s.get_name() for s in symbols if s.is_referenced() and s.is_global()}
    # Python 3.14 makes this name up where a module annotates a variable (PEP 649)
    return sorted((outer | inner) - {"__conditional_annotations__"})


def _definition_of(function: Any) -> ast.AST | None:
    """Return the definition of a function of the suite; None for one that another function makes."""
    _, tree, names = _module_source(function.__module__)
    if function.__name__ != "<lambda>":
        found: ast.AST | None = names.get(function.__name__)
        return found
    # a lambda has no name to look it up by, but a line
    line = function.__code__.co_firstlineno
    return next(n for n in ast.walk(tree) if isinstance(n, ast.Lambda) and n.lineno == line)


def _statements_of(node: ast.AST | None) -> Sequence[ast.stmt]:
    """Return what a function does, without its docstring."""
    if isinstance(node, ast.Lambda):
        return [ast.Return(node.body)]
    return [one for one in getattr(node, "body", ()) if not isinstance(one, ast.Expr)]


def _names_read(node: ast.AST | None) -> list[str]:
    """Return the names that a definition reads, each as often as it does."""
    if node is None:
        return []
    return [
        part.id
        for part in ast.walk(node)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)
    ]


def _is_written_twice(given: Mapping[str, Any], uses: Sequence[str]) -> bool:
    """Return whether an argument that computes something would stand in an expression twice."""
    texts = {name: value for name, value in given.items() if isinstance(value, str)}
    return any(uses.count(name) > 1 and "(" in text for name, text in texts.items())


class _WithArguments(ast.NodeTransformer):
    """Puts arguments in the place of a function's parameters, and values in that of constants.

    Args:
        given: parameter or local variable -> its text, or a mapping whose entries are written out.
        names: what the names of the function's module stand for.
    """

    def __init__(self, given: Mapping[str, Any], names: Mapping[str, Any]) -> None:
        self._given = given
        self._names = names

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Return the entry of a mapping that is given."""
        options = self._given.get(node.value.id) if isinstance(node.value, ast.Name) else None
        if isinstance(options, Mapping):
            return ast.Constant(options[ast.literal_eval(node.slice)])
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Return what a name stands for, where it is given, or another name of something of torch."""
        if node.id in self._given:
            return ast.parse(_quoted(self._given[node.id]), mode="eval").body
        value = getattr(self._names.get(node.id, node), "value", None)
        return value if isinstance(value, ast.Attribute) else node


class Sources:
    """Definitions and imports gathered so far; a definition comes after those it needs."""

    def __init__(self, *, jax: bool = False) -> None:
        """Start with nothing; `jax` is whether the script runs JAX."""
        self._jax = jax
        self.imports: set[tuple[str, str | None, str | None]] = set()
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
            found = _module_source(module)[2].get(name)
            if isinstance(found, tuple):
                source, original, renamed = found
                if not _is_own(source):
                    # of JAX, only types stand in what runs torch
                    is_type = source.partition(".")[0] == "jax" and not self._jax
                    self.imports |= set() if is_type else {found}
                elif original is None or renamed is not None:
                    raise CannotCopyError(
                        f"{name} of {module} has another name where it is defined"
                    )
                elif name not in WRITTEN:
                    self.add(source, original)
            elif found is not None:
                self._define(module, name, found)
            elif not hasattr(builtins, name):
                raise CannotCopyError(f"{name} is not defined in {module}")

    def _define(self, module: str, name: str, node: Any) -> None:
        source, _, names = _module_source(module)
        is_own = _is_own(module)

        def says_something(decorator: ast.expr) -> bool:
            # one of the suite's says something to the suite only
            first = names.get(
                next((n.id for n in ast.walk(decorator) if isinstance(n, ast.Name)), "")
            )
            return not (_is_own(first[0]) if isinstance(first, tuple) else is_own and first)

        kept = [
            f"@{ast.unparse(d)}" for d in getattr(node, "decorator_list", ()) if says_something(d)
        ]
        text = "\n".join([*kept, *source.splitlines()[node.lineno - 1 : node.end_lineno]])
        # one file has one meaning for a name
        if self._texts.get(name, text) != text or (name in WRITTEN and name != "TrainingRun"):
            raise CannotCopyError(
                f"{name} of {module} and of another module cannot stand in one script"
            )
        if name not in self._texts and name not in WRITTEN:
            self._texts[name] = text
            self.add(module, *_global_names(text))
            # what it needs has come in between
            self._texts[name] = self._texts.pop(name)

    def call(self, function: Any, *arguments: Any) -> str:
        """Return the call of a function of the suite, written out where the function is one
        expression.

        Args:
            function: the function to copy or to write out.
            arguments: the text of each, or a mapping whose entries are written out.
        """
        written = self._written_out(function, arguments)
        if written is not None:
            return written
        return f"{self.expression(function)}({', '.join(map(_quoted, arguments))})"

    def _written_out(self, function: Any, arguments: Sequence[Any]) -> str | None:
        """Return a call as one expression.

        None where the function is more than names that are assigned once, and what it returns.
        """
        names = _module_source(function.__module__)[2]
        node = _definition_of(function)
        uses = _names_read(node)
        given: dict[str, Any] = dict(
            zip(inspect.signature(function).parameters, arguments, strict=True)
        )
        for statement in _statements_of(node):
            if not isinstance(statement, ast.Return | ast.Assign) or _is_written_twice(given, uses):
                return None
            # of a copy: the tree is kept
            copy = ast.parse(ast.unparse(statement.value or ast.Constant(None)), mode="eval")
            text = _quoted(ast.unparse(_WithArguments(given, names).visit(copy)))
            if isinstance(statement, ast.Return):
                ours = [_global_names(_quoted(argument)) for argument in arguments]
                self.add(function.__module__, *sorted({*_global_names(text)}.difference(*ours)))
                return text if isinstance(copy.body, ast.Call) else f"({text})"
            target = statement.targets[0]
            if not isinstance(target, ast.Name):
                return None
            given[target.id] = text
        return None

    def expression(self, function: Any) -> str:
        """Return the name of a function of the suite, or the call of the function that makes it."""
        # a function that another one has made is written as the call that makes it
        maker, _, inner = function.__qualname__.partition(".<locals>.")
        self.add(function.__module__, maker)
        if not inner:
            return str(maker)
        closed_over = inspect.getclosurevars(function).nonlocals
        arguments = []
        for name in inspect.signature(sys.modules[function.__module__].__dict__[maker]).parameters:
            value = closed_over[name]
            arguments.append(f"{name}={self.expression(value) if callable(value) else repr(value)}")
        return f"{maker}({', '.join(arguments)})"

    def take(self) -> str:
        """Return the definitions gathered since the last call, each after those it needs."""
        texts = [text for text in dict.fromkeys(self._texts.values()) if text not in self._taken]
        self._taken.update(texts)
        return "".join(f"{text}\n\n\n" for text in texts)

    def import_text(self) -> str:
        """Return the import statements, those of Python's own modules first."""
        groups: tuple[set[str], set[str]] = (set(), set())
        for module, name, renamed in self.imports:
            # all names of a module in one statement; each of these lines is made once, since lines
            # are a set
            others = sorted(n for m, n, r in self.imports if m == module and n and not r)
            line = (
                f"from {module} import {', '.join([name] if renamed else others)}"
                if name
                else f"import {module}"
            )
            group = groups[module.partition(".")[0] not in sys.stdlib_module_names]
            group.add(f"{line} as {renamed}" if renamed else line)
        in_order = [
            sorted(group, key=lambda line: (line[0] == "f", line)) for group in groups if group
        ]
        return "\n\n".join(map("\n".join, in_order))


def _quoted(value: Any) -> str:
    return (value if isinstance(value, str) else repr(dict(value))).replace("'", '"')


def literal(value: Any, column: int = 0) -> str:
    """Return numbers, nested lists or dicts of them as source that evaluates to the same.

    `nan` and `inf` by name.
    """
    text = pformat(value, width=WIDTH - column, compact=True, sort_dicts=False).replace("'", '"')
    return text.replace("\n", "\n" + " " * column)


# A generated model as ordinary `torch.nn` code. A call's arguments are read from the built module,
# which keeps them as attributes of the same names, as torch's modules do. Parameters have the names
# that they have in the suite.


def _layer_calls(
    layers: Sequence[Layer], chain: torch.nn.Module, sources: Sources
) -> Iterator[str]:
    # not `children()`, which leaves out a module's second place
    for layer, module in zip(layers, chain._modules.values(), strict=True):
        if tables.layer_definition(layer).wraps:
            assert module is not None
            yield "torch.nn.Sequential("
            yield from (f"    {line}" for line in _layer_calls(layer.layers, module, sources))
            yield "),"
        else:
            yield f"{constructor_call(module, sources)},"


def _forward(
    layers: Sequence[Layer], signal: Signal, place: tuple[int, ...], start: int = 0
) -> Iterator[str]:
    """Yield the statements that apply layers to `x`.

    `place` is their index path in the model, such as `(1, 0)`.
    """
    for i, layer in enumerate(layers, start):
        path = ".".join(map(str, (*place, i)))
        kind = tables.layer_definition(layer)
        suffix = path.replace(".", "_")
        if kind.parallel:
            # each branch begins with the same input
            yield f"input_{suffix}, outputs_{suffix} = x, []"
            for b, branch in enumerate(layer.layers):
                yield f"x = input_{suffix}"
                yield from _forward([branch], signal, (*place, i), b)
                yield f"outputs_{suffix}.append(x)"
            axis = feature_axis(signal)
            yield (
                f"x = sum(outputs_{suffix})"
                if kind.wraps == "sum"
                else f"x = torch.cat(outputs_{suffix}, {axis})"
            )
        elif kind.wraps == "residual":
            yield f"shortcut_{suffix} = x"
            yield from _forward(layer.layers, signal, (*place, i))
            yield f"x = shortcut_{suffix} + x"
        elif kind.wraps == "shared":
            yield "for _ in range(2):  # the same weights twice"
            yield from (f"    {line}" for line in _forward(layer.layers, signal, (*place, i)))
        else:
            given = [
                f'{name}=batch["{key}"]'
                for name, key in tables.extra_keys(layer, signal, path).items()
            ]
            yield f"x = self{''.join(f'[{j}]' for j in (*place, i))}({', '.join(['x', *given])})"
        signal = tables.out_signal(layer, signal)


def constructor_call(module: Any, sources: Sources) -> str:
    """Return the call that builds a module like this one, without its parameters' values."""
    kind = type(module)
    # torch puts a class of its own in place of the module's, whose base is the one that a reader
    # knows
    if parametrize.is_parametrized(module, "weight"):
        norm = module.get_submodule("parametrizations.weight.0")
        call = f"torch.nn.{kind.__bases__[0].__name__}({', '.join(_arguments(kind.__bases__[0], module, sources))})"
        return f"torch.nn.utils.parametrizations.weight_norm({call}, dim={norm.dim})"
    prefix = "torch.nn."
    if kind.__module__.partition(".")[0] == PACKAGE:
        sources.copy(kind)
        prefix = ""
    return f"{prefix}{kind.__name__}({', '.join(_arguments(kind, module, sources))})"


def _arguments(kind: type, module: Any, sources: Sources) -> Iterator[str]:
    parameters = dict(inspect.signature(kind).parameters)
    if issubclass(kind, torch.nn.RNNBase):
        # RNN, GRU and LSTM take *args and **kwargs and pass them to RNNBase
        parameters |= {
            **inspect.signature(torch.nn.RNNBase).parameters,
            "nonlinearity": NONLINEARITY,
        }
        del parameters["mode"]
    for name, parameter in parameters.items():
        default = parameter.default
        kept = hasattr(module, name)
        # what a module does not keep, such as `device`, does not change what it computes
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or not kept:
            assert kept or default is not parameter.empty or name in ("args", "kwargs"), (
                f"{kind} does not keep {name}"
            )
            continue
        value = getattr(module, name)
        # an argument that is True or False, and an attribute that is a parameter or None
        if name == "bias":
            value = value is not None and value is not False
        text = (
            constructor_call(value, sources)
            if isinstance(value, torch.nn.Module)
            else repr(value).replace("'", '"')
        )
        # torch spreads a default over the axes of a convolution
        if value != default and not (isinstance(value, tuple) and set(value) == {default}):
            is_first = default is parameter.empty and kind.__module__.startswith("torch.")
            yield text if is_first else f"{name}={text}"


# The parts of a script that say what is trained, on which data, and by which loop and optimizer.


def _generated(instance: Instance, sources: Sources) -> dict[str, Any]:
    """Return what stands for a generated problem in the template, in ordinary torch."""
    spec = instance.case.spec
    model = instance.model()
    assert spec is not None
    definition = tables.loss_definition(spec.loss)
    whole = tables.needs_batch(spec)
    calls = list(_layer_calls(spec.layers, model, sources))
    inside = (
        calls[0].rstrip(",")
        if len(calls) == 1
        else "\n" + textwrap.indent("\n".join(calls), " " * 8) + "\n    "
    )
    kind = "torch.nn.Sequential"
    classes = sources.take()
    if whole or any(tables.layer_definition(layer).wraps for layer in spec.layers):
        forward = ['x = batch["x"]'] * whole + [
            *_forward(spec.layers, tables.input_signal(spec.input), ()),
            "return x",
        ]
        argument = "batch" if whole else "x"
        lines = textwrap.indent("\n".join(forward), " " * 8)
        kind = "Model"
        classes += (
            f"class Model(torch.nn.Sequential):\n    def forward(self, {argument}):\n{lines}\n\n\n"
        )
    ties = [
        " = ".join("model" + re.sub(r"\.(\d+)", r"[\1]", f".{name}") for name in tie)
        for tie in spec.ties
    ]
    output = "model(batch)" if whole else 'model(batch["x"])'
    objective = sources.call(
        definition.torch_loss, spec.loss.o, output, "batch", f'"{spec.loss.reduction}"'
    )
    data = {name: literal(t.tolist(), len(name) + 22) for name, t in instance.data.items()}
    dtypes = {name: "dtype=DTYPE, " * t.is_floating_point() for name, t in instance.data.items()}
    return {
        "count": sources.call(definition.count, spec.loss.o, "batch"),
        "definitions_model": classes + sources.take(),
        "model": f"{kind}({inside})",
        "ties": "\n    ".join(ties),
        "values": literal(
            {name: tensor.tolist() for name, tensor in model.state_dict().items()}, 13
        ),
        "frozen": [name for name, p in model.named_parameters() if not p.requires_grad],
        "objective": objective,
        "data": "\n".join(
            f'    "{n}": torch.tensor({text}, {dtypes[n]}device=DEVICE),'
            for n, text in data.items()
        ),
    }


def _users(problem: Problem, case: Case, sources: Sources) -> dict[str, Any]:
    """Return what stands for a user's problem in the template; it is imported from its place."""
    sources.copy(map_leaves, tensor_leaves)
    given = problem.count is not None
    return {
        "count": (
            "torch.as_tensor(PROBLEM.count(batch))"
            if given
            else "torch.tensor(len(next(tensor_leaves(batch))))"
        ),
        "definitions_problem": sources.take(),
        "found": _loaded(str(case.problem_name)),
        "objective": "PROBLEM.loss(model, batch)",
    }


def _folder_of_name(name: str) -> Path:
    """Return the folder in which `FILE.py:NAME` or `package.module:NAME` is looked up."""
    place = name.rpartition(":")[0]
    if place.endswith(".py"):
        return Path(place).resolve().parent
    # a module of a src layout is found on Python's path, as `pythonpath` sets it
    top = place.partition(".")[0]
    installed = (sys.prefix, sys.base_prefix)
    own = (f for f in sys.path if f and not any(Path(f).is_relative_to(each) for each in installed))
    folders = [Path.cwd(), *map(Path, own)]
    has = (
        folder for folder in folders if (folder / top).is_dir() or (folder / f"{top}.py").is_file()
    )
    return next(has, Path.cwd()).absolute()


def _loaded(name: str) -> str:
    """Return the call that loads what `FILE.py:NAME` or `package.module:NAME` stands for."""
    place, _, attribute = name.rpartition(":")
    folder = _folder_of_name(name)
    if place.endswith(".py"):
        place = Path(place).name
    return f"load({place!r}, {attribute!r}, folder={folder.as_posix()!r})".replace("'", '"')


def _loop(loop: Any, name: str, sources: Sources, *, copied: bool) -> str:
    """Return the expression of the loop: the suite's own and, where `copied`, a user's own is
    copied.

    Raises:
        CannotCopyError: the user's loop does not stand alone.
    """
    if name not in TRAINERS and ":" not in name:
        return sources.expression(loop)
    if not copied:
        return _loaded(TRAINERS[name].place if name in TRAINERS else name)
    attribute = name.rpartition(":")[2]
    is_local = re.search(rf"(?m)^ +(\w+, )*{attribute}\b[\w, ]* = ", TEMPLATE)
    if (
        name in TRAINERS
        or is_local
        or not isinstance(loop, FunctionType)
        or loop.__qualname__ != attribute
    ):
        raise CannotCopyError(
            f"{name} is no function of a module, or a name that scripts use themselves"
        )
    if not all(map(_is_copyable, _module_source(loop.__module__)[1].body)):
        raise CannotCopyError(f"{loop.__module__} does more than to define functions")
    sources.add(loop.__module__, attribute)
    return attribute


def _optimizer_expression(case: Case, parameters: str, sources: Sources) -> str:
    """Return the expression of the case's real optimizer, or of the one whose step changes nothing."""
    call = f"NoOpOptimizer({parameters})"
    if case.optimizer is not None:
        call = sources.call(OPTIMIZERS[case.optimizer], parameters)
    if case.groups > 1:
        sources.copy(in_groups)
    return call if case.groups == 1 else f"in_groups({call}, {case.groups})"


# The whole script.


def _gradient_tables(violation: Violation, *, with_expected: bool) -> dict[str, str]:
    """Return the tables of expected, observed and allowed gradients, as far as the script needs
    them.
    """
    evidence = violation.evidence
    names = [violation.parameter or ""]
    if evidence is None:
        assert violation.kind not in AT_A_STEP, (
            f"a violation of kind {violation.kind} comes with the gradients"
        )
        return {}
    if violation.kind in AT_A_STEP and violation.case.spec is not None:
        names = list(evidence.layout.names)
    bounds = {name: evidence.layout.part(evidence.allowed, name) for name in names}
    # one number where all elements have one bound
    short = {
        name: bound.flat[0].item() if np.ptp(bound) == 0 else bound.tolist()
        for name, bound in bounds.items()
    }
    shown: dict[str, Any] = {"allowed": short}
    if violation.kind in AT_A_STEP:
        shown["observed"] = _observed(evidence, names)
        if not violation.case.spec:
            shown["allowed"] = {names[0]: violation.allowed}
    if with_expected:
        shown["expected"] = {
            name: evidence.layout.part(evidence.expected, name).tolist() for name in names
        }
    return {name: literal(value, len(name) + 3) for name, value in shown.items()}


def _observed(evidence: Comparison, names: Sequence[str]) -> dict[str, Any]:
    """Return the observed gradient of each parameter, without those that are too large to show."""
    found: dict[str, Any] = {}
    for name in names:
        seen = evidence.seen(name)
        if seen is None:
            found[name] = None
        elif seen.size <= MOST_SHOWN:
            found[name] = seen.tolist()
    return found


def _flags(violation: Violation, reduction: str, time_limit_s: float | None) -> set[str]:
    """Return which parts of the template a violation's script has."""
    kind = violation.kind
    case = violation.case
    flags = {case.device, "generated" if case.spec else "problem"}
    if violation.evidence is not None:
        flags.add("bound")
    if case.distinct_items and not case.spec:
        flags.add("users_repeat")
    if kind == "not-accumulable":
        return flags | _flags_of_objective(violation, reduction)
    flags |= {"loop", "real_optimizer" if case.optimizer else "no_optimizer"}
    flags |= {"ranks" if case.plan.ranks else "one_rank"}
    # the loop may catch the exception that should stop it
    is_hang = is_endless(violation) and bool(time_limit_s)
    return flags | (
        _flags_of_run(violation, is_hang=is_hang) or _flags_of_calls(violation, is_hang=is_hang)
    )


def _flags_of_run(violation: Violation, *, is_hang: bool) -> set[str]:
    """Return the parts that show what a run as a whole does; none where its calls are looked at."""
    kind = violation.kind
    if kind == "raised" and not is_hang:
        return {"raised"}
    if violation.diagnosis == "changed-torch":
        return {"process"}
    if kind == "parameters" and violation.diagnosis != "changed-model":
        return {"parameters"}
    name = violation_title(kind, violation.diagnosis)
    # for the optimizer's own calls the number suffices, and the script is half as long
    if name == "step-count: step-per-micro-batch" and not violation.explanation.startswith(
        "optimizer.step()"
    ):
        return {"calls", "counted"}
    return set()


def _flags_of_calls(violation: Violation, *, is_hang: bool) -> set[str]:
    """Return the parts that look at each call of the optimizer's step."""
    flags = {"called", "hang"} if is_hang else {"called"}
    kind = violation.kind
    if kind == "parameters":
        return flags | {"structure"}
    if kind == "raised":
        return flags | {"returns"}
    if kind not in AT_A_STEP:
        return flags | {"counted", "step_count"}
    return flags | _flags_of_step(violation)


def _flags_of_objective(violation: Violation, reduction: str) -> set[str]:
    """Return the parts that show an objective which is no sum over items."""
    flags = {"objective", "compares", "one_rank"}
    flags.add("objective_mean" if reduction == "mean" else "objective_plain")
    if violation.window is None:
        return flags | {"objective_sum"}
    return flags | {"objective_window", "compares_elements"}


def _flags_of_step(violation: Violation) -> set[str]:
    """Return the parts that compare the gradient of a step."""
    case = violation.case
    # the parameters at the step may depend on the loop under a real optimizer, or where it edits
    # them; the expected gradient is then the large batch's, as it is for a user's model, which may
    # be large
    moves = violation.moved or case.optimizer is not None
    flags = {"counted", "step", "compares", "compares_elements"}
    flags.add("step_moved" if moves else "step_fixed")
    flags.add("no_literal" if moves or not case.spec else "literal")
    # a rank's own gradient is not that of the rank whose evidence is kept
    if not case.plan.ranks:
        flags.add("observed")
    return flags


def _filled_template(flags: set[str], values: Mapping[str, Any]) -> str:
    """Return the template's lines that stand under one of these flags or none, with the values in
    place.
    """
    kept = []
    wanted = True
    for line in TEMPLATE.splitlines():
        if line.startswith("%%"):
            wanted = line == "%%" or not flags.isdisjoint(line.split())
        elif wanted:
            kept.append(line)
    return Template(re.sub(r"\n{4,}", "\n\n\n", "\n".join(kept))).substitute(values)


def script_text(
    loop: Loop,
    name: str,
    violation: Violation,
    *,
    problem: Problem | None = None,
    time_limit_s: float | None = LIMIT,
    assumes: Iterable[str] = (),
) -> str:
    """Return the text of a script that shows a violation: exit status 1 while it is there, 0 when
    it is gone, 2 where the script itself fails.

    Args:
        loop: the subject.
        name: the name of the loop on the command line. A loop of `FILE.py:NAME` or
            `package.module:NAME` is printed in full where its module does nothing but define
            functions by means of torch and Python's own modules, and imported from its place
            otherwise; the suite's own loops are printed in full.
        violation: what the script shows; with its evidence, where there is one for its kind.
        problem: the user's problem that the violation's case names, if it is not a generated one.
        time_limit_s: seconds that the loop may take, which the script repeats for a loop that took
            longer.
        assumes: what the loop assumes beside what it declares itself.

    Raises:
        NoScriptError: no script would show the violation, or it would be too long.
    """
    if is_jax(loop):
        return _jax_script(loop, name, violation, problem, time_limit_s)
    if violation.case.plan.ranks and violation.kind not in SHOWN_OF_RANKS:
        what = {"raised": "an exception or ranks that wait", "parameters": "what moves parameters"}
        raise NoScriptError(
            "a script of several ranks compares gradients and numbers of steps, and does not show"
            f" {what.get(violation.kind, violation.kind)}"
        )
    assumed = {*assumes, *assumptions_of(loop)}
    # a copied loop makes the script stand alone; one that cannot be copied is imported
    written = partial(_script, loop, name, violation, problem, time_limit_s, assumed)
    try:
        return written(copied=True)
    except (CannotCopyError, ImportError, OSError, TypeError):  # or there is no source
        return written(copied=False)


def _script(
    loop: Loop,
    name: str,
    violation: Violation,
    problem: Problem | None,
    time_limit_s: float | None,
    assumed: Collection[str],
    *,
    copied: bool,
) -> str:
    case = violation.case
    sources = Sources()
    needs = ["Python and torch alone"]
    instance = instance_of(case, problem)
    flags = _flags(violation, instance.problem.reduction, time_limit_s)
    values: dict[str, Any] = (
        _users(problem, case, sources) if problem else _generated(instance, sources)
    )
    flags |= {flag for flag in ("ties", "frozen") if values.get(flag)}
    values |= _gradient_tables(violation, with_expected="literal" in flags) | _template_values(
        violation, instance
    )
    values["seconds"] = time_limit_s
    values["most_seconds"] = RANKS_S + (time_limit_s or 0.0)
    if problem is not None:
        needs.append(f"{case.problem}, which imports gradcheck_suite for its Problem")
    if "loop" in flags:
        source = _loop(
            loop,
            name,
            sources,
            copied=copied,
        )
        if source.startswith("load("):
            needs.append("the file of the loop, which may import other packages")
        values |= _of_loop(source, case, flags, sources)
        values["edited"] = EDITS_PARAMETERS in assumed
        values["schedules"] = SCHEDULES_MICRO_BATCHES in assumed
        # the settings of an optimizer whose step changes nothing decide nothing
        values["settings"] = case.optimizer is not None and EDITS_SETTINGS not in assumed
    sources.copy(*chain.from_iterable(COPIED.get(flag, ()) for flag in sorted(flags)))
    values["definitions_check"] = sources.take()
    values |= _head(name, violation, needs)
    if len(needs) > 1:
        flags.add("loads")
    return _with_imports(_filled_template(flags, values), sources)


def _of_loop(source: str, case: Case, flags: set[str], sources: Sources) -> dict[str, Any]:
    """Return what the template says of the loop and its optimizer; add what its loader yields to
    the flags.

    Args:
        source: the expression of the loop.
        case: what it trains.
        flags: the parts of the template.
        sources: the definitions so far, of which the loop's are taken.
    """
    definitions = sources.take().rstrip()
    is_imported = source.startswith("load(")
    if is_imported and "process" not in flags:  # there the import is looked at, too
        definitions = f"loop = {source}"
        source = "loop"
    is_usual = not is_imported and not UNUSUAL.search(definitions)
    flags.add("plain_loader" if is_usual and "calls" not in flags else "pairs")
    trained = "[p for p in model.parameters() if p.requires_grad]"
    optimizer = _optimizer_expression(case, trained, sources)
    make = f"lambda parameters: {_optimizer_expression(case, 'parameters', sources)}"
    return {
        "loop": source,
        "definitions_loop": definitions,
        "optimizer": optimizer,
        "make_optimizer": make if case.optimizer else None,
    }


def _with_imports(filled: str, sources: Sources) -> str:
    """Return a script with the imports that its text needs."""
    head, mark, text = filled.partition('"""\n\nIMPORTS\n')
    for module, imported in IMPORTS:
        if re.search(rf"(?<![\w.\"]){imported or re.escape(module)}\b", text):
            sources.imports.add((module, imported, None))
    imports = sources.import_text()
    nodes = ast.walk(ast.parse(text))
    # copied definitions name types that the script does not import
    if any(getattr(n, "annotation", None) or getattr(n, "returns", None) for n in nodes):
        imports = f"from __future__ import annotations\n\n{imports}"
    return head + mark.replace("IMPORTS", imports) + text + "\n"


def _template_values(violation: Violation, instance: Instance) -> dict[str, Any]:
    """Return what the template says of a violation's case, and of the window and step that show it."""
    case = violation.case
    plan = violation.case.plan
    window = violation.window or 0
    epoch = violation.epoch or 0
    members = plan.windows[window]
    items = plan.window_items(window)
    step = epoch * len(plan.windows) + window
    if violation.kind == "not-accumulable" and violation.window is None:
        members = range(len(plan.micro_batches))  # type: ignore[assignment]
        items = range(plan.total_items)
    return {
        "window": window,
        "members": list(members),
        "items": items,
        "step": step,
        "steps": plan.steps,
        "where": f"step {step}, window {window} of epoch {epoch} (micro-batches {list(members)}):",
        "limit": plan.step_limit,
        "epochs": plan.epochs,
        "accumulation_steps": plan.accumulation_steps,
        "windows": len(plan.windows),
        "total_items": plan.total_items,
        "micro_batches": [plan.items(j) for j in range(len(plan.micro_batches))],
        "of_rank": [list(plan.of_rank(rank)) for rank in range(plan.world_size)],
        "own_micro_batches": (
            "[MICRO_BATCHES[j] for j in OF_RANK[RANK]]" if plan.ranks else "MICRO_BATCHES"
        ),
        "rank": "RANK" if plan.ranks else "0",
        "world_size": plan.world_size,
        "backend": "nccl" if case.device == "cuda" else "gloo",
        "reduction": instance.problem.reduction,
        "seed": case.seed,
        "device": case.device,
        "dtype": case.dtype,
        "count_dtype": torch.promote_types(torch.float32, instance.dtype),
        "torch": torch.__version__,
        "digest": case.digest,
        "distinct_items": case.distinct_items,
    }


def _head(name: str, violation: Violation, needs: Sequence[str]) -> dict[str, str]:
    """Return the paragraphs of the docstring."""
    details = violation.shown_details
    if (
        violation.window is not None
        and violation.error is not None
        and violation.allowed is not None
        and not details
    ):
        off = error_text(violation.error, violation.allowed)
        details = [
            f"Window {violation.window} of epoch {violation.epoch}, {violation.parameter}: off by"
            f" {off}."
        ]
    wrapped = [textwrap.wrap(line, WIDTH, subsequent_indent="  ") or [""] for line in details]
    paragraphs = {
        "title": [f"{name}: {violation_title(violation.kind, violation.diagnosis)}."],
        "what": [
            *textwrap.wrap(violation.explanation, WIDTH),
            *chain.from_iterable(wrapped),
        ],
        "case": [f"    {line}" for line in describe_case(violation.case)],
        "needs": [" and ".join(needs)],
    }
    texts = {key: "\n".join(line.rstrip() for line in lines) for key, lines in paragraphs.items()}
    return {
        # the texts stand in the script's own docstring
        key: text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
        for key, text in texts.items()
    }


# The script of a loop of JAX.


JAX_TEMPLATE = (Path(__file__).parent / "jax_template.txt").read_text(encoding="utf-8")
SHOWN_OF_JAX = ("gradient", "non-finite", "step-count", "raised")
"""Kinds of violation that the script of a loop of JAX shows."""
MOST_NUMBERS = 100_000
"""Numbers that the script of a loop of JAX may contain."""


OF_JAX_TEMPLATE = (
    *((module, None, None) for module in ("faulthandler", "sys", "traceback", "types", "jax")),
    ("dataclasses", "make_dataclass", None),
    ("typing", "Any", None),
    ("jax.numpy", None, "jnp"),
    ("numpy", None, "np"),
    ("optax", None, None),
    *(("numpy", name, None) for name in ("array", "inf", "nan")),
)
"""What the template of JAX and its numbers import; the observer's own imports are copied with it."""


def _no_jax_script(loop: Loop, name: str, violation: Violation) -> str | None:
    """Return why a violation of a loop of JAX has no script, or None."""
    if violation.kind not in SHOWN_OF_JAX:
        return (
            f"a script of JAX shows {', '.join(SHOWN_OF_JAX)} alone, and this is {violation.kind}"
        )
    if violation.moved:
        return (
            "a script of JAX has losses that are linear in the parameters, and here the optimizer"
            " moves them"
        )
    if inspect.getsourcefile(inspect.unwrap(loop)) is None or ":" not in name:
        return "the loop is in no file of its own"
    return None


def _jax_script(
    loop: Loop,
    name: str,
    violation: Violation,
    problem: Problem | None,
    time_limit_s: float | None,
) -> str:
    case = violation.case
    if why := _no_jax_script(loop, name, violation):
        raise NoScriptError(why)
    source = inspect.getsourcefile(inspect.unwrap(loop)) or ""
    text = Path(source).read_text(encoding="utf-8")
    observer = Sources(jax=True)
    observer.imports |= set(OF_JAX_TEMPLATE)
    observer.copy(*jax_run.OBSERVER)
    instance = instance_of(case, of_torch(loop, problem))
    reference = Reference(instance)
    model = reference.model(None, None)
    # the leaves of a dict are sorted by name
    names = sorted(reference.layout.names)

    def ordered(vector: Any) -> Any:
        return np.concatenate(
            [reference.layout.part(vector, parameter).ravel() for parameter in names]
        )

    items = range(case.plan.total_items)
    rows = [
        reference.flat(gradients_of(instance, model, range(i, i + 1), summed=True)) for i in items
    ]
    gradients = np.array([ordered(row) for row in rows])
    if is_probe(case):
        # each item of a probe has the gradient of its own parameter alone
        gradients = np.diag(np.resize(slopes_of(case), len(items)))
    if gradients.size > MOST_NUMBERS:
        raise NoScriptError(
            f"the script would have {gradients.size} numbers, and {MOST_NUMBERS} are the most"
        )
    evidence = violation.evidence
    windows = len(case.plan.windows)
    step = None if violation.window is None else (violation.epoch or 0) * windows + violation.window
    parameters = sorted(
        (n, p.detach().double().numpy()) for n, p in model.named_parameters() if n in names
    )
    with np.printoptions(threshold=2 * MOST_NUMBERS, floatmode="unique", linewidth=110):
        return Template(JAX_TEMPLATE).substitute(
            title=violation_title(violation.kind, violation.diagnosis),
            explanation=violation.explanation,
            case="\n".join(describe_case(case)),
            dtype=case.dtype,
            params=repr(dict(parameters)),
            gradients=repr(gradients),
            counts=repr(
                np.array([float(instance.count(instance.batch(range(i, i + 1)))) for i in items])
            ),
            micro_batches=repr(case.plan.micro_batches),
            steps=case.plan.steps,
            step=step,
            expected=None if evidence is None else repr(ordered(evidence.expected)),
            allowed=None if evidence is None else repr(ordered(np.nan_to_num(evidence.allowed))),
            file=Path(source).name,
            folder=repr(_folder_of_name(name).as_posix()),
            source="\n    ".join(map(repr, text.splitlines(keepends=True))).join(
                ("(\n    ", "\n)")
            ),
            name=name.rpartition(":")[2],
            observer=observer.take().rstrip(),
            imports=observer.import_text(),
            is_sum=instance.problem.reduction == "sum",
            accumulation_steps=case.plan.accumulation_steps,
            epochs=case.plan.epochs,
            reduction=instance.problem.reduction,
            kind=violation.kind,
            ends_within=time_limit_s if violation.diagnosis == "timed-out" else None,
        )


# A script is run before it is announced.


START_S = 120.0
"""Seconds that a script may take beside the time limit of its loop: it imports torch and what the loop needs."""


NOT_THE_FAILURE = ("This is another failure", "Install what is missing")
"""Beginnings of lines that a failing script adds to what its failure was."""


@dataclass(frozen=True)
class ScriptFailure:
    """A script that did not show the fault.

    Attributes:
        reason: why, as far as it is known.
        is_refuted: whether the script ended without showing the fault, in place of not ending.
    """

    reason: str
    is_refuted: bool


def script_failure(
    script: Path, violation: Violation, time_limit_s: float | None
) -> ScriptFailure | None:
    """Run a script in a process of its own, in the working directory.

    Return why it does not show the fault, or None.

    Args:
        script: the script of the violation.
        violation: what the script is to show.
        time_limit_s: seconds that the loop may take.
    """
    longest = None if time_limit_s is None else START_S + time_limit_s
    command = [sys.executable, str(script)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=longest, check=False
        )
    except subprocess.TimeoutExpired:
        return ScriptFailure(f"it did not end within {longest:g} s", is_refuted=False)
    # the user has the case already: an interrupt ends the check of the script, and not the command
    except (KeyboardInterrupt, OSError) as error:
        why = f"it could not be run: {error}" if str(error) else "it was interrupted"
        return ScriptFailure(why, is_refuted=False)
    # a loop that hangs ends the process, so nothing more is printed
    shown = is_endless(violation) or done.stdout.endswith("the fault is there\n")
    if done.returncode == 1 and shown:
        return None
    if done.returncode == 0:
        return ScriptFailure(
            "in a process of its own the loop does not show the fault", is_refuted=True
        )
    errors = [
        line
        for line in done.stderr.splitlines()
        if line.strip() and not line.startswith((" ", "Traceback", *NOT_THE_FAILURE))
    ]
    return ScriptFailure(
        f"the script itself fails with status {done.returncode}:"
        f" {errors[-1] if errors else 'no message'}",
        is_refuted=True,
    )
