"""Long work in shards: each shard is one command line, run by a worker, and its files are merged in the end.

A shard depends on what is asked and on its seeds alone, so the records are the same whatever the number of workers.
Must not judge anything itself.
"""
