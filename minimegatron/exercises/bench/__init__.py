"""What checks use: cases, comparisons, a small training step. This file imports nothing."""
