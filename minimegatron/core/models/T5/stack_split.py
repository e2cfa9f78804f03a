"""Which stages of a pipeline have which of T5's two stacks. Torch-free.

Megatron of today has no counterpart: it runs T5 on one stage. Until July 2024 it had a split rank q
(`get_pipeline_model_parallel_split_rank` of `parallel_state`): stages before q have the encoder, q and
those behind it the decoder.

    stage            0 .. q-1           q .. p-1
    stack            encoder            decoder
    its line         ranks 0 .. q-1     ranks 0 .. p-q-1

A stack is cut over its own line of stages as a model of one stack is over all of them.
"""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class StackLine:
    """The stages of one stack: what a `TransformerBlock` asks of its pipeline group."""

    place: int
    num_stages: int

    def rank(self) -> int:
        """This stage's number, from 0, in the line."""
        return self.place

    def size(self) -> int:
        """How many stages the line has."""
        return self.num_stages


@dataclass(frozen=True)
class StackSplit:
    """What a pipeline of `pp_size` stages has where. `split_rank` None: one stage has all."""

    pp_size: int
    split_rank: int | None

    def __post_init__(self) -> None:
        p, q = self.pp_size, self.split_rank
        if (q is None and p > 1) or (q is not None and not 0 < q < p):
            raise ValueError(
                f"T5 over pipeline_model_parallel_size {p} with split rank {q}: the encoder needs the "
                f"stages before the split rank, and the decoder the others; {_remedy(p)}"
            )

    def check_stage(
        self, rank: int, begins: bool, ends: bool, has_encoder: bool, has_decoder: bool
    ) -> None:
        """Raises ValueError for a stage that has other parts than its place says."""
        given = (begins, ends, has_encoder, has_decoder)
        places = (self.begins(rank), self.ends(rank))
        wanted = (*places, self.has_encoder(rank), self.has_decoder(rank))
        if given != wanted:
            raise ValueError(
                f"stage {rank} of {self.pp_size} with split rank {self.split_rank} has (pre_process, "
                f"post_process, add_encoder, add_decoder) {wanted}, not {given}; pass these to T5Model"
            )

    def has_encoder(self, rank: int) -> bool:
        """Whether stage `rank` has layers of the encoder."""
        return self.split_rank is None or rank < self.split_rank

    def has_decoder(self, rank: int) -> bool:
        """Whether stage `rank` has layers of the decoder."""
        return self.split_rank is None or rank >= self.split_rank

    def begins(self, rank: int) -> bool:
        """Whether stage `rank` embeds tokens: it is the first of its line."""
        return rank in (0, self.split_rank)

    def ends(self, rank: int) -> bool:
        """Whether stage `rank` is the last of its line."""
        return rank + 1 in (self.split_rank, self.pp_size)

    def encoder_config(self, config: Any, num_layers: int) -> Any:
        """`config` for an encoder of `num_layers` layers over the stages that have it."""
        stages = self.encoder_line(0).size()
        return replace(config, num_layers=num_layers, pipeline_model_parallel_size=stages)

    def encoder_line(self, rank: int) -> StackLine:
        """Stage `rank`, which has the encoder, in the encoder's line."""
        return StackLine(rank, self.split_rank or 1)

    def decoder_line(self, rank: int) -> StackLine:
        """Stage `rank`, which has the decoder, in the decoder's line."""
        first = self.split_rank or 0
        return StackLine(rank - first, self.pp_size - first)


def _remedy(pp_size: int) -> str:
    if pp_size == 1:
        return "drop pipeline_model_parallel_split_rank"
    return f"give pipeline_model_parallel_split_rank 1 to {pp_size - 1}, or use 1 stage"


def check_t5(config: Any) -> None:
    """Raises ValueError for what two stacks do not run with. `config` may be the arguments, too."""
    v, c = config.virtual_pipeline_model_parallel_size, config.context_parallel_size
    for is_asked, what in (
        (v is not None, f"virtual_pipeline_model_parallel_size {v}"),
        (config.pipeline_schedule is not None, f"pipeline_schedule {config.pipeline_schedule}"),
        (config.pipeline_model_parallel_layout is not None, "pipeline_model_parallel_layout"),
        (c > 1, f"context_parallel_size {c}"),
        (config.num_moe_experts is not None, f"num_moe_experts {config.num_moe_experts}"),
        (config.mtp_num_layers is not None, f"mtp_num_layers {config.mtp_num_layers}"),
        (config.overlap_moe_expert_parallel_comm, "overlap_moe_expert_parallel_comm"),
        (config.defer_embedding_wgrad_compute, "defer_embedding_wgrad_compute"),
    ):
        if is_asked:
            raise ValueError(f"{what} is not for T5; leave it out, or train a GPT")


# -- Which stages share weights --


def ranks_with_word_embedding_of_t5(
    split: StackSplit, is_tied: bool, pp_ranks: list[int]
) -> list[int]:
    """Of one pipeline's global ranks, those with a copy of the word embedding.

    Where a stack begins and, if it is tied, where the loss is. Bound to its first two arguments it is
    what `initialize_model_parallel` takes as `get_embedding_ranks`.
    """
    places = {0, split.split_rank or 0} | ({split.pp_size - 1} if is_tied else set())
    return [pp_ranks[place] for place in sorted(places)]


def ranks_with_position_embedding_of_t5(
    split: StackSplit, is_learned: bool, pp_ranks: list[int]
) -> list[int]:
    """The same for positions, if they are learned: where a stack begins."""
    return ranks_with_word_embedding_of_t5(split, False, pp_ranks) if is_learned else pp_ranks[:1]
