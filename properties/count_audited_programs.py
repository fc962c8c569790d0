"""Counts the verdicts of the audit on programs that are drawn from numbers.

python -m properties.count_audited_programs 5000
"""

from __future__ import annotations

import argparse
import gc
from collections import Counter
from random import Random

from properties.audited_programs import audit_of, outcome, program_of

EVERY = 100
"""Programs after which the counts are printed."""


def main() -> None:
    """Print each program whose verdict is wrong, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", type=int, help="of programs")
    parser.add_argument("--first", type=int, default=0, help="number that the first is drawn from")
    parser.add_argument("--fault", action="append", help="only programs with this fault")
    arguments = parser.parse_args()
    counts = Counter[tuple[str, str]]()
    numbers = range(arguments.first, arguments.first + arguments.number)
    audit_of(program_of(Random(arguments.first)))
    # an audit searches all objects a few times: those of torch itself need not be looked through
    gc.collect()
    gc.freeze()
    for number in numbers:
        program = program_of(Random(number))
        if arguments.fault and program.fault not in arguments.fault:
            continue
        result = audit_of(program)
        found = outcome(program, result)
        counts["faulty" if program.fault else "sound", found] += 1
        if found != "right":
            print(f"{number} {found} {program!r}\n{result}", flush=True)
        if number % EVERY == EVERY - 1 or number == numbers[-1]:
            listed = ", ".join(f"{kind} {of}: {n}" for (kind, of), n in sorted(counts.items()))
            print(f"after {sum(counts.values())}: {listed}", flush=True)


if __name__ == "__main__":
    main()
