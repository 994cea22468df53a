"""A plan, applied to a training loop: what `TrainStep` and `KitsuneOptimizer` share."""
