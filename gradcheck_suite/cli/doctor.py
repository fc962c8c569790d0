"""Say what is installed, which devices and precision flags there are, and what can run here and what cannot."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform

from gradcheck_suite.cli import exit_status, parsers
from gradcheck_suite.cli.capabilities import capabilities
from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.execution import environment
from gradcheck_suite.records.columns import aligned
from gradcheck_suite.trainers import PACKAGES


def add_arguments(parser: parsers.Parser) -> None:
    """Add the command's arguments, of which there are none."""


def run(arguments: argparse.Namespace) -> int:
    """Print the diagnosis; the status is 0 where the suite's main job can run, 1 where it cannot."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    reasons = environment.missing()
    with contextlib.suppress(CannotRunHere):
        environment.set_precision()
    found = capabilities()
    flags = environment.precision_flags()
    devices = environment.devices()
    versions = environment.versions(PACKAGES)
    _section("versions", {name: version or "not installed" for name, version in versions.items()})
    _section("machine", {"platform": platform.platform(), "processors": str(os.cpu_count())})
    _section("devices", {name: ", ".join(listed) or "none" for name, listed in devices.items()})
    _section("precision flags, as verify sets them", {name: str(value) for name, value in flags.items()})
    _section("compiled programs", {"kept in": str(environment.cache_directory() or "nowhere")})
    _section("can run here", {a.name: f"no: {a.reason}" if a.reason else "yes" for a in found})
    if len(reasons) > 1:
        _section("to install", {str(number): reason for number, reason in enumerate(reasons, start=1)})
    able = all(capability.reason is None for capability in found if capability.main)
    print("the main job can run here" if able else "the main job cannot run here")
    return exit_status.HOLDS if able else exit_status.VIOLATED


def _section(title: str, rows: dict[str, str]) -> None:
    print("\n".join([title, *(f"  {line}" for line in aligned(rows.items())), ""]))
