"""The load generator: replays a workload on a schedule against an OpenAI-compatible endpoint and records what it saw.

`benchctl.loadgen.run.run_load` is the way in. This package imports nothing by itself: a worker process starts with
what it needs.
"""
