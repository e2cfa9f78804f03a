"""What a block of layers refuses: to run without an input.

Megatron has no counterpart.
"""


def refuse_no_input() -> None:
    """Raises ValueError: nothing came from the embedding, or from the previous stage."""
    raise ValueError(
        "this chunk has no input; call set_input_tensor with what the previous stage sent "
        "(or build the first chunk with pre_process=True and pass hidden_states)"
    )
