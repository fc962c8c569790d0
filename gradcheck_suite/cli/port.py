"""Compare a JAX model with the torch model that it is a port of: outputs, gradients, updates."""

from __future__ import annotations

import argparse
import gc
import sys
from dataclasses import replace
from functools import partial

from gradcheck_suite.cli import arguments as parsers
from gradcheck_suite.cli import exit_status
from gradcheck_suite.cli.arguments import OutputOptions
from gradcheck_suite.cli.loading import expect_found, resolve_function
from gradcheck_suite.cli.progress import CommandOutput, page_of
from gradcheck_suite.cli.waiting import IMPORTS, waiting
from gradcheck_suite.core.options import PortOptions, options_of
from gradcheck_suite.core.results import no_longer_found
from gradcheck_suite.core.source_lines import places_source
from gradcheck_suite.core.text import say
from gradcheck_suite.run import environment
from gradcheck_suite.run.private_names import expect_present

PROGRAM = "gradcheck-suite port"
OUTPUTS = ("output_format", "quiet", "json", "html")
PACKAGES = ("equinox", "flax", "optax")
YOUNG = 50_000
"""New objects after which Python looks for garbage. By default it goes a thousand times over the objects of torch and
JAX while they are imported, which takes a tenth of the time of a small pair and frees next to nothing."""


def add_arguments(parser: parsers.Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "pair",
        metavar="FILE.py:PAIR",
        help="a function that returns a gradcheck_suite.Port or a dict",
    )
    parsers.add_options(parser, PortOptions)
    for one in options_of(OutputOptions):
        if one.name in OUTPUTS:
            parsers.add_option(parser, one, one.default)


def run(arguments: argparse.Namespace) -> int:
    """Judge the pair, and print and write the verdict."""
    options = parsers.parsed(arguments, PortOptions)
    environment.expect_main_job()
    expect_found(arguments.pair)
    given = {name: getattr(arguments, name) for name in OUTPUTS}
    # the command has four of these options; the project's file may set the others, such as accepted
    # faults
    wanted = OutputOptions(**parsers.configured(OutputOptions)).replace(**given)
    wanted = wanted.writable(PROGRAM)
    with CommandOutput(wanted) as output:
        return _judge(arguments, options, output)


def _judge(arguments: argparse.Namespace, options: PortOptions, output: CommandOutput) -> int:
    gc.set_threshold(YOUNG)
    with waiting(IMPORTS):
        environment.prepare()
        expect_present("port")
    # imported after `prepare`, which sets variables that torch and XLA read as they are loaded
    from gradcheck_suite.port.compare import judge_function
    from gradcheck_suite.port.pair import Port, float64_allowed

    gc.freeze()  # the frameworks stay until the end
    # the file may make arrays as it is imported, and JAX would cut them to float32
    with float64_allowed():
        make = resolve_function(arguments.pair, "a pair", returns=(Port, dict))
    baseline = output.options.baseline
    result = judge_function(make, arguments.pair, options, baseline)
    stale = no_longer_found(baseline, [result])
    lines = result.lines
    say(lines[:1] if arguments.quiet else lines)
    shown_map = ["", "map:", *(f"  {line}" for line in result.map_lines)]
    if options.show_map:
        say(shown_map)
    about = environment.environment(PACKAGES)
    found = [replace(v, source=places_source(v.places, output.folder)) for v in result.violations]
    page = partial(page_of, found, result.loop, [*lines, *shown_map])
    output.deliver(
        PROGRAM,
        [result],
        about,
        page,
        stale,
    )
    if result.verdict == "unjudged":
        return exit_status.fail(PROGRAM, f"{arguments.pair}: {result.unjudged}")
    sys.stdout.flush()
    return exit_status.VIOLATED if result.violations or stale else exit_status.HOLDS
