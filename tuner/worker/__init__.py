"""The worker: claims runs of the queue and carries them out."""
