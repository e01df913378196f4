"""Workloads: seeded, pure functions from a specification to a list of requests."""
