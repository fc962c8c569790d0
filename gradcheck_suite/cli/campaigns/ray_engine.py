"""Shards as tasks of a Ray cluster: a task returns its files, so that the machines need not share a disk.

The user's files must be at the same paths on each machine. Ray is imported here alone.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from gradcheck_suite.cli.campaigns.folder import Shards
from gradcheck_suite.cli.campaigns.worker import run_shard
from gradcheck_suite.errors import CannotRunHere, UsageError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
"""What an HTTP/2 client says first (RFC 9113, section 3.4). A gRPC server, as Ray's is, answers with its settings."""
FRAME_START, FRAME_SETTINGS = 4, 4
"""The bytes of a frame up to its type, and the type of the settings."""
ANSWER_S = 5.0
"""Seconds that a cluster has to answer."""
RETRIES = 3
"""Times that Ray runs a shard again whose worker is lost."""


def files_of_shard(command: Sequence[str]) -> tuple[int, dict[str, bytes]]:
    """Run a shard in a temporary folder; return its exit status, and its files by their path within the folder."""
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        status = run_shard(command, top)
        files = {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}
    return status, files


def expect_answer(address: str) -> None:
    """Refuse an address at which nothing answers as Ray does: Ray itself would try for minutes.

    Args:
        address: `HOST:PORT`, or with a scheme such as `ray://HOST:PORT`; `auto` is left to Ray.

    Raises:
        UsageError: it is no address.
        CannotRunHere: nothing listens there, or something that is no gRPC server.
    """
    if address == "auto":
        return
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"--address: expected HOST:PORT, ray://HOST:PORT or auto; got {address!r}")
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWER_S) as connection:
            connection.sendall(PREFACE)
            with connection.makefile("rb") as stream:
                answer = stream.read(FRAME_START)
        reason = None if answer[3:] == bytes([FRAME_SETTINGS]) else "what listens there is something else"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise CannotRunHere(f"--address {address}: no Ray cluster answers there ({reason})")


def run_on_ray(
    commands: Sequence[Sequence[str]],
    waiting: Iterable[int],
    shards: Shards,
    workers: int,
    progress: Callable[[int], None],
    address: str | None = None,
) -> None:
    """Run the waiting shards as tasks of Ray.

    Args:
        commands: the command line of each shard, by number.
        waiting: the numbers of the shards to run.
        shards: where their files go.
        workers: processors of the local cluster; a cluster that is joined has its own.
        progress: called with the number of each shard that is done.
        address: of a cluster to join; None starts one here.

    Raises:
        CannotRunHere: Ray is not installed, the cluster does not answer, or a shard ends its worker again and again.
    """
    if address is not None:
        expect_answer(address)
    try:
        import ray
    except ImportError:
        raise CannotRunHere("--engine ray: ray is not installed: pip install 'gradcheck-suite[ray]'") from None
    try:
        cluster = {"address": address} if address else {"num_cpus": workers, "include_dashboard": False}
        ray.init(**cluster, logging_level="error", log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise CannotRunHere(
            f"--engine ray: no cluster could be {'joined' if address else 'started'} ({reason})"
        ) from None
    try:
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(files_of_shard)
        running = {task.remote(list(commands[number])): number for number in waiting}
        while running:
            (done, *_), _ = ray.wait(list(running), num_returns=1)
            number = running.pop(done)
            try:
                status, files = ray.get(done)
            except ray.exceptions.WorkerCrashedError:
                command = " ".join(("gradcheck-suite", *commands[number]))
                raise CannotRunHere(
                    f"shard {number} ended {1 + RETRIES} worker processes of Ray: run {command} by itself"
                ) from None
            folder = shards.partial(number)
            for name, content in files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(content)
            shards.finish(number, status)
            progress(number)
    finally:
        ray.shutdown()
