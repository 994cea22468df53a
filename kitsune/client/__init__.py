"""A Kitsune server, as a training script sees it. A plan that cannot be had never stops a training."""
