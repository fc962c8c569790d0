"""The stand-alone script of a violation."""

from gradcheck_suite.script.writer import (
    NoScriptError,
    ScriptFailure,
    script_failure,
    script_text,
)

__all__ = ["NoScriptError", "ScriptFailure", "script_failure", "script_text"]
