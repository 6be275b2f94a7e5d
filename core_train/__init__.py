"""The main job: configuration, data, launch, the training loop, and what it shows and writes."""
