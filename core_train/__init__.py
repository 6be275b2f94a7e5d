"""The main job: configuration, data, launch, the training loop, and its output."""
