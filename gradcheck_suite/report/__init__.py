"""The report: one page of all records, as HTML, Markdown and JSON of the same content.

A section returns data, and one module per format renders it. Must not measure, or run a loop in
this process.
"""
