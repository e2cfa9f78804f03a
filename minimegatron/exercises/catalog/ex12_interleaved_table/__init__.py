"""The interleaved schedule: its table, and why it warms up twice as long."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex12_interleaved_table",
    title="The interleaved schedule's table, and the x2 warm-up",
    tier="core",
    minutes=35,
    num_ranks=4,
    mirrors="minimegatron.core.pipeline_parallel.schedule_table.get_schedule_table",
    summary="Write the order of interleaved 1F1B: the table of chunks and the warm-up count.",
    real=(
        "minimegatron.core.pipeline_parallel.schedule_table.get_schedule_table",
        "minimegatron.core.pipeline_parallel.schedule_table.count_rank_microbatches",
    ),
    question=(
        "If messages took no time, half of 2(p - r - 1) would give a step of the same length. "
        "What is the factor 2 needed for?"
    ),
)
