"""A layout for an unbalanced model: divide the layers so that no stage holds up the others.

Started by: you, and `minimegatron exercises check`. A large vocabulary makes the last stage slow: it
alone computes the scores of all words. Megatron lets you say which stage holds which layers, with a
layout string such as `"Et*3|t*4|t*4|ttL"`. Write the function that finds the best one. Nothing here
needs more than one process, or torch.

    E     the embedding; first, on the first stage         t     one transformer layer
    L     the loss (output layer and cross-entropy); last, on the last stage
    |     ends a stage                                     t*3   the same as ttt

A stage may be empty, `"Et|t||L"`, if there are more stages than work for them.
"""


def choose_layout(
    num_layers: int, pipeline_model_parallel_size: int, layer_times: dict[str, float]
) -> str:
    """The layout string whose slowest stage is as fast as possible.

    Args:
        num_layers: t's in the model.
        pipeline_model_parallel_size: p, the number of stages; the string has p - 1 bars.
        layer_times: {"embedding": 1, "decoder": 3, "loss": 7}: how long one microbatch's forward and
            backward take together, in any unit. A stage takes the sum of its layers' times.

    Layers stay in model order. Where several layouts are equally good, any of them will do. The
    largest model has 61 layers on 16 stages: its layouts are too many to try them all.
    """
    raise NotImplementedError(
        "Write choose_layout: try how many layers fit into each stage, if none may take longer than T"
    )


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
