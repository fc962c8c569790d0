"""Runs a script of `scripts.py` under an audit, in this process or on two ranks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

import gradcheck_suite
from gradcheck_suite.cli.audit import script_runner

GLOO_AT_EXIT = Path(__file__).parent / "gloo_at_exit"
"""The folder of a `sitecustomize` that lets torch's Gloo threads finish before a rank ends."""


def trained(script: Path, *arguments: str):
    """Run a script and return its names."""
    with contextlib.redirect_stdout(io.StringIO()):
        return script_runner(str(script), arguments)()


def audited(script: Path, *arguments: str, **options):
    """Return the result of an audit of a script, and the script's names."""
    audit = gradcheck_suite.audit(name=script.name, **options).open()
    try:
        names = trained(script, *arguments)
    finally:
        result = audit.close()
    return result, names


def accumulate(model, optimizer, windows=3):
    """Take a step on each window of two micro-batches, of four rows of 64 numbers."""
    for _ in range(windows):
        for _ in range(2):
            (model(torch.randn(4, 64)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def free_port() -> str:
    """Return a port that no one listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def audited_on_two_ranks(script: Path, path: Path, *arguments: str, own_parents: bool = False):
    """Audit a script on two ranks, started as a launcher does, without the launcher.

    Args:
        script: the script.
        path: where the result is written.
        arguments: of the script.
        own_parents: whether each rank is started by a shell of its own.

    Returns:
        the result as JSON data, and the standard error and status of each rank.
    """
    command = [
        sys.executable,
        "-m",
        "gradcheck_suite",
        "audit",
        "--json",
        str(path),
        str(script),
        *arguments,
    ]
    if own_parents:
        command = ["sh", "-c", '"$@"; exit $?', "sh", *command]
    shared = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }
    ended = run_two_ranks(command, {**shared, "PYTHONPATH": python_path(GLOO_AT_EXIT)})
    (result,) = json.loads(path.read_text())["results"]
    return result, ended


def python_path(folder: Path) -> str:
    """Return the search path of modules of this process's children, with another folder before it."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def run_two_ranks(command: list[str], shared: dict[str, str]) -> list[tuple[str, int]]:
    """Run a command on two ranks, and return the standard error and status of each.

    Args:
        command: of a rank.
        shared: variables that both ranks have, beside those of this process.
    """
    environment = {**os.environ, **shared, "MASTER_PORT": free_port()}
    started = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    return [(one.communicate(timeout=240)[1], one.returncode) for one in started]
