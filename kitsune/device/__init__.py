"""What the runtime asks a device, answered for CUDA and for the CPU."""
