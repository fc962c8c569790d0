"""Say what is installed, which devices and precision flags there are, and what can run here and what cannot."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform

from gradcheck_suite.cli import parsers, statuses
from gradcheck_suite.cli.abilities import abilities
from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.execution import environment
from gradcheck_suite.trainers import PACKAGES


def add_arguments(parser: parsers.Parser) -> None:
    """Add the command's arguments, of which there are none."""


def run(arguments: argparse.Namespace) -> int:
    """Print the diagnosis; the status is 0 where the suite's main job can run, 1 where it cannot."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    reasons = environment.missing()
    with contextlib.suppress(CannotRunHere):
        environment.set_precision()
    found = abilities()
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
        _section("to install", dict(enumerate(reasons, start=1)))
    able = all(ability.reason is None for ability in found if ability.main)
    print("the main job can run here" if able else "the main job cannot run here")
    return statuses.HOLDS if able else statuses.VIOLATED


def _section(title: str, rows: dict[str, str] | dict[int, str]) -> None:
    print(title)
    width = max((len(str(name)) for name in rows), default=0)
    for name, text in rows.items():
        print(f"  {name!s:<{width}}  {text}")
    print()
