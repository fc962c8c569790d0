"""The sections of the report, a file each: records in, text, tables and figures out."""
