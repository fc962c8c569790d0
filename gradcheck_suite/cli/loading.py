"""Load the loop or the problem that a command line names: from a file, from a module, built in, or
a trainer.

A user's file is imported under a name of its own, with its folder on `sys.path`, so that its
imports work as in a script. Every error becomes one line: the file, the line number, what was
expected.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, cast

from gradcheck_suite.cli.arguments import CONFIGURED
from gradcheck_suite.core.contract import (
    LOOP_EXPECTED,
    Loop,
    Problem,
    expect_plain_function,
    is_jax,
    jax_training_loop,
)
from gradcheck_suite.core.text import suggestion
from gradcheck_suite.errors import UsageError
from gradcheck_suite.loops.names import NAMES
from gradcheck_suite.loops.trainers import TRAINERS
from gradcheck_suite.run.processes import Importable, remember

_SHOWN = 12
_loaded: dict[tuple[str, int, int], ModuleType] = {}


def one_line(error: BaseException) -> str:
    """Return an exception's type and message on one line."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def expect_found(text: str, *, is_loop: bool = False) -> None:
    """Refuse what a name cannot stand for, before the import of torch and jax, which takes seconds.

    Nothing is imported: a file is parsed, and what only its run can tell is left to `resolve_loop`.

    Args:
        text: what the command line has.
        is_loop: whether it is to be a loop.

    Raises:
        UsageError: there is no such built-in loop, no such file, or nothing of that name in it; or
            a loop is a class that is made with other arguments than one.
    """
    if ":" not in text:
        if is_loop:
            _expect_built_in(text)
        return
    place, _, name = text.rpartition(":")
    path = Path(place)
    if path.is_dir() and not (path / "__init__.py").is_file():
        raise _is_folder(place)
    if path.suffix != ".py":
        return
    if not path.is_file():
        raise UsageError(
            f"{path} is a folder: expected a Python file" if path.is_dir() else no_file(path)
        )
    parsed = _parsed(path)
    bound = _bound_names(parsed)
    # what does not parse has no body, and its error is told by the import, with the line
    if bound is None or not parsed.body:
        return
    # of `NAME.attribute` the file's text tells the first part alone
    first = name.partition(".")[0]
    if first not in bound:
        listed = _listed([each for each in _defined(parsed) if not each.startswith("_")])
        raise UsageError(f"{place} has no {name!r}{suggestion(name, bound)}{listed}")
    if is_loop:
        _expect_no_class_of_others(text, parsed, name)


def _expect_built_in(text: str) -> None:
    if text and Path(text).is_dir():
        raise UsageError(
            f"{text} is a folder: expected FILE.py:NAME, package.module:NAME or a built-in's name"
        )
    if text.endswith(".py"):
        raise _without_name(text, "a loop")
    if text not in TRAINERS and text not in NAMES:
        raise UsageError(_no_built_in(text, [*NAMES, *TRAINERS]))


def _is_folder(place: str) -> UsageError:
    return UsageError(
        f"{place} is a folder: expected a Python file in it, {Path(place) / 'FILE.py'}:NAME"
    )


_DYNAMIC = {"__getattr__", "exec", "globals", "locals", "setattr", "vars"}
"""Names whose use in a file may bind a name that the file does not show."""


def _bound_names(module: ast.Module) -> set[str] | None:
    """Return every name that a file may bind; None where its text does not tell."""
    names: set[str] = set()
    # the whole tree and not the top level: a name may be bound under `if` or `try`, or by `global`
    for node in ast.walk(module):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    return None if names & {*_DYNAMIC, "*"} else names


def _defined(module: ast.Module) -> list[str]:
    """Return the functions and classes at the top level of a file."""
    kinds = ast.FunctionDef | ast.ClassDef
    return [node.name for node in module.body if isinstance(node, kinds)]


def _takes_one_argument(kind: ast.ClassDef) -> bool:
    """Whether a class can be called with one argument; true where its text does not tell."""
    functions = [node for node in kind.body if isinstance(node, ast.FunctionDef)]
    made = next((node for node in functions if node.name == "__init__"), None)
    # `object.__init__` takes none, and the caller has left out classes with bases
    if made is None:
        return False
    if made.args.vararg or made.args.kwonlyargs:
        return True
    # without `self`
    given = len(made.args.posonlyargs) + len(made.args.args) - 1
    return given - len(made.args.defaults) <= 1 <= given


