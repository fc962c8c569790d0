"""Compiled XLA programs, kept in memory and on disk.

XLA takes 40 to 400 ms to compile a small program, and JAX takes another 15 to 100 ms to trace it.
Both are far more than the time to run it. JAX's persistent cache saves the compilation; a stored
executable saves both. The key of a stored program contains what it computes and the argument
shapes; `kept_files` tells it from those of other versions.
"""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import platform
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from threading import Lock, Thread, main_thread
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jaxlib import version as jaxlib_version

from gradcheck_suite.core.options import NUMPY
from gradcheck_suite.reference.evaluation import (
    SMALL_PROGRAM,
    ProgramRequest,
    Tapes,
    Tree,
    collector_off,
    evaluator,
    shapes,
)
from gradcheck_suite.reference.together import MOST, Together
from gradcheck_suite.run.environment import (
    CACHE_VARIABLE,
    expect_cache_folder,
    is_owned_by_user,
    make_cache_folder,
    trusted_cache,
)

# The folder of the compiled programs that later processes need again.
#
# There is one for all that they depend on: the source of the catalogue and of this package, the
# versions of JAX and XLA, and the processor.


KEPT_ENVIRONMENTS = 4


def kept_files() -> Path | None:
    """Return the folder, which need not exist; None where nothing is kept.

    Raises:
        UsageError: others than the user may write to it.
    """
    directory = trusted_cache()
    if directory is None:
        return None
    folder = directory / _environment_key()[:16]
    expect_cache_folder(folder, CACHE_VARIABLE)
    return folder


def _write(path: Path, payload: bytes) -> None:
    """Write a file whole or not at all.

    Ignore a folder that cannot be written, since this is only a cache.

    Args:
        path: of the file, in the folder that `kept_files` returned.
        payload: its contents.
    """
    try:
        _forget_others(path.parent)
        for folder in (path.parent.parent, path.parent):
            make_cache_folder(folder)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(payload)
        os.replace(file.name, path)
    except OSError:
        # without the cache the next process compiles again; `doctor` says that it cannot be written
        pass


@cache
def _environment_key() -> str:
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for folder in ("catalogue", "reference"):
        sources = sorted((package / folder).rglob("*.py"))
        assert sources, f"no sources in {folder}"
        for path in sources:
            digest.update(path.read_bytes())
    try:
        processor = next(
            line
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("flags")
        )
    except (OSError, StopIteration):
        processor = platform.processor()
    for part in (
        jax.__version__,
        jaxlib_version.__version__,
        platform.machine(),
        processor,
        os.environ.get("XLA_FLAGS", ""),
    ):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _forget_others(folder: Path) -> None:
    """Before the first file of a new environment is kept, delete all but the latest
    `KEPT_ENVIRONMENTS` others.
    """
    if folder.exists() or not folder.parent.is_dir():
        return
    others = sorted(
        (f for f in folder.parent.iterdir() if f.is_dir()), key=lambda f: f.stat().st_mtime
    )
    for old in others[: -KEPT_ENVIRONMENTS or None]:
        shutil.rmtree(old, ignore_errors=True)


jax.config.update("jax_enable_x64", True)
# small programs end before another thread could start them: synchronous dispatch makes twice as
# many calls a second
jax.config.update("jax_cpu_enable_async_dispatch", False)
# nobody reads the lines of Python from which an operation was lowered; noting them takes a tenth of
# the lowering
jax.config.update("jax_traceback_in_locations_limit", 0)

MAX_PROGRAMS = 512
MOST_THREADS = 4
"""Threads of a check: one lowers its programs, a fourth of the work, while XLA compiles those of others."""
Options = dict[str, str | bool]
COMPILER_OPTIONS: Options = {
    "xla_cpu_multi_thread_eigen": False,
    "xla_cpu_parallel_codegen_split_count": "1",
    "xla_cpu_use_fusion_emitters": False,
    "xla_llvm_disable_expensive_passes": True,
}
"""For small programs, threads cost more than the work itself, and optimisation takes longer than all calls."""
_UNOPTIMISED: Any = {"xla_backend_optimization_level": 0}
_UNKNOWN: set[str] = set()
"""Names of the options that this XLA does not have: that of jax 0.11 has no `xla_cpu_use_fusion_emitters`."""


