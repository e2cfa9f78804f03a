"""Real runs and Megatron's own source come in; JSON files that pages read go out."""
