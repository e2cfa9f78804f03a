"""All exercises: one folder each. This file imports nothing."""