@cache
def device(platform: str = "cpu") -> jax.Device:
    """Return the first device of a platform; references run on the CPU."""
    return jax.devices(platform)[0]


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Return the threads that compile; a fork of the process has none of them, and gets its own."""
    return ThreadPoolExecutor(os.cpu_count())


@dataclass(frozen=True)
class ProgramChecks:
    """What XLA says of the programs that numpy has evaluated in a process.

    Attributes:
        programs: number of programs of which XLA has computed a call too.
        differences: what it computes otherwise, in words.
    """

    programs: int
    differences: tuple[str, ...]


class CompiledPrograms:
    """Compiled functions by key, at most `maximum` of them.

    Those for the CPU are also stored on disk.
    """

    def __init__(self, *, maximum: int = MAX_PROGRAMS, platform: str = "cpu") -> None:
        self._platform = platform
        self._programs: OrderedDict[Hashable, Callable[..., Any] | Future[Any]] = OrderedDict()
        self._maximum = maximum
        self._counting = Lock()
        self.compiled = 0
        self.loaded = 0
        self._tapes = Tapes(maximum)
        self._checking: list[Thread] = []
        self._failure: Exception | None = None

    def evaluate(self, request: ProgramRequest, *arguments: Tree, is_telling: bool = True) -> Tree:
        """Run a program on trees of numpy arrays by whoever evaluates JAX's derivatives.

        Return a tree of numpy arrays, which may be views of the arguments.

        Args:
            request: the program.
            arguments: trees of numpy arrays.
            is_telling: whether an error of the program would show in this call.
        """
        program = self._tapes.program(request) if self._is_numpys else None
        if program is None:
            return to_numpy(self.run(request, *arguments))
        self._tapes.keep_sample(
            request,
            program,
            arguments,
            is_telling=is_telling,
        )
        return program.tree(program.results(arguments))

    def prepare_evaluations(self, requests: Iterable[ProgramRequest]) -> None:
        """Start to load or compile those programs that XLA evaluates."""
        self.prepare(
            request
            for request in requests
            if not self._is_numpys or self._tapes.is_left_to_xla(request)
        )

    @property
    def _is_numpys(self) -> bool:
        return self._platform == "cpu" and evaluator() == NUMPY

    def check_beside(self, threads: int = 1) -> None:
        """Let XLA compute a call of each program that numpy evaluates, in other threads.

        XLA releases Python's lock while it compiles.

        Args:
            threads: how many; one leaves the other processors to what follows.
        """
        self._checking = [thread for thread in self._checking if thread.is_alive()]
        for _ in range(threads - len(self._checking)):
            thread = Thread(target=self._check_all, name="XLA checks numpy")
            self._checking.append(thread)
            thread.start()

    def _check_all(self) -> None:
        """Check what waits, a few programs at a time, until nothing does."""
        together = Together(CompiledPrograms(maximum=self._maximum, platform=self._platform))
        try:
            # a process that ends waits for a few programs, not for all
            while main_thread().is_alive():
                if not self._tapes.check(MOST, together.results):
                    return
        except Exception as error:
            self._failure = error

    def finish_checks(self, show: Callable[[int], None] = lambda _: None) -> ProgramChecks:
        """Let XLA compute a call of each program that numpy has evaluated, and has not checked yet.

        Args:
            show: called with the number of programs that are left.
        """
        threads = min(os.cpu_count() or 1, MOST_THREADS)
        while self._tapes.waiting or any(thread.is_alive() for thread in self._checking):
            if self._tapes.is_any_left:
                self.check_beside(threads)
            show(self._tapes.waiting)
            for thread in self._checking:
                thread.join(0.1)
            if self._failure is not None:
                raise self._failure
        differences = filter(None, (self._tapes.of_gradient, *self._tapes.differences))
        return ProgramChecks(self._tapes.checked, tuple(differences))

    def note_difference(self, text: str) -> None:
        """Note a difference between numpy and XLA in a whole gradient: the first one alone, since
        one program may be in hundreds.
        """
        self._tapes.of_gradient = self._tapes.of_gradient or text

    def call(
        self, key: Hashable, function: Callable[..., Tree], *arguments: Tree, store: bool = True
    ) -> Tree:
        """Run `function` on trees of numpy arrays, compiled once for `key` and the arguments'
        shapes.

        Args:
            key: identifies what `function` computes; its repr must be the same in every process.
            function: pure; traced only where there is no compiled program.
            arguments: trees of float64, integer or boolean numpy arrays.
            store: whether to keep the program on disk.
        """
        request = ProgramRequest((key, shapes(arguments)), function, arguments)
        return to_numpy(self.run(request, *arguments, store=store))

    def run(
        self, request: ProgramRequest, *arguments: Tree, store: bool = True, few: bool = False
    ) -> Tree:
        """Run a program on trees of numpy arrays with the shapes that were requested.

        Return a tree of JAX arrays.

        Args:
            request: the program.
            arguments: trees of numpy arrays.
            store: whether to keep the program on disk.
            few: whether it runs too few times for optimisation to be worth its time.
        """
        program = self._programs.get(request.key)
        if program is None:
            path = self.path(request.key) if store else None
            program = self._found(request, path, once=few or not store)
            self._keep(request.key, program)
        else:
            self._programs.move_to_end(request.key)
        # a thread compiles it: what it raised is raised here
        if isinstance(program, Future):
            program = self._programs[request.key] = program.result()
        return program(*arguments)

    def prepare(self, requests: Iterable[ProgramRequest]) -> None:
        """Start to load or compile the programs that are not in memory, with one thread for each
        core.

        XLA releases Python's lock meanwhile, so this thread can trace the next program, or compute
        with torch. `run` waits for the result.
        """
        for request in requests:
            if request.key in self._programs:
                continue
            path = self.path(request.key)
            if path is not None and path.exists():
                program = _pool(os.getpid()).submit(self._found, request, path)
            else:
                program = _pool(os.getpid()).submit(self._lowered(request, path))
            self._keep(request.key, program)

    def _keep(self, key: Hashable, program: Callable[..., Any] | Future[Any]) -> None:
        self._programs[key] = program
        if len(self._programs) > self._maximum:
            self._programs.popitem(last=False)

    def path(self, key: Hashable) -> Path | None:
        """Return where a program is stored, or None for no store."""
        folder = kept_files() if self._platform == "cpu" else None
        return None if folder is None else folder / hashlib.sha256(repr(key).encode()).hexdigest()

    def _found(
        self, request: ProgramRequest, path: Path | None, once: bool = False
    ) -> Callable[..., Any]:
        """Return a program from disk, or compile it where there is none."""
        program: Callable[..., Any] = self.load(path) or self._lowered(request, path, once)()
        return program

    @staticmethod
    def keep(path: Path, payload: bytes) -> None:
        """Store a file, where the folder can be written."""
        _write(path, payload)

    @staticmethod
    def payload(path: Path) -> bytes | None:
        """Return a stored file's contents; None where there is none, or others may have written it."""
        if not path.exists() or not is_owned_by_user(path):
            return None
        try:
            return path.read_bytes()
        except OSError:
            return None

    def load(self, path: Path | None) -> Callable[..., Any] | None:
        """Return a stored program, or None where there is none or its file is damaged."""
        if path is None or not path.exists() or not is_owned_by_user(path):
            return None
        try:
            payload, in_tree, out_tree = pickle.loads(path.read_bytes())
            # a program is for one device, and would be loaded for all of them
            devices = [device(self._platform)]
            program = serialize_executable.deserialize_and_load(
                payload, in_tree, out_tree, execution_devices=devices
            )
        except Exception:
            # a damaged or foreign file raises anything; it is only a cache, so compile again
            path.unlink(missing_ok=True)
            return None
        with self._counting:
            self.loaded += 1
        return program

    def _lowered(self, request: ProgramRequest, path: Path | None, once: bool = False) -> Any:
        """Trace and lower a function.

        Return a function that compiles and stores it, in any thread.
        """
        sharding = jax.sharding.SingleDeviceSharding(device(self._platform))
        structs = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), request.arguments
        )
        with self._counting:
            self.compiled += 1
        with collector_off():
            lowered = jax.jit(request.function).lower(*structs)
        options: Options | None = None
        if self._platform == "cpu":
            size = 0 if once else sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(structs))
            options = {**COMPILER_OPTIONS, **(_UNOPTIMISED if size <= SMALL_PROGRAM else {})}
        return partial(_compile, lowered, options, path)


