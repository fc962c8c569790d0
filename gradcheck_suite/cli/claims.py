"""Put the claims about gradient zeroing to the test, and verify the loops that their sources print."""

from __future__ import annotations

import argparse

from gradcheck_suite.cli import parsers, places, statuses
from gradcheck_suite.errors import CannotRunHere, UsageError
from gradcheck_suite.execution import environment
from gradcheck_suite.records.store import append_record, this_command


def add_arguments(parser: parsers.Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help="such as C2.1; without one, all, and the loops")
    parser.add_argument(
        "--examples", type=parsers.positive_integer, default=200, help="cases per printed loop (default %(default)s)"
    )
    places.add_reports(parser, "each verdict is recorded in DIR/records")


def run(arguments: argparse.Namespace) -> int:
    """Test the claims that the arguments name; print and record each verdict. A claim's being false is no failure."""
    if reasons := environment.missing():
        raise CannotRunHere(reasons[0])
    places.expect_places(arguments.reports)
    environment.prepare()
    environment.set_precision()
    from gradcheck_suite.evidence.claims import CLAIMS, SOURCES
    from gradcheck_suite.evidence.claims.printed import printed_loops, verify_printed

    unknown = [name for name in arguments.claims if name not in CLAIMS]
    if unknown:
        raise UsageError(f"expected the number of a claim, one of {', '.join(CLAIMS)}; got {unknown[0]!r}")
    about, command = environment.environment(), this_command()
    for number in arguments.claims or CLAIMS:
        claim = CLAIMS[number]
        finding = claim.check()
        print(f"{number:<5} {finding.verdict:<12} {claim.text}", flush=True)
        print(f"      {finding.sentence}")
        if finding.condition:
            print(f"      true where: {finding.condition}")
        data = {
            "number": number,
            "source": SOURCES[int(number[1])],
            "text": claim.text,
            "how": claim.how,
            "verdict": finding.verdict,
            "sentence": finding.sentence,
            "condition": finding.condition,
            "figures": dict(finding.figures),
            "counterexample": finding.counterexample,
        }
        append_record(arguments.reports, "claim", data, environment=about, command=command)
    unexpected = False
    for printed in printed_loops() if not arguments.claims else ():
        result = verify_printed(printed, examples=arguments.examples)
        data = result.to_json()
        print(
            f"loop {printed.number}  as it stands: {data['bare']}; within what it needs: {data['within']}", flush=True
        )
        unexpected |= not result.as_expected
        append_record(arguments.reports, "claim", data, environment=about, command=command)
    return statuses.VIOLATED if unexpected else statuses.HOLDS