def _expect_no_class_of_others(text: str, module: ast.Module, name: str) -> None:
    """Refuse a class as a loop where its `__init__` takes no argument, or needs more than one."""
    found = [n for n in module.body if isinstance(n, ast.ClassDef) and n.name == name]
    # a base, a metaclass or a decorator may make instances in another way
    if len(found) != 1 or found[0].bases or found[0].decorator_list or found[0].keywords:
        return
    if not _takes_one_argument(found[0]):
        raise UsageError(
            f"{text} is a class: expected a function of one argument, the TrainingRun"
            f"{_listed([each for each in _defined(module) if not each.startswith('_')])}"
        )


def _no_built_in(text: str, names: Iterable[str]) -> str:
    return (
        f"no built-in loop is called {text!r}{suggestion(text, names)}; `gradcheck-suite verify"
        " --list` prints them, and a loop of your own is FILE.py:NAME or package.module:NAME"
    )


def resolve_loop(text: str, framework: str | None = None) -> Loop:
    """Return the loop of `FILE.py:NAME` or `package.module:NAME`, or the built-in loop or trainer
    of this name.

    If the framework is `"jax"`, a loop from a file or module is declared as a JAX loop.

    Raises:
        UsageError: no loop has this name, its file cannot be imported, or it cannot be called with
            one argument.
        CannotRunHere: it is a trainer that is not installed.
    """
    if ":" not in text:
        return _built_in(text)
    # imports torch, which takes a second
    from gradcheck_suite.run.torch_state import BY_IMPORT, changes_undone

    with changes_undone() as changed:
        loop, module = _find(text, "a loop")
    if changed:
        BY_IMPORT[module.__name__] = changed
    if issubclass(type(loop), Problem):  # isinstance would ask a lazy object for its class
        raise UsageError(f"{text} is a Problem, not a loop: pass it as --problem {text}")
    _expect_function(
        loop,
        text,
        module,
        LOOP_EXPECTED,
        object(),
    )
    # a decorated loop keeps the decorator's own options
    if framework == "jax" and not is_jax(loop):
        loop = jax_training_loop(loop)
    return _noted(loop, resolve_loop, text)


def resolve_problem(text: str) -> Problem:
    """Return the problem of `FILE.py:NAME` or `package.module:NAME`.

    Raises:
        UsageError: the name does not exist, or is neither a `Problem` nor a function that returns
            one.
    """
    if ":" not in text:
        raise _without_name(text, "a problem")
    found, module = _find(text, "a problem")
    if issubclass(type(found), Problem):
        return cast("Problem", _noted(found, resolve_problem, text))
    _expect_function(
        found,
        text,
        module,
        "a gradcheck_suite.Problem, or a function of no argument that returns one",
    )
    try:
        problem = found()
    except Exception as error:
        where = _line_in(error, getattr(module, "__file__", None))
        raise UsageError(f"{text} failed{where}: {one_line(error)}") from None
    if not issubclass(type(problem), Problem):
        raise UsageError(
            f"{text} returned {type(problem).__name__}: expected a gradcheck_suite.Problem"
        )
    return _noted(problem, resolve_problem, text)


def resolve_function(text: str, what: str, returns: tuple[type, ...] = ()) -> Callable[[], Any]:
    """Return the function of no argument that `FILE.py:NAME` or `package.module:NAME` stands for.

    Args:
        text: that the command line has.
        what: it is to be, in words.
        returns: types of what it returns; the name of such a value gets advice.

    Raises:
        UsageError: there is none of that name, or it takes arguments.
    """
    if ":" not in text:
        raise _without_name(text, what)
    found, module = _find(text, what)
    if isinstance(found, returns):
        name = text.rpartition(":")[2]
        raise UsageError(
            f"{text} is a {type(found).__name__} itself: expected a function that makes it, which is"
            f" called again where it has no `load`; begin with `def make(): return {name}`"
        )
    _expect_function(found, text, module, "a function of no argument")
    function: Callable[[], Any] = found
    return function


