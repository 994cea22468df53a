"""Builds an arm of a job: a workload with a plan applied, ready to run."""
