"""Opens a page in the browser of the desktop, where somebody at a terminal waits for it."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path


def open_page(path: Path) -> bool:
    """Open a file in the browser, and return whether a browser took it.

    Nothing opens in a pipe, as in CI, or on a machine without a desktop: `webbrowser` would start a browser of text in
    the terminal there.
    """
    desktop = sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    return bool(desktop) and sys.stdout.isatty() and webbrowser.open(path.resolve().as_uri())