def _noted(found: Any, resolve: Callable[[str], Any], text: str) -> Any:
    """Return a loaded object, after a note of how other processes load it."""
    place, colon, name = text.rpartition(":")
    # another process, such as a rank, may have another working directory
    if place.endswith(".py"):
        text = f"{Path(place).resolve()}{colon}{name}"
    remember(found, Importable(__name__, resolve.__name__, (text,)))
    return found


def _built_in(text: str) -> Loop:
    _expect_built_in(text)
    # `load` may make the loop, so another process loads it by the trainer's name; a built-in one is
    # found by its module
    if text in TRAINERS:
        return _noted(TRAINERS[text].load(), resolve_loop, text)
    from gradcheck_suite.loops.jax_modes import JAX_MODES
    from gradcheck_suite.loops.ranks import RANK_LOOPS
    from gradcheck_suite.loops.reset_modes import BUILT_IN

    return {**BUILT_IN, **JAX_MODES, **RANK_LOOPS}[text]


def _without_name(text: str, what: str) -> UsageError:
    """Return the error of a text without a colon; of a file it says what the file defines."""
    path = Path(text)
    if path.suffix != ".py":
        return UsageError(f"expected FILE.py:NAME or package.module:NAME of {what}, got {text!r}")
    if not path.is_file():
        return UsageError(no_file(path))
    # a script that was meant for `audit` is not run only to say what it defines
    names: list[str] = []
    for node in _parsed(path).body:
        if isinstance(node, ast.FunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    listed = _listed([name for name in names if not name.startswith("_")])
    return UsageError(f"{text} names no {what.removeprefix('a ')}: expected {text}:NAME{listed}")


def _find(text: str, what: str) -> tuple[Any, ModuleType]:
    """Return the object that `PLACE:NAME` stands for, and the module it was found in."""
    place, _, name = text.rpartition(":")
    if not place or not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"expected FILE.py:NAME or package.module:NAME for {what}, got {text!r}")
    module = _module(place)
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise UsageError(
                f"{place} has no {name!r}{suggestion(name, vars(module))}{_offer(module)}"
            ) from None
        except Exception as error:  # a lazy module imports what it stands for at the first access
            raise UsageError(f"cannot look up {name} in {place}: {one_line(error)}") from None
    return found, module


def _module(place: str) -> ModuleType:
    path = Path(place)
    if path.is_dir() and not (path / "__init__.py").is_file():
        raise _is_folder(place)
    # a module's name has no slash, so a path without `.py` is refused as a path
    if place.endswith(".py") or "/" in place or "\\" in place:
        return _import_file(path)
    if path.is_file():
        raise UsageError(f"{place} is not a Python file: expected a name that ends in .py")
    if not all(part.isidentifier() for part in place.split(".")):
        raise UsageError(
            f"expected FILE.py:NAME or package.module:NAME, got {place!r} before the colon"
        )
    return _import_module(place)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(
            f"{path} is a folder: expected a Python file" if path.is_dir() else no_file(path)
        )
    if path.suffix != ".py":
        raise UsageError(f"{path} is not a Python file: expected a name that ends in .py")
    resolved = path.resolve()
    status = path.stat()
    # a loop and a problem of one file are of one module; a file that has changed since, as between
    # two tests, is imported anew
    key = (str(resolved), status.st_mtime_ns, status.st_size)
    if key not in _loaded:
        # a file called `torch.py` or `train.py` must not take the place of another module of that
        # name
        name = f"gradcheck_suite_subject_{len(_loaded)}_{re.sub(r'[^A-Za-z0-9_]', '_', path.stem)}"
        spec = importlib.util.spec_from_file_location(name, resolved)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # dataclasses and pickle look a class's module up by name
        sys.modules[name] = module
        _put_on_path(str(resolved.parent))
        execute = spec.loader.exec_module
        try:
            _guarded(lambda: execute(module), str(path), str(resolved))
        except BaseException:
            # a half-imported module would be found by the next import as if it were whole
            del sys.modules[name]
            raise
        _loaded[key] = module
    return _loaded[key]


