"""The stand-alone script of a violation."""

from gradcheck_suite.script.writer import script_text, unrepeatable

__all__ = ["script_text", "unrepeatable"]
