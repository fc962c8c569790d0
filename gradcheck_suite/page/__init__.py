"""A page of records: content as data, and one renderer per format.

Must not measure, or run a loop in this process.
"""
