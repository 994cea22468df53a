"""Reads and changes the autograd graph of a step: its leaves, outputs and hooks, and the thread of its backward."""
