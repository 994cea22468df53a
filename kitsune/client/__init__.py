"""The client of a Kitsune server, for training scripts. A failed plan lookup never stops a training."""
