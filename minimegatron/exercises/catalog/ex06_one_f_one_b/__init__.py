"""1F1B: the warm-up count, and the loop that trains over several stages."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex06_one_f_one_b",
    title="Warm-up count and the 1F1B loop",
    tier="core",
    minutes=45,
    num_ranks=4,
    mirrors="minimegatron.core.pipeline_parallel.loops.one_f_one_b",
    summary="Write the three phases of plain 1F1B, with the calls between stages.",
    real=(
        "minimegatron.core.pipeline_parallel.loops.one_f_one_b",
        "minimegatron.core.pipeline_parallel.schedules.forward_backward_pipelining_without_interleaving",
    ),
    question=(
        "The loop runs within a `frame`, which decides when gradients may be sent. "
        "During which backward of stage 0 does that happen, and during which of the last "
        "stage?"
    ),
    older_imports=tuple(
        f"minimegatron.core.{module}"
        for module in (
            "pipeline_parallel.p2p_communication",
            "pipeline_parallel.schedules",
            "pipeline_parallel.steps",
            "pipeline_parallel.utils",
            "process_groups_config",
            "utils",
        )
    ),
    older_names=(("one_f_one_b", "forward_backward_pipelining_without_interleaving"),),
)
