"""Triton kernels, one for each file: forward, backward, and an eager reference that defines the result."""
