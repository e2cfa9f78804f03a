"""The old place of `ModelChunk`, which is in `steps` now; for files that import it from here."""

from minimegatron.core.pipeline_parallel.steps import ModelChunk, NoFrame

__all__ = ["ModelChunk", "NoFrame"]
