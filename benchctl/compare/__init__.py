"""Differences between results, cell by cell and metric by metric."""
