"""Counts with their nouns, and names and texts in two columns. Imports neither framework."""

from __future__ import annotations

from collections.abc import Iterable


def aligned(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each pair of a name and a text, with the texts in one column."""
    pairs = list(pairs)
    width = max((len(name) for name, _ in pairs), default=0)
    return [f"{name:<{width}}  {text}".rstrip() for name, text in pairs]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as `1 window` or `2 windows`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
