"""Hand-written GPU kernels (Triton) and the functions that launch them.

Importing this package imports nothing heavy; its modules need `triton`. Every function takes ordinary tensors, checks
nothing that its caller guarantees, and writes into tensors that it is given wherever the caller already has one.
"""
