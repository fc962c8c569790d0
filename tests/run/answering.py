"""A process for `test_helper_process`: sends what it was given, and whether its parent may wait for
it.
"""

from __future__ import annotations

import os
from multiprocessing.connection import Connection


def main(connection: Connection, *arguments: str) -> None:
    """Send the arguments and the number of the parent, and end."""
    connection.send([*arguments, os.getppid()])
