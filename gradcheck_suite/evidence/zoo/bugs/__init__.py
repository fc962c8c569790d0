"""One known bug a file, each with a `BUG`."""
