"""Device access for CUDA and the CPU: streams, memory, CUDA graphs, static batches, TF32 flags."""
