"""All architectures, in the order of the modules that define them."""

from __future__ import annotations

from studies.ports import attention, images, losses, reported, sequences
from studies.ports.planted import ARCHITECTURES

__all__ = ["ARCHITECTURES", "attention", "images", "losses", "reported", "sequences"]
