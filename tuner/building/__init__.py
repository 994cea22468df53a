"""One arm of a job, built: a workload with a plan applied, ready to run."""
