"""A training step as CUDA graphs: whole, or as a forward and a backward; and the guards of each replay."""
