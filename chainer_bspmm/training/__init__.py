"""Training: steps captured in CUDA graphs."""