def _import_module(name: str) -> ModuleType:
    # a console script lacks the working directory on its path, `python -m` has it
    _put_on_path(str(Path.cwd()))
    # a file that was written since the last import, as by a test, is found then
    importlib.invalidate_caches()
    try:
        # it imports the parent packages, so every exception of theirs may come
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # the module is there and its package imports what is missing: another message than "no
        # module"
        if error.name is None or not name.startswith(error.name):
            raise UsageError(f"cannot import {name}: {one_line(error)}") from None
        found = None
    except Exception as error:
        raise UsageError(
            f"cannot import {name}{_line_in(error, None)}: {one_line(error)}"
        ) from None
    if found is None:
        raise UsageError(
            f"there is no module {name!r} on Python's path or in the working directory"
            f"{_hint_on(name)}"
        )
    return _guarded(lambda: importlib.import_module(name), name, found.origin)


def _hint_on(name: str) -> str:
    """Return where a module that is not found may be; empty where nothing has its name."""
    if Path(f"{name}.py").is_file():
        return f" (did you mean {name}.py:NAME?)"
    inside = Path("src", *name.split("."))
    if inside.is_dir() or inside.with_suffix(".py").is_file():
        return (
            '; it is in src: set pythonpath = ["src"] in [tool.gradcheck-suite] of pyproject.toml'
        )
    return ""


def _guarded(load: Callable[[], Any], shown: str, file: str | None) -> Any:
    """Run an import; every exception except an interrupt by the user becomes a `UsageError`."""
    try:
        return load()
    # such as `argparse` at the top level of a training script
    except SystemExit as error:
        where = _line_in(error, file)
        raise UsageError(
            f"{shown} ends the program when it is imported{where}: "
            'put what should only run as a script under `if __name__ == "__main__":`'
        ) from None
    except Exception as error:
        raise UsageError(
            f"cannot import {shown}{_line_in(error, file)}: {one_line(error)}{_hint(error, shown)}"
        ) from None


def _hint(error: Exception, shown: str) -> str:
    """Return what to write in place of a file's path where the file imports relative to its package."""
    if not shown.endswith(".py") or "no known parent package" not in str(error):
        return ""
    own = module_of(Path(shown))
    path = (
        ""
        if own.folder == Path.cwd()
        else f", with {_seen(own.folder)} in pythonpath of {CONFIGURED}"
    )
    return f"; name the module, not the file: {own.name}:NAME{path}"


@dataclass(frozen=True)
class Module:
    """A file as a module.

    Attributes:
        name: its dotted name.
        folder: the folder that its name begins in.
    """

    name: str
    folder: Path


def module_of(file: Path) -> Module:
    """Return the module that a file of a package is."""
    path = file.resolve().with_suffix("")
    folder = path.parent
    # the topmost folder with that file is the package that a relative import goes up to
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    if folder == path.parent:  # a folder without __init__.py is a package too
        folder = folder.parent
    return Module(".".join(path.relative_to(folder).parts), folder)


def import_hint(error: BaseException | None, script: Path | None) -> str:
    """Return what helps a script that could not import something, in words; empty for every other
    end.

    Args:
        error: what has ended the script.
        script: its file; None for a module.
    """
    if not isinstance(error, ImportError):
        return ""
    if script is not None and "no known parent package" in str(error):
        return _as_module(module_of(script))
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return ""
    package = error.name.partition(".")[0]
    if package in sys.modules:  # it has no such submodule
        return ""
    # without the script's own folder, which Python has searched
    parents = [] if script is None else script.resolve().parents[1:]
    for folder in parents:
        if (folder / package).is_dir() or (folder / f"{package}.py").is_file():
            path = script.resolve().with_suffix("") if script else folder
            return _as_module(Module(".".join(path.relative_to(folder).parts), folder))
    return (
        f"; {package} is not installed where gradcheck-suite is, in {sys.prefix}: install it there,"
        " or install gradcheck-suite where the script runs"
    )


def _as_module(module: Module) -> str:
    where = "" if module.folder == Path.cwd() else f" in {module.folder}"
    return f"; it is part of a package: run `gradcheck-suite audit -m {module.name}`{where}"


def _seen(folder: Path) -> str:
    """Return a folder as seen from the working directory."""
    here = Path.cwd()
    return str(folder.relative_to(here)) if folder.is_relative_to(here) else str(folder)


