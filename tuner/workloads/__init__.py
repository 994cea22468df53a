"""Loads workloads by name, copies them, and makes their batches."""
