"""One page from the records: HTML for a reader, Markdown and JSON of the same content.

Sections are data; how they look is decided in one place per format. Nothing here measures anything.
"""
