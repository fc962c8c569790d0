"""Run what needs a CUDA device, in three parts that end by themselves and keep what they found when
they are cut.

This process opens no device: a context of its own would take memory and time from what is measured.
"""

from __future__ import annotations

import time
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from gradcheck_suite.cli import arguments as parsers
from gradcheck_suite.cli.exit_status import HOLDS, VIOLATED
from gradcheck_suite.core.records import append_record
from gradcheck_suite.errors import CannotRunHere
from gradcheck_suite.run import environment
from studies.records import KINDS

PARTS = ("correctness", "time", "memory")
MINUTES = 7.4
"""Time of a part; what runs then is stopped within seconds, so that a part ends within eight minutes."""


def add_arguments(parser: parsers.Parser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--part",
        required=True,
        type=parsers.choice_of(PARTS),
        metavar="PART",
        help=", ".join(PARTS),
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="where the log and records/ go"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        metavar="N",
        help=f"of the part (default {MINUTES})",
    )
    parser.add_argument(
        "--device",
        type=parsers.choice_of(("cuda", "cpu")),
        default="cuda",
        metavar="DEVICE",
        help="cpu rehearses the part without a GPU; its records say so (default cuda)",
    )


def run(arguments: Namespace) -> int:
    """Run a part; write its log and its records as they come, and print one line on each command
    that has ended.
    """
    environment.expect_main_job()
    out = arguments.out.resolve()
    parsers.expect_writable(out)
    from studies.tests.device_run import StageRun, ended_by_a_signal, stages

    about = _about(arguments.device)
    card = about["device"].get("gpu", "no GPU: rehearsed on the CPU")
    began, passed = time.monotonic(), True
    end = began + 60 * arguments.minutes
    wanted = stages(arguments.part, arguments.device)
    out.mkdir(parents=True, exist_ok=True)
    print(f"{arguments.part} on {card}", flush=True)
    with (out / f"{arguments.part}.log").open("a") as log, ended_by_a_signal():
        for number, stage in enumerate(wanted):
            left = sum(each.share for each in wanted[number:])
            stage_end = time.monotonic() + (end - time.monotonic()) * stage.share / left
            ran = StageRun(stage, arguments.device, out, log, stage_end)
            for found in ran.run():
                passed &= found["as_expected"]
                wrong = "" if found["as_expected"] else " (not as expected)"
                print(
                    f"{found['task']}: {found['result']}, {found['seconds']:.0f} s{wrong}",
                    flush=True,
                )
                command = found.pop("command")
                data = {"part": arguments.part, "device": arguments.device, "gpu": card, **found}
                append_record(out, KINDS["gpu"], data, environment=about, command=command)
            if ran.interrupted:
                raise KeyboardInterrupt
    print(f"{time.monotonic() - began:.0f} s; log and records are in {arguments.out}", flush=True)
    return HOLDS if passed else VIOLATED


def _about(device: str) -> dict[str, Any]:
    """Return the environment with the device, as another process sees it.

    Raises:
        CannotRunHere: torch or JAX sees no CUDA device, where one is asked for.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        reasons, about = pool.submit(_look, device).result()
    if reasons:
        raise CannotRunHere(
            f"a CUDA device for torch and JAX is needed, and {'; '.join(reasons)}. Nothing was run."
            " Use a machine with a GPU and CUDA builds of both, or rehearse with --device cpu"
        )
    return about


def _look(device: str) -> tuple[list[str], dict[str, Any]]:
    import jax
    import torch

    from studies.step_times import device_info

    reasons = []
    if device == "cuda":
        if not torch.cuda.is_available():
            reasons.append(f"torch {torch.__version__} sees none")
        try:
            jax.devices("gpu")
        except RuntimeError as error:
            reasons.append(f"jax {jax.__version__} sees none ({str(error).splitlines()[0]})")
    return reasons, {} if reasons else {**environment.environment(), "device": device_info(device)}
