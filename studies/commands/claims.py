"""Put the claims about gradient zeroing to the test, and verify the loops that their sources print."""

from __future__ import annotations

from argparse import Namespace

from gradcheck_suite.cli import arguments as parsers
from gradcheck_suite.cli import exit_status
from gradcheck_suite.core.records import append_record
from gradcheck_suite.errors import UsageError
from gradcheck_suite.run import environment
from studies.commands import prepare
from studies.records import KINDS


def add_arguments(parser: parsers.Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "claims", nargs="*", metavar="CLAIM", help="such as C2.1; without one, all, and the loops"
    )
    parsers.add_number(parser, "--examples", 200, "cases per printed loop", metavar=None)
    parsers.add_reports(parser, "each verdict is recorded in DIR/records")


def run(arguments: Namespace) -> int:
    """Test the claims that the arguments name.

    Print and record each verdict. A refuted claim is no failure.
    """
    prepare(arguments)
    from studies.claims import CLAIMS, PRINTED, SOURCES, verify_printed
    from studies.step_times import device_info

    if unknown := [name for name in arguments.claims if name not in CLAIMS]:
        raise UsageError(
            f"expected the number of a claim, one of {', '.join(CLAIMS)}; got {unknown[0]!r}"
        )
    about = environment.environment()
    for number in arguments.claims or CLAIMS:
        claim = CLAIMS[number]
        finding = claim.check()
        condition = [f"      true where: {finding.condition}"] if finding.condition else []
        said = f"      {finding.verdict}: {finding.sentence}"
        print(
            *[f"{number:<5} {claim.text}", f"      judged: {claim.how}", said, *condition],
            sep="\n",
            flush=True,
        )
        data = {
            "number": number,
            "source": SOURCES[int(number[1])],
            "text": claim.text,
            "how": claim.how,
            **{name: getattr(finding, name) for name in ("verdict", "sentence", "condition")},
            "figures": dict(finding.figures),
            "counterexample": finding.counterexample,
        }
        append_record(arguments.reports, KINDS["claim"], data, environment=about)
        for row in finding.rows:
            made_on = {**about, "device": device_info(str(row["device"]))}
            append_record(arguments.reports, KINDS["benchmark"], row, environment=made_on)
    unexpected = False
    for printed in PRINTED if not arguments.claims else ():
        result = verify_printed(printed, examples=arguments.examples)
        data = result.to_json()
        said = f"without assumptions: {data['bare']}; under what it relies on: {data['within']}"
        print(f"loop {printed.number}  {said}", flush=True)
        unexpected |= not result.as_expected
        append_record(arguments.reports, KINDS["claim"], data, environment=about)
    return exit_status.VIOLATED if unexpected else exit_status.HOLDS
