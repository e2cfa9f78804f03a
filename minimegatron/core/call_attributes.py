"""What observers are told of a call: read from its arguments.

Torch-free. Megatron has no counterpart.
"""

from typing import Any


def of_model_forward(arguments: dict[str, Any]) -> dict[str, Any]:
    """The chunk and the number of its layers."""
    model = arguments["self"]
    return {"chunk": model.vp_stage or 0, "layers": model.decoder.num_layers_per_pipeline_rank}


def of_layer_forward(arguments: dict[str, Any]) -> dict[str, Any]:
    """The layer's number in the whole model."""
    return {"layer": arguments["self"].layer_number}
