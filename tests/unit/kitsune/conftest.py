"""Triton's interpreter does not look for overflows of integers: that doubles the time of its kernels.

The sizes here are far from any overflow. tests/gpu has those at which an index could, without an interpreter.
"""

from dataclasses import replace

from triton.runtime import interpreter

BUILDER = interpreter.interpreter_builder
BUILDER.options = replace(BUILDER.options, sanitize_overflow=False)
