"""Which numbers of microbatches interleaving cannot run.

Torch-free. Megatron has no counterpart: these checks stand in its schedule.
"""


def check_interleaving(
    pp_size: int, num_microbatches: int, microbatch_group_size_per_vp_stage: int
) -> None:
    """Raises ValueError unless p <= G <= M and the last group has 0 or at least p microbatches.

    A group shorter than the pipeline returns to a stage before the stage has finished with the
    group's previous chunk: its messages would arrive out of the order that the stage expects.
    """
    p, M, G = pp_size, num_microbatches, microbatch_group_size_per_vp_stage
    if not p <= G <= M:
        raise ValueError(
            f"interleaving needs pipeline size <= group size <= microbatches, but they are "
            f"{p}, {G} and {M}; set microbatch_group_size_per_vp_stage between {p} and {M}"
            + (f", and use at least {p} microbatches" if p > M else "")
        )
    if 0 < M % G < p:
        raise ValueError(
            f"{M} microbatches in groups of {G} leave a last group of {M % G}, shorter than the "
            f"{p} pipeline stages; use {M - M % G} or {M - M % G + p} microbatches, or other groups"
        )
