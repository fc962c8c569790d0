"""Put the claims about gradient zeroing to the test, and verify the loops that their sources print."""

from __future__ import annotations

import argparse

from gradcheck_suite.cli import arguments as output_paths
from gradcheck_suite.cli import arguments as parsers
from gradcheck_suite.cli import exit_status
from gradcheck_suite.core.records import append_record
from gradcheck_suite.errors import UsageError
from gradcheck_suite.run import environment


def add_arguments(parser: parsers.Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help="such as C2.1; without one, all, and the loops")
    parser.add_argument(
        "--examples", type=parsers.positive_integer, default=200, help="cases per printed loop (default %(default)s)"
    )
    output_paths.add_reports(parser, "each verdict is recorded in DIR/records")


def run(arguments: argparse.Namespace) -> int:
    """Test the claims that the arguments name; print and record each verdict. A refuted claim is no failure."""
    environment.expect_main_job()
    output_paths.expect_writable(arguments.reports)
    environment.prepare()
    from gradcheck_suite.studies.claim_checks import PRINTED, SOURCES, verify_printed
    from gradcheck_suite.studies.claims import CLAIMS
    from gradcheck_suite.studies.step_times import device_info

    unknown = [name for name in arguments.claims if name not in CLAIMS]
    if unknown:
        raise UsageError(f"expected the number of a claim, one of {', '.join(CLAIMS)}; got {unknown[0]!r}")
    about = environment.environment()
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
        append_record(arguments.reports, "claim", data, environment=about)
        for row in finding.rows:
            made_on = {**about, "device": device_info(str(row["device"]))}
            append_record(arguments.reports, "benchmark", row, environment=made_on)
    unexpected = False
    for printed in PRINTED if not arguments.claims else ():
        result = verify_printed(printed, examples=arguments.examples)
        data = result.to_json()
        print(
            f"loop {printed.number}  without assumptions: {data['bare']}; under what it relies on: {data['within']}",
            flush=True,
        )
        unexpected |= not result.as_expected
        append_record(arguments.reports, "claim", data, environment=about)
    return exit_status.VIOLATED if unexpected else exit_status.HOLDS
