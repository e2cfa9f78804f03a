"""The old place of `ModelChunk`, which is in `steps` now.

Imported by: programs that know this place. Calls: `steps`. Megatron has no such class.
"""

from minimegatron.core.pipeline_parallel.steps import ModelChunk, NoFrame

__all__ = ["ModelChunk", "NoFrame"]
