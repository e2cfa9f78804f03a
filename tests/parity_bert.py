"""BERT in `parity`: how its chunks are built, made-up batches with padding, and its cases.

Used by tests/test_parity_bert.py and by the mutation tests.
"""

from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from minimegatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from minimegatron.core.models.bert.bert_model import BertModel
from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.core.utils import get_attr_wrapped_model, get_device
from tests.covering import Row, Rule, Space, covering_array
from tests.parity import (
    MICRO_BATCH,
    SEQ,
    VOCAB,
    Case,
    ModelUnderTest,
    asks_for_logits,
    losses_of,
)

MASK_ID, PAD_ID = 3, 5
LENGTHS = ((SEQ, SEQ), (SEQ, 3), (5, SEQ), (2, 6))
"""Of the two rows of a microbatch, in turn: some have padding, some have none."""


def build_bert(
    case: Case, config: TransformerConfig, groups: Any, first: bool, last: bool, vp: int | None
) -> BertModel:
    return BertModel(
        config,
        2 if case.binary_head else 0,
        bert_layer_local_spec,
        VOCAB,
        SEQ,
        pre_process=first,
        post_process=last,
        parallel_output=case.logits != "gathered",
        share_embeddings_and_output_weights=not case.llama,
        position_embedding_type="rope" if case.llama else "learned_absolute",
        add_binary_head=case.binary_head,
        pg_collection=groups,
        vp_stage=vp,
    )


def bert_batches(num: int) -> list[dict[str, torch.Tensor]]:
    """The global batch's microbatches; another number of tokens is masked in each."""
    generator = torch.Generator().manual_seed(11)
    found = []
    for i in range(num):
        shape = (MICRO_BATCH, SEQ)
        text = torch.randint(PAD_ID + 1, VOCAB, shape, generator=generator)
        labels = torch.full(shape, -1)
        labels[:, 1] = text[:, 1]
        labels[0, : i % 2 + 1] = text[0, : i % 2 + 1]
        text = text.where(labels < 0, MASK_ID)
        lengths = torch.tensor(LENGTHS[i % len(LENGTHS)]).unsqueeze(1)
        places = torch.arange(SEQ).expand(shape)
        padding_mask = (places < lengths).long()
        batch = {
            "text": text.where(padding_mask > 0, PAD_ID),
            "types": ((places > 1) & (places < lengths)).long(),
            "labels": labels,
            "is_random": torch.tensor([i % 2, 1]),
            "loss_mask": (labels >= 0).double(),
            "padding_mask": padding_mask,
        }
        found.append({name: tensor.to(get_device()) for name, tensor in batch.items()})
    return found


def bert_loss(loss_mask, is_random, output, labels=None, group=None):
    losses, binary_logits = output
    if labels is not None:
        losses = losses_of(losses, labels, group)
    loss = (losses * loss_mask).sum() / loss_mask.sum()
    if binary_logits is not None:
        loss = loss + F.cross_entropy(binary_logits, is_random)
    return loss, {"loss": loss.detach().clone()}


def bert_step(data_iterator, model):
    batch = next(data_iterator)
    is_paired = model.module.num_tokentypes > 0
    output = model(
        batch["text"],
        batch["padding_mask"],
        tokentype_ids=batch["types"] if is_paired else None,
        lm_labels=None if asks_for_logits(model) else batch["labels"],
    )
    labels = batch["labels"] if asks_for_logits(model) else None
    more = {"labels": labels, "group": get_attr_wrapped_model(model, "pg_collection").tp}
    return output, partial(bert_loss, batch["loss_mask"], batch["is_random"], **more)


MODEL = ModelUnderTest(build_bert, bert_batches, bert_step)

SPACE = Space(
    {
        "world": (2, 4),
        "tp": (1, 2, 4),
        "pp": (1, 2, 4),
        "dp": (1, 2, 4),
        "vp": (None, 2),
        "M": (1, 3),
        "llama": (False, True),
        "binary_head": (True, False),
        "sp": (False, True),
        "recompute": (None, "selective", "full"),
        "dist_opt": (False, True),
        "overlap_grad_reduce": (False, True),
        "overlap": (False, True),
        "deallocate": (False, True),
        "delay_wgrad": (False, True),
        "planned": (False, True),
        "evaluates_in": (None, "no_grad", "inference_mode"),
        "fails": (False, True),
        "frozen": (None, "embedding", "all but output", "all but low rank"),
        "weights": (False, True),
        "logits": (None, "sliced", "gathered"),
        "loss_scale": (1.0, 65536.0),
    },
    [
        Rule(("world", "tp", "pp", "dp"), lambda world, tp, pp, dp: world == tp * pp * dp),
        Rule(("pp", "vp"), lambda pp, vp: vp is None or pp > 1),
        Rule(("tp", "sp"), lambda tp, sp: tp > 1 or not sp),
        Rule(("tp", "llama"), lambda tp, llama: tp < 4 or not llama),
        Rule(("pp", "overlap", "vp"), lambda pp, overlap, vp: not overlap or vp is not None),
        Rule(("pp", "planned"), lambda pp, planned: not planned or pp > 1),
        Rule(("pp", "deallocate"), lambda pp, deallocate: not deallocate or pp > 1),
    ],
)
"""The options of parity that BERT meets. With `llama` the weights are untied, and positions rotary."""


@cache
def pairwise_rows() -> list[Row]:
    """Rows of `SPACE` in which every two values that may meet do meet."""
    return covering_array(SPACE, cost=lambda row: case_of(row).cost)


def case_of(row: Row) -> Case:
    """A row of `SPACE` as a case; as many layers as chunks, so that every chunk has one."""
    options = {name: value for name, value in row.items() if name != "world"}
    p, vp = row["pp"], row["vp"]
    options |= {"num_layers": p * (vp or 1), "model": "bert"}
    if vp is not None:
        options |= {"G": p, "M": p * (1 if row["M"] == 1 else 2), "batched": False}
    return Case(**options)


BERT = partial(Case, model="bert")
NAMED_CASES = {
    "one short row": BERT(dp=2, M=1, num_layers=1),
    "a middle stage, which needs the mask": BERT(pp=3, M=2),
    "bias of a tied output layer": BERT(pp=2, M=2),
    "head's gradients are partial": BERT(tp=2, M=1, num_layers=1, sp=True),
    "pooler's gradients are whole": BERT(tp=2, M=2, num_layers=1, sp=True, llama=True),
    "no pooler to sum": BERT(tp=2, M=1, num_layers=1, sp=True, binary_head=False),
    "in float32": BERT(tp=2, M=2, num_layers=2, dtype="float32"),
}
"""By what is said of them: the smallest cases of known mistakes, and options that meet nowhere else."""
