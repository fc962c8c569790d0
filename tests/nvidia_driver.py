"""End with one line where no NVIDIA driver can be loaded, before `tox -e gpu` installs gigabytes
for one.

python tests/nvidia_driver.py
"""

from __future__ import annotations

import ctypes
import sys

LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def main() -> int:
    """Return 0 where the driver sees a device, otherwise print why not and return 2."""
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError:
        reason = f"{LIBRARY} cannot be loaded"
    else:
        count = ctypes.c_int()
        status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
        if not status and count.value:
            return 0
        reason = (
            f"the driver answers with error {status}" if status else "the driver sees no device"
        )
    print(
        f"tox -e gpu: {reason}, and a CUDA device is needed; nothing was run. Use a machine with an NVIDIA GPU; "
        "elsewhere `pytest tests properties` skips what needs one",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
