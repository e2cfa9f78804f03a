"""With `overlap_param_gather`: weights that one module lends another have arrived before they are used.

Each case runs a forward right after an update of this rank's shards, then once more with all gathered.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from minimegatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from minimegatron.core.distributed.param_and_grad_buffer import shard_buffer
from minimegatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from minimegatron.core.models.gpt.gpt_model import GPTModel
from minimegatron.core.process_groups_config import ProcessGroupCollection
from tests import parity, parity_bert, parity_t5
from tests.core.distributed.common import make_config, make_groups
from tests.groups import PretendGroup
from tests.ranks import run_ranks

OVERLAP = DistributedDataParallelConfig(
    use_distributed_optimizer=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    bucket_size=300,
)
HIDDEN, SEQ, BATCH, VOCAB = parity.HIDDEN, parity.SEQ, parity.MICRO_BATCH, parity.VOCAB


def wrapped(model, groups, config=None):
    return DistributedDataParallel(config or model.config, OVERLAP, model, pg_collection=groups)


def update(chunk) -> None:
    """What the distributed optimizer does: this rank's shard of every bucket is new."""
    for buffer in chunk.buffers:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            shard_buffer(bucket.param_data, group.size())[group.rank()].mul_(1.5)
    chunk.params_were_updated()


def is_right_at_once(chunk, run) -> bool:
    update(chunk)
    with torch.no_grad():
        at_once = run(chunk)
        chunk.start_param_sync(force_sync=True)
        return torch.equal(at_once, run(chunk))


def tokens(length=SEQ) -> torch.Tensor:
    return torch.randint(VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(3))


def activations(seed=4, length=SEQ) -> torch.Tensor:
    """[s, b, h]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, BATCH, HIDDEN, generator=generator, dtype=torch.float64)


def positions() -> torch.Tensor:
    return torch.arange(SEQ).expand(BATCH, SEQ)


# -- The models --


def whole_gpt(groups, decoder_input, in_nodes=False):
    config = parity.transformer_config(parity.Case(num_layers=2))
    config.overlap_moe_expert_parallel_comm = in_nodes
    spec = get_gpt_decoder_block_spec(config)
    options = {"share_embeddings_and_output_weights": True, "pg_collection": groups}
    chunk = wrapped(GPTModel(config, spec, VOCAB, SEQ, **options), groups)
    arguments = (tokens(), positions(), None, decoder_input, tokens())

    def run(chunk):
        if not in_nodes:
            return chunk(*arguments)
        plan = chunk.module.build_schedule_plan(*arguments)
        return type(plan).run(plan, None, None)

    return chunk, run


def last_stage_with_further_tokens(groups):
    pp = PretendGroup(1, 2)
    groups = ProcessGroupCollection(**{**vars(groups), "pp": pp})
    config = parity.transformer_config(parity.Case(pp=2, num_layers=2, mtp=1))
    spec = get_gpt_decoder_block_spec(config, pp_rank=1)
    chunk = GPTModel(
        config,
        spec,
        VOCAB,
        SEQ,
        pre_process=False,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, pp_rank=1),
        pg_collection=groups,
    )

    def run(chunk):
        chunk.module.set_input_tensor(activations())
        return chunk(tokens(), positions(), None, labels=tokens())

    return wrapped(chunk, groups), run


def t5_that_is_given_the_encoders_output(groups):
    case = parity.Case(model="t5", num_layers=1)
    chunk = parity_t5.build_t5(case, parity.transformer_config(case), groups)

    def run(chunk):
        given = activations(length=parity_t5.S_ENC)
        text = tokens(parity_t5.S_DEC)
        return chunk(None, text, None, None, None, encoder_hidden_states=given, lm_labels=text)

    return wrapped(chunk, groups), run


def bert(groups):
    case = parity.Case(model="bert", num_layers=1, binary_head=False)
    config = parity.transformer_config(case)
    chunk = parity_bert.build_bert(case, config, groups, True, True, None)
    mask = torch.ones(BATCH, SEQ, dtype=torch.int64)
    return wrapped(chunk, groups), lambda chunk: chunk(tokens(), mask, lm_labels=tokens())[0]


class Projection(torch.nn.Module):
    def forward(self, x, weight):
        return F.linear(x, weight)


class Lending(torch.nn.Module):
    """The last layer has the table's weight, and the table itself is not called."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(1)
        self.table = torch.nn.Embedding(40, HIDDEN, dtype=torch.float64)
        self.inner = torch.nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        self.projection, self.way = Projection(), way

    def forward(self, x):
        x, weight = self.inner(x), self.table.weight
        if self.way == "as it is":
            return self.projection(x, weight)
        if self.way == "by keyword":
            return self.projection(x=x, weight=weight)
        return self.projection(x, weight.detach()) if self.way == "detached" else x @ weight.T


def lending(groups, way):
    return wrapped(Lending(way), groups, make_config()), lambda chunk: chunk(activations())


CASES = {
    "a12: last stage with further tokens, no gradients": last_stage_with_further_tokens,
    "a13: decoder_input": partial(whole_gpt, decoder_input=activations()),
    "a13: decoder_input, in nodes": partial(whole_gpt, decoder_input=activations(), in_nodes=True),
    "gpt": partial(whole_gpt, decoder_input=None),
    "t5 with the encoder's output": t5_that_is_given_the_encoders_output,
    "bert": bert,
    **{way: partial(lending, way=way) for way in ("as it is", "by keyword", "detached")},
}


def _cases_on_ranks() -> list[str]:
    groups = make_groups()
    off = []
    for name, build in CASES.items():
        chunk, run = build(groups)
        assert len(chunk.bucket_groups) > 1, name
        off += [] if is_right_at_once(chunk, run) else [name]
    return off


def test_a12_a13_lent_weights_have_arrived():
    assert run_ranks(_cases_on_ranks, 2) == [[], []]


def _read_by_nobody_who_gathers() -> list[str]:
    """Ways to read a weight that nothing waits for: each is refused."""
    groups = make_groups()
    chunk, run = lending(groups, "read directly")
    update(chunk)
    with pytest.raises(RuntimeError) as in_backward:
        run(chunk).sum().backward()
    model, _ = whole_gpt(groups, None)
    update(model)
    ways = (
        model.state_dict,
        model.module.state_dict,
        model.module.decoder.state_dict,
        model.module.sharded_state_dict,
        model.broadcast_params,
    )
    for way in ways:
        with pytest.raises(
            RuntimeError, match=r"call start_param_sync\(force_sync=True\) on every"
        ):
            way()
    model.start_param_sync(force_sync=True)
    for way in ways:
        way()
    chunk.start_param_sync(force_sync=True)
    chunk.zero_grad_buffer()
    run(chunk).sum().backward()
    return [str(in_backward.value)]


def test_a12_a_weight_that_is_read_before_it_came_is_refused():
    for (message,) in run_ranks(_read_by_nobody_who_gathers, 2):
        assert message.startswith("table.weight was used before what other ranks have updated")
