"""The tuner: searches and measures configurations of a workload, and produces a plan."""
