"""The regression gate: paired server runs, statistics whose error rate can be stated, one verdict."""
