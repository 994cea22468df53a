"""The optimizer's update: its implementation flags, loss scaling, and its capture in a CUDA graph."""
