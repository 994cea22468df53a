"""Triton kernels of our own, one a file: forward, backward, and the eager reference that says what they compute."""
