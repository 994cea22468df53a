"""Workloads: found by name, copied, fed with batches."""