def _line_in(error: BaseException, file: str | None) -> str:
    """Return the line of a file that an exception passed through, or the last line of any user's
    file.
    """
    frames = traceback.extract_tb(error.__traceback__)
    # the last of them: the line of the file that is nearest to the error
    inside = [frame for frame in frames if frame.filename == file]
    if inside:
        return f" (line {inside[-1].lineno})"
    own = [
        frame
        for frame in frames
        if frame.filename != __file__ and not frame.filename.startswith("<frozen")
    ]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own and file is None else ""


def _expect_function(
    found: Any, text: str, module: ModuleType, expected: str, *arguments: object
) -> None:
    """Refuse what is no plain function of so many arguments.

    Args:
        found: what the name stands for.
        text: that the command line has.
        module: that has the name.
        expected: the function in words.
        arguments: as many as the function is called with.
    """
    try:
        expect_plain_function(found, text, expected, *arguments)
    except UsageError as error:
        # what has the wrong type may be another name of the file
        raise UsageError(f"{error}{'' if callable(found) else _offer(module)}") from None


def _put_on_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _offer(module: ModuleType) -> str:
    """List a module's problems, and the functions and classes that it defines, for the end of a
    message.
    """
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    names = [
        name
        for name, value in public.items()
        if issubclass(type(value), Problem)
        # what the file imports is no loop of its
        or (callable(value) and _place_of(value) == module.__name__)
    ]
    return _listed(names)


def _listed(names: list[str]) -> str:
    # the error stays one line that can be read
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"; it defines {', '.join(names[:_SHOWN])}{more}" if names else ""


def _place_of(value: Any) -> Any:
    """Return the name of the module that defines an object.

    A lazy object is not asked, which would import it.
    """
    return (value if issubclass(type(value), type | FunctionType) else type(value)).__module__


def _parsed(path: Path) -> ast.Module:
    """Return what a file says; nothing where it cannot be read."""
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def no_file(path: Path) -> str:
    """Return the message for a missing file, with a similar name if there is one."""
    beside = [each.name for each in path.parent.glob("*.py")]
    return f"{path}: no such file{suggestion(path.name, beside)}"


# The installed libraries that a user's loop imports: a verdict on a trainer is about their
# versions.


ALWAYS_NAMED = {"gradcheck-suite", "torch", "jax"}


def libraries_of(loop: Loop) -> tuple[str, ...]:
    """Return the distributions that the loop's file and the files beside it import, in order of
    appearance.
    """
    # an instance of a class with `__call__` has its class's module
    module = sys.modules.get(getattr(loop, "__module__", None) or type(loop).__module__)
    file = getattr(module, "__file__", None)
    if file is None or module.__name__.partition(".")[0] == "gradcheck_suite":  # type: ignore[union-attr]
        return ()
    imported = _imports(Path(file))
    if not imported:
        return ()
    distributions = packages_distributions()
    found = dict.fromkeys(distributions[top][0] for top in imported if distributions.get(top))
    return tuple(name for name in found if name not in ALWAYS_NAMED)


def _imports(file: Path) -> list[str]:
    """Return the top-level names that a file, and the files beside it that it imports, take from
    elsewhere.
    """
    files = [file]
    found = list[str]()
    for path in files:  # it grows
        for node in ast.walk(_parsed(path)):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import | ast.ImportFrom)
                else []
            )
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            for name in names:
                top = name.partition(".")[0]
                beside = path.parent.joinpath(*name.split("."))
                # the text is read and nothing imported: what an import inside a function would load
                # counts as well
                local = [
                    each
                    for each in (beside.with_suffix(".py"), beside / "__init__.py")
                    if each.is_file()
                ]
                files += [each for each in local[:1] if each not in files]
                if (
                    not local
                    and top not in sys.stdlib_module_names
                    and not (path.parent / top).is_dir()
                ):
                    found.append(top)
    return found


# Notes on standard error beside the result, one line each.


def note_untested_trainers(names: Iterable[str]) -> None:
    """Print a note for each loop that is a trainer whose installed version is not a tested one."""
    for name in names:
        note = TRAINERS[name].note if name in TRAINERS else None
        if note:
            print(f"gradcheck-suite: note: {note}", file=sys.stderr, flush=True)
