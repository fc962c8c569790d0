"""The report: one page of all records, as HTML, Markdown and JSON of the same content.

Must not measure, or run a loop in this process.
"""
