"""The text that `verify` prints: its first lines, a loop's verdict, the summary."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gradcheck_suite.catalogue.description import describe_violation, example_text
from gradcheck_suite.core.contract import DECLARED, DEFAULT_TIME_LIMIT, ChosenOptions, VerifyOptions
from gradcheck_suite.core.counterexamples import Counterexample
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
    """Return the versions that a verdict on some loops is about: the suite's, the frameworks', their libraries'."""
    packages = dict.fromkeys(package for name in names if name in TRAINERS for package in TRAINERS[name].packages)
    packages |= dict.fromkeys(libraries)
    return ", ".join(f"{name} {versions[name]}" for name in ("gradcheck-suite", "torch", "jax", *packages))


def result_lines(
    result: Result, stored: Counterexample | None, options: VerifyOptions, width: int, *, judged: bool
) -> list[str]:
    """Return one line on a loop, and below it its assumptions, findings, violation and stored files.

    Args:
        result: of its verification.
        stored: the files of its counterexample.
        options: of its verification.
        width: of the column of names, in characters.
        judged: whether any case could be judged.
    """
    lines = [_one_line(result, width, judged=judged)]
    if drawn := [name for name in result.assumes if name not in DECLARED]:
        lines.append(f"    assumes {', '.join(drawn)}: nothing else was tried")
    lines += [f"    assumes {name}: {meaning}" for name, meaning in DECLARED.items() if name in result.assumes]
    if result.autocast:
        lines.append(f"    losses may be computed under torch.autocast in {result.autocast}")
    if result.traffic:
        lines.append(f"    {result.traffic}")
    if result.moved_by_zeros:
        lines.append(
            f"    in {counted(result.moving_cases, 'case')} zeros moved a parameter that None leaves: "
            f"{result.moved_by_zeros}"
        )
    if result.second_opinion:
        lines += [f"    {line}" for line in result.second_opinion.splitlines()]
    lines += [f"    finding, for which no loop is to blame: {finding}" for finding in result.findings]
    lines += [
        f"    {counted(count, 'case')} could not be judged here: {' '.join(reason.split())}"
        for reason, count in result.skipped.items()
    ]
    lines += [
        f"    {count} of {result.windows + sum(result.windows_skipped.values())} steps could not be judged: {reason}"
        for reason, count in result.windows_skipped.items()
    ]
    if result.violation is not None:
        violation = [*describe_violation(result.violation), example_text(result.violation.case)]
        lines += [f"    {line}".rstrip() for line in violation]
        lines.append(f"    {_found(result)}")
    if stored is not None:
        further = "" if options.time_limit_s == DEFAULT_TIME_LIMIT else f" --time-limit {options.time_limit_s:g}"
        further += "" if options.autocast is None else f" --autocast {options.autocast}"
        not_so = "" if stored.unrepeatable is None else f"  (not repeatable: {stored.unrepeatable})"
        lines.append(f"    stored  {stored.case}")
        if stored.script is not None:
            lines.append(f"    script  python {shlex.quote(str(stored.script))}{not_so}")
        lines.append(f"    replay  gradcheck-suite replay {shlex.quote(str(stored.case))}{further}")
    return lines


def summary(results: Sequence[Result], asked: int, *, interrupted: bool) -> str:
    """Return the last line: how many loops hold."""
    violated = [result.loop for result in results if not result.holds]
    complete = [result for result in results if not result.interrupted]
    if violated:
        text = f"{len(violated)} of {counted(asked, 'loop')} violated: {', '.join(violated)}"
    elif interrupted:
        text = f"no violation so far in {counted(asked, 'loop')}"
    else:
        text = f"all {asked} loops hold" if asked > 1 else "the loop holds"
    if found := sum(len(result.findings) for result in results):
        text += f"; torch and JAX disagree: {counted(found, 'finding')} above"
    if interrupted:
        text += f"; interrupted, {len(complete)} of {counted(asked, 'loop')} went to the end"
    return text


def _found(result: Result) -> str:
    assert result.violation is not None
    first = "the weight probe"
    if result.violation.case.problem_name:
        first = "the case that is tried first, two whole windows"
    if not result.cases:
        return f"found on {first}, before any case was drawn"
    if result.found_after is None:
        return f"found on {first}; none of {counted(result.cases, 'case')} drawn shows it"
    if result.shrinking:
        return f"found after {counted(result.found_after, 'case')}; {result.shrinking}"
    return f"found after {counted(result.found_after, 'case')}, then shrunk to this one"


def _one_line(result: Result, width: int, *, judged: bool) -> str:
    verdict = "holds" if result.holds else "VIOLATED"
    if result.interrupted and result.holds:
        verdict = "holds so far (interrupted)"
    worst = f"worst error {result.ratio:.2g} of what is allowed" if result.holds and result.cases else ""
    if not judged:
        verdict, worst = "unjudged", ""
    cases = counted(result.cases, "case")
    return f"{result.loop:<{width}}  {verdict:<8}  {cases:>9}  {result.seconds:6.1f} s  {worst}".rstrip()


def _on(flag: Any) -> str:
    return ("on" if flag else "off") if isinstance(flag, bool) else str(flag)
