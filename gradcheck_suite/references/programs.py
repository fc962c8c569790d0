"""Compiled XLA programs, kept in memory and on disk.

Compiling a small program takes XLA 40 to 400 ms and tracing it takes JAX another 15 to 100 ms, both far more than
running it. JAX's persistent cache saves the first; keeping the executable itself saves both. A stored program is
found by everything it depends on: what was asked for, the argument shapes, the catalogue's source, the versions of
JAX and XLA, and the processor.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jaxlib import version as jaxlib_version

from gradcheck_suite.execution.environment import cache_directory

jax.config.update("jax_enable_x64", True)

MAX_PROGRAMS = 256
KEPT_ENVIRONMENTS = 4
COMPILER_OPTIONS: dict[str, str | bool] = {
    "xla_cpu_multi_thread_eigen": False,
    "xla_cpu_use_fusion_emitters": False,
    "xla_llvm_disable_expensive_passes": True,
}
"""Programs this small spend more on threads than on work, and more on being optimised than they ever run."""
Tree = Any


@cache
def device(platform: str = "cpu") -> jax.Device:
    """Return the device that references run on: the CPU, if nothing else is asked for."""
    return jax.devices(platform)[0]


@cache
def _environment_key() -> str:
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for folder in ("catalogue", "references"):
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    try:
        processor = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
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


class Programs:
    """Compiled functions by key, bounded in number, with a store on disk behind those of the CPU."""

    def __init__(self, *, maximum: int = MAX_PROGRAMS, platform: str = "cpu") -> None:
        self._platform = platform
        self._programs: OrderedDict[Hashable, Callable[..., Any]] = OrderedDict()
        self._maximum = maximum
        self.compiled = 0
        self.loaded = 0

    def call(self, key: Hashable, function: Callable[..., Tree], *arguments: Tree, store: bool = True) -> Tree:
        """Run `function` on trees of numpy arrays, compiled once for `key` and the arguments' shapes.

        Args:
            key: names what `function` computes; its repr must be the same in every process.
            function: pure; traced only when no compiled program is at hand.
            arguments: trees of float64, integer or boolean numpy arrays.
            store: whether the program is worth keeping on disk.
        """
        full_key = (key, _shapes(arguments))
        program = self._programs.get(full_key)
        if program is None:
            program = self._programs[full_key] = self._load(full_key, function, arguments, store)
            if len(self._programs) > self._maximum:
                self._programs.popitem(last=False)
        else:
            self._programs.move_to_end(full_key)
        return _to_numpy(program(*arguments))

    def _load(
        self, key: Hashable, function: Callable[..., Tree], arguments: tuple[Tree, ...], store: bool
    ) -> Callable[..., Any]:
        directory = cache_directory() if store and self._platform == "cpu" else None
        path = directory and directory / _environment_key()[:16] / f"{hashlib.sha256(repr(key).encode()).hexdigest()}"
        if path is not None and path.exists():
            try:
                program = serialize_executable.deserialize_and_load(*pickle.loads(path.read_bytes()))
            except Exception:  # a damaged or foreign file: it is only a cache, compile again
                path.unlink(missing_ok=True)
            else:
                self.loaded += 1
                return program
        sharding = jax.sharding.SingleDeviceSharding(device(self._platform))
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments)
        compiled = _compile(jax.jit(function).lower(*shapes), self._platform)
        self.compiled += 1
        if path is not None and not _calls_libraries(compiled):
            _forget_others(path.parent)
            _store(path, pickle.dumps(serialize_executable.serialize(compiled)))
        return compiled


def _compile(lowered: jax.stages.Lowered, platform: str) -> jax.stages.Compiled:
    if platform != "cpu":
        return lowered.compile()
    try:
        return lowered.compile(COMPILER_OPTIONS)
    except jax.errors.JaxRuntimeError:  # an XLA that does not know one of the options
        return lowered.compile()


def _calls_libraries(compiled: jax.stages.Compiled) -> bool:
    """Say whether a program calls code outside itself, such as LAPACK's.

    JAX looks LAPACK up while it lowers a function that needs it. A stored program is never lowered again: in a fresh
    process it would call through a null pointer and take the process with it (jaxlib 0.10.2).
    """
    return "custom-call" in (compiled.as_text() or "custom-call")


# jax.tree does the same for every kind of tree, at ten times the cost: these two run for every layer of every case


def _shapes(tree: Tree) -> Hashable:
    if type(tree) is dict:
        return tuple([(name, _shapes(tree[name])) for name in sorted(tree)])
    if type(tree) is tuple:
        return tuple([_shapes(branch) for branch in tree])
    return tree.shape, tree.dtype.str


def _to_numpy(tree: Tree) -> Tree:
    if type(tree) is dict:
        return {name: _to_numpy(branch) for name, branch in tree.items()}
    if type(tree) is tuple:
        return tuple([_to_numpy(branch) for branch in tree])
    return np.asarray(tree)


def _forget_others(folder: Path) -> None:
    """Before the first program of a new environment is stored, drop those of all but the latest few others."""
    if folder.exists() or not folder.parent.is_dir():
        return
    others = sorted((f for f in folder.parent.iterdir() if f.is_dir()), key=lambda f: f.stat().st_mtime)
    for old in others[: -KEPT_ENVIRONMENTS or None]:
        shutil.rmtree(old, ignore_errors=True)


def _store(path: Path, payload: bytes) -> None:
    """Write a file whole or not at all; a cache that cannot be written is done without."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(payload)
        os.replace(file.name, path)
    except OSError:
        pass


PROGRAMS = Programs()
