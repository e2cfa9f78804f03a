"""What parity needs of T5: its model, its batches, its step; and its cases.

Used by tests/test_parity_t5.py, by the mutation tests and by `parity`, which compares with one process.
The two sequences have different lengths everywhere, so that no message is taken for another kind.
"""

from functools import cache, partial
from typing import Any

import torch

from minimegatron.core.models.T5.stack_split import (
    StackSplit,
    ranks_with_position_embedding_of_t5,
    ranks_with_word_embedding_of_t5,
)
from minimegatron.core.models.T5.t5_model import T5Model
from minimegatron.core.models.T5.t5_spec import (
    decoder_model_with_local_spec,
    encoder_model_with_local_spec,
)
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.core.utils import get_attr_wrapped_model, get_device
from tests.covering import Row, Rule, Space, covering_array
from tests.parity import (
    MICRO_BATCH,
    VOCAB,
    Case,
    ModelUnderTest,
    asks_for_logits,
    loss_func,
    loss_of_logits,
)

S_ENC, S_DEC = 12, 8


def split_of(case: Case) -> StackSplit:
    return StackSplit(case.pp, case.split)


def build_t5(case: Case, config: TransformerConfig, groups: Any, *_: Any) -> T5Model:
    is_cut = case.logits != "gathered"
    return build_on(split_of(case), groups.pp.rank(), config, groups, not case.llama, is_cut)


def build_on(
    split: StackSplit,
    rank: int,
    config: TransformerConfig,
    groups: Any,
    is_tied: bool,
    parallel_output: bool = True,
) -> T5Model:
    return T5Model(
        config,
        split.encoder_config(config, config.num_layers),
        encoder_model_with_local_spec(),
        decoder_model_with_local_spec(),
        VOCAB,
        S_ENC,
        pre_process=split.begins(rank),
        post_process=split.ends(rank),
        parallel_output=parallel_output,
        share_embeddings_and_output_weights=is_tied,
        position_embedding_type="learned_absolute" if is_tied else "rope",
        add_encoder=split.has_encoder(rank),
        add_decoder=split.has_decoder(rank),
        pg_collection=groups,
    )


def batches(num: int) -> list[dict[str, torch.Tensor]]:
    """The global batch's microbatches; each has other lengths of both sequences."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for i in range(num):
        text = torch.randint(VOCAB, (MICRO_BATCH, S_ENC), generator=generator)
        answer = torch.randint(VOCAB, (MICRO_BATCH, S_DEC + 1), generator=generator)
        lengths = torch.tensor([[S_ENC - i % 3], [S_ENC - 4]])
        mask = torch.ones(MICRO_BATCH, S_DEC, dtype=torch.float64)
        mask[:, S_DEC - 1 - i % 3 :] = 0.0
        batch = {
            "text_enc": text,
            "text_dec": answer[:, :-1],
            "labels": answer[:, 1:],
            "loss_mask": mask,
            # True where there is no token: [b, 1, 1, s], for every query alike.
            "enc_mask": (torch.arange(S_ENC) >= lengths)[:, None, None, :],
            "dec_mask": (mask == 0.0)[:, None, None, :],
        }
        found.append({name: tensor.to(get_device()) for name, tensor in batch.items()})
    return found


def step(data_iterator, model, checkpoint_activations_microbatch=None):
    batch = next(data_iterator)
    output = model(
        batch["text_enc"],
        batch["text_dec"],
        batch["enc_mask"],
        batch["dec_mask"],
        batch["enc_mask"],
        lm_labels=None if asks_for_logits(model) else batch["labels"],
        checkpoint_activations_microbatch=checkpoint_activations_microbatch,
    )
    loss = partial(loss_func, batch["loss_mask"])
    if asks_for_logits(model):
        group = get_attr_wrapped_model(model, "pg_collection").tp
        loss = partial(loss_of_logits, loss, batch["labels"], group)
    return output, loss


MODEL = ModelUnderTest(
    build_t5,
    batches,
    step,
    config_fields=lambda case: {"num_query_groups": None},
    get_embedding_ranks=lambda case: partial(
        ranks_with_word_embedding_of_t5, split_of(case), not case.llama
    ),
    get_position_embedding_ranks=lambda case: partial(
        ranks_with_position_embedding_of_t5, split_of(case), not case.llama
    ),
    seq_length=S_ENC,
    decoder_seq_length=S_DEC,
)

# -- Cases --

SPLITS = {1: (None,), 2: (1,), 3: (1, 2), 4: (2,)}
"""By the number of stages: those of the decoder's first one that are tried."""

SPACE = Space(
    {
        "world": (2, 3, 4),
        "tp": (1, 2),
        "pp": (1, 2, 3, 4),
        "dp": (1, 2),
        "split": (None, 1, 2),
        "llama": (False, True),
        "M": (1, 2, 5),
        "batched": (False, True),
        "deallocate": (False, True),
        "sp": (False, True),
        "recompute": (None, "selective", "full"),
        "dist_opt": (False, True),
        "overlap_grad_reduce": (False, True),
        "per_token": (False, True),
        "delay_wgrad": (False, True),
        "loss_scale": (1.0, 65536.0),
        "evaluates_in": (None, "no_grad", "inference_mode"),
        "fails": (False, True),
        "frozen": (None, "embedding", "all but first layer", "all but low rank"),
        "weights": (False, True),
        "logits": (None, "sliced", "gathered"),
    },
    [
        Rule(("world", "tp", "pp", "dp"), lambda world, tp, pp, dp: world == tp * pp * dp),
        Rule(("pp", "split"), lambda pp, split: split in SPLITS[pp]),
        Rule(("sp", "tp"), lambda sp, tp: not sp or tp > 1),
        Rule(("dist_opt", "dp"), lambda dist_opt, dp: not dist_opt or dp > 1),
        Rule(("overlap_grad_reduce", "dp"), lambda overlap, dp: not overlap or dp > 1),
    ],
)


@cache
def pairwise_rows() -> list[Row]:
    """Rows of `SPACE` in which every two values that may meet do meet."""
    return covering_array(SPACE, cost=lambda row: case_of(row).cost)


def case_of(row: Row) -> Case:
    """A row of `SPACE` as a case: two layers in each stack, so that two stages may share either."""
    options = {name: value for name, value in row.items() if name != "world"}
    return Case(model="t5", num_layers=2, **options)


T5 = partial(Case, model="t5", num_layers=2)
NAMED_CASES = {
    "the encoder's output crosses two decoder stages": T5(pp=3, split=1, M=4),
    "and its storage is freed where it was made": T5(pp=3, split=1, M=4, deallocate=True),
    "the encoder on two stages": T5(pp=3, split=2, M=4, llama=True),
    "a decoder stage that gets two tensors and hands one on": T5(pp=4, split=1, M=4, num_layers=3),
    "two stages with one stack each": T5(pp=2, split=1, M=2),
    "whole, on two tensor-parallel ranks": T5(tp=2, M=2, sp=True, num_layers=1),
}
"""By what is said of them: smallest cases of known mistakes."""
