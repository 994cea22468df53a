"""Search and measure: what turns a workload into a plan."""
