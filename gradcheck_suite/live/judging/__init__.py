"""The judgement of each optimizer step of a running script, from what was recorded of it.

Must not replace anything in torch: `live.recording` does.
"""
