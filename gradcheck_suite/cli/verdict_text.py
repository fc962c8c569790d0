"""The text that `verify` prints: its first lines, a loop's verdict, the summary."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradcheck_suite.core.contract import DEFAULT_TIME_LIMIT
from gradcheck_suite.core.counterexamples import Counterexample
from gradcheck_suite.core.options import ChosenOptions, VerifyOptions
from gradcheck_suite.core.results import Result
from gradcheck_suite.core.text import counted
from gradcheck_suite.loops.trainers import TRAINERS


def header(
    loops: Iterable[str],
    chosen: Mapping[bool, ChosenOptions],
    problem: str | None,
    about: Mapping[str, Any],
    libraries: Iterable[str] = (),
) -> str:
    """Return the first lines of a run of `verify`: versions, options and precision flags.

    Args:
        loops: the names of the loops, as the command line has them.
        chosen: whether loops are of JAX -> the options of these loops.
        problem: the name of the user's problem, None for generated ones.
        about: the environment.
        libraries: the distributions that the loops import.
    """
    versions, flags = about["versions"], about["precision"]
    options = next(iter(chosen.values()))
    optimizer = "" if options.optimizer is None else f", optimizer {options.optimizer}"
    others = "".join(f"; of JAX {counted(o.examples, 'case')}, {o.dtype}" for o in chosen.values() if o != options)
    lines = [
        f"{subjects(loops, versions, libraries)}: {counted(options.examples, 'case')} per loop, seed {options.seed}, "
        f"{options.dtype} on {options.device}{optimizer}{others}",
        f"matmul precision: torch {flags.get('torch_float32_matmul_precision')} "
        f"(TF32 {_on(flags.get('torch_cuda_matmul_allow_tf32'))}, "
        f"cuDNN TF32 {_on(flags.get('torch_cudnn_allow_tf32'))}), "
        f"jax {flags.get('jax_default_matmul_precision')}",
    ]
    if problem is not None:
        lines.append(f"problem {problem}: only plans are drawn")
    return "\n".join(lines)


def subjects(names: Iterable[str], versions: Mapping[str, str | None], libraries: Iterable[str] = ()) -> str:
    """Return the versions on which a verdict depends: of the suite, the frameworks and the loops' libraries."""
    packages = dict.fromkeys(package for name in names if name in TRAINERS for package in TRAINERS[name].packages)
    packages |= dict.fromkeys(libraries)
    return ", ".join(f"{name} {versions[name]}" for name in ("gradcheck-suite", "torch", "jax", *packages))


def file_lines(stored: Counterexample, options: VerifyOptions) -> list[str]:
    """Return the files of a violation in words.

    Args:
        stored: the files.
        options: of the verification.
    """
    further = "" if options.time_limit_s == DEFAULT_TIME_LIMIT else f" --time-limit {options.time_limit_s:g}"
    further += "" if options.autocast is None else f" --autocast {options.autocast}"
    not_so = "" if stored.unrepeatable is None else f"  (not repeatable: {stored.unrepeatable})"
    lines = [f"    stored  {stored.case}"]
    if stored.script is not None:
        lines.append(f"    script  python {shlex.quote(str(stored.script))}{not_so}")
    return [*lines, f"    replay  gradcheck-suite replay {shlex.quote(str(stored.case))}{further}"]


def summary(results: Sequence[Result], asked: int, *, interrupted: bool) -> str:
    """Return the last line: how many loops hold."""
    violated = [result.loop for result in results if result.violations]
    complete = [result for result in results if not result.interrupted]
    if violated:
        text = f"{len(violated)} of {counted(asked, 'loop')} violated: {', '.join(violated)}"
    elif interrupted:
        text = f"no violation so far in {counted(asked, 'loop')}"
    else:
        text = f"all {asked} loops hold" if asked > 1 else "the loop holds"
    if accepted := sum(len(result.accepted) for result in results):
        text += f"; {counted(accepted, 'fault')} accepted"
    if found := sum(len(result.findings) for result in results):
        text += f"; torch and JAX disagree: {counted(found, 'finding')} above"
    if interrupted:
        text += f"; interrupted, {len(complete)} of {counted(asked, 'loop')} went to the end"
    return text


def _on(flag: Any) -> str:
    return ("on" if flag else "off") if isinstance(flag, bool) else str(flag)