def _compile(
    lowered: jax.stages.Lowered, options: Options | None, path: Path | None
) -> Callable[..., Any]:
    compiled: jax.stages.Compiled | None = None
    while compiled is None:
        known = {name: value for name, value in (options or {}).items() if name not in _UNKNOWN}
        try:
            compiled = lowered.compile(known or None)
        except jax.errors.JaxRuntimeError as error:
            unknown = {name for name in known if name in str(error)}
            if not unknown:
                raise
            _UNKNOWN.update(unknown)
    if path is not None and not _is_incomplete(compiled):
        _write(path, pickle.dumps(serialize_executable.serialize(compiled)))
    return compiled


def _is_incomplete(compiled: jax.stages.Compiled) -> bool:
    """Return whether a stored program would lack code that it calls.

    JAX loads LAPACK while it lowers a function that needs it. A stored program is not lowered
    again, so in a fresh process it calls through a null pointer and crashes (jaxlib 0.10.2).
    https://github.com/jax-ml/jax/issues/28908

    A program that comes from JAX's own compilation cache loses functions when it is serialised
    again (jaxlib 0.10.2; no issue is known). JAX does not tell whether one does.
    """
    caches = bool(jax.config.jax_compilation_cache_dir)  # type: ignore[attr-defined]  # declared at run time
    return caches or "custom-call" in (compiled.as_text() or "custom-call")


def to_numpy(tree: Tree) -> Tree:
    """Return a tree with numpy arrays in place of JAX arrays."""
    if type(tree) is dict:
        return {name: to_numpy(branch) for name, branch in tree.items()}
    if type(tree) is tuple:
        return tuple([to_numpy(branch) for branch in tree])
    return np.asarray(tree)


PROGRAMS = CompiledPrograms()
