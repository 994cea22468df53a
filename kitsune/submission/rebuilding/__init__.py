"""From an archive to a training step that runs."""
