"""Micro-benchmark of the kernels and attention backends: time, share of the roofline, error against fp32."""
