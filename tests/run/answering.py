"""A process for `test_helper_process`: sends what it was given, and whether its parent may wait for it."""

from __future__ import annotations

import json
import os
import socket


def main(handle: int, *arguments: str) -> None:
    """Send the arguments and the number of the parent, and end."""
    with socket.socket(fileno=handle) as to_parent:
        to_parent.sendall(json.dumps([*arguments, os.getppid()]).encode())
