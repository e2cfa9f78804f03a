"""ZeRO-1 against the plain optimizer, in every mode of overlap; and with a tied embedding."""

import pytest
import torch
import torch.distributed as dist

from minimegatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from minimegatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
from minimegatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from minimegatron.core.tracing import observed_by
from tests.core.distributed.common import (
    Recorder,
    Toy,
    make_batch,
    make_config,
    make_groups,
    run_microbatches,
)
from tests.figures import figure
from tests.ranks import run_ranks

MODES = {
    "plain": {},
    "sharded": {"use_distributed_optimizer": True},
    "reduce overlapped": {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
    "both overlapped": {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
}


def _build(module, groups, mode, grad_reduce_in_fp32=False, bucket_size=700, **kwargs):
    flags = MODES[mode]
    ddp_config = DistributedDataParallelConfig(
        **flags, grad_reduce_in_fp32=grad_reduce_in_fp32, bucket_size=bucket_size
    )
    chunk = DistributedDataParallel(make_config(), ddp_config, module, pg_collection=groups)
    dtype = next(module.parameters()).dtype
    config = OptimizerConfig(
        **{
            name: flags.get(name, False)
            for name in ("use_distributed_optimizer", "overlap_param_gather")
        },
        **{"lr": 1e-2, "bf16": dtype == torch.bfloat16, **kwargs},
    )
    return chunk, get_megatron_optimizer(config, [chunk], pg_collection=groups)


def _steps(chunk, optimizer, rank, microbatches=(3, 1, 2)):
    norms = []
    for step, num_microbatches in enumerate(microbatches):
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        run_microbatches(chunk, step, rank, num_microbatches)
        chunk.finish_grad_sync()
        successful, grad_norm, zeros = optimizer.step()
        assert successful
        norms.append((grad_norm, zeros))
    chunk.start_param_sync(force_sync=True)
    return {name: param.detach().clone() for name, param in chunk.module.named_parameters()}, norms


def _sharded_equals_plain():
    groups = make_groups()
    rank, num_ranks = groups.dp_cp.rank(), groups.dp_cp.size()
    report = []
    for dtype, kwargs in (
        (torch.float64, {}),
        (torch.float64, {"optimizer": "sgd"}),
        (torch.float32, {}),
        (torch.float32, {"clip_grad": 0.01, "log_num_zeros_in_grad": True}),
        (torch.bfloat16, {}),
        (torch.bfloat16, {"grad_reduce_in_fp32": True, "clip_grad": 0.01}),
    ):
        results = {
            mode: _steps(*_build(Toy(dtype), groups, mode, **kwargs), rank) for mode in MODES
        }
        expected, norms = results["plain"]
        for mode, (params, their_norms) in results.items():
            difference = max(
                float((params[name].double() - expected[name].double()).abs().max())
                for name in expected
            )
            report.append((num_ranks, str(dtype), mode, difference))
            if dtype == torch.float64:
                assert difference <= 1e-12, report[-1]
            elif num_ranks == 2:
                # Two addends have one sum, the norm is summed in float64, Adam is elementwise.
                assert difference == 0.0, report[-1]
            else:
                # More addends are added in an order that depends on their place in the message,
                # and Adam's first step is lr times the sign of a gradient that may be nearly 0.
                assert difference <= (2e-4 if dtype == torch.float32 else 2e-2), report[-1]
            tolerance = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
            for (norm, zeros), (their_norm, their_zeros) in zip(norms, their_norms, strict=True):
                assert abs(norm / their_norm - 1.0) < tolerance and zeros == their_zeros
        # All data-parallel ranks have the same weights.
        for params, _ in results.values():
            for param in params.values():
                copies = [torch.empty_like(param) for _ in range(num_ranks)]
                dist.all_gather(copies, param, group=groups.dp_cp)
                assert all(torch.equal(param, copy) for copy in copies)
    return report


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sharded_equals_plain(num_ranks):
    for line in run_ranks(_sharded_equals_plain, num_ranks)[0]:
        figure(" ".join(map(str, line)))


def _gathering_overlaps_the_forward():
    groups = make_groups()
    rank = groups.dp_cp.rank()
    chunk, optimizer = _build(Toy(), groups, "both overlapped", bucket_size=300)
    num_buckets = len(chunk.bucket_groups)
    assert num_buckets >= 3
    for step in range(3):
        chunk.zero_grad_buffer()
        recorder = Recorder()
        with observed_by(recorder):
            run_microbatches(chunk, step, rank, 2)
        names = [call.name for call in recorder.calls]
        # One was launched by the last step, the others by the forward, each once for both
        # microbatches; every reduce-scatter comes after the last of them.
        assert names.count("all-gather") == (num_buckets - 1 if step else 0)
        assert names.count("reduce-scatter") == num_buckets
        assert "all-gather" not in names[names.index("reduce-scatter") :]
        chunk.finish_grad_sync()
        recorder = Recorder()
        with observed_by(recorder):
            optimizer.step()
        assert len(recorder.named("all-gather")) == 1
        with pytest.raises(RuntimeError, match=r"start_param_sync\(force_sync=True\)"):
            chunk.state_dict()
    chunk.start_param_sync(force_sync=True)
    assert chunk.state_dict().keys() == Toy().state_dict().keys()
    # A step that is skipped leaves nothing to gather.
    chunk, optimizer = _build(
        Toy(torch.bfloat16), groups, "both overlapped", loss_scale=4.0, clip_grad=0.0
    )
    run_microbatches(chunk, 0, rank, 1)
    chunk.finish_grad_sync()
    if rank == 1:
        optimizer.shards[0].model_grad().view(-1)[0] = float("nan")
    recorder = Recorder()
    with observed_by(recorder):
        assert optimizer.step() == (False, None, None)
        chunk.start_param_sync(force_sync=True)
    assert not recorder.named("all-gather")
    # An evaluation right after a step sees the new parameters too.
    chunk, optimizer = _build(Toy(), groups, "both overlapped", bucket_size=300)
    plain, plain_optimizer = _build(Toy(), groups, "plain")
    for each, its_optimizer in ((chunk, optimizer), (plain, plain_optimizer)):
        run_microbatches(each, 0, rank, 1)
        each.finish_grad_sync()
        its_optimizer.step()
    x = make_batch(9, rank, 0)
    with torch.no_grad():
        assert torch.equal(chunk(x), plain(x))
    # Without the hooks a forward gathers nothing, also where something is to be gathered.
    optimizer.step()
    chunk.disable_forward_pre_hook()
    assert chunk.state_dict_for_save_checkpoint("a.").keys() == {
        f"a.{k}" for k in plain.state_dict()
    }
    for num_gathered in (0, len(chunk.bucket_groups) - 1):
        recorder = Recorder()
        with observed_by(recorder):
            chunk(x)
        assert len(recorder.named("all-gather")) == num_gathered
        if not num_gathered:
            # After a step it would compute with what other ranks have updated since.
            optimizer.step()
            with pytest.raises(
                RuntimeError, match="forward hooks, which are off; call start_param"
            ):
                chunk(x)
            chunk.enable_forward_pre_hook()
    with pytest.raises(AssertionError, match="are there already"):
        chunk.enable_forward_pre_hook()
    with pytest.raises(AssertionError, match="or overlap_param_gather is"):
        plain.disable_forward_pre_hook()


def test_gathering_overlaps_the_forward():
    run_ranks(_gathering_overlaps_the_forward, 2)


# -- A tied embedding on two stages --

VOCAB, HIDDEN = 13, 6


class _First(torch.nn.Module):
    """Embedding and a layer; `embedding` is tied to the last stage's `output`."""

    share_embeddings_and_output_weights = True

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(VOCAB, HIDDEN).double()
        self.layer = torch.nn.Linear(HIDDEN, HIDDEN).double()
        self.embedding.weight.shared_embedding = True

    def shared_embedding_or_output_weight(self):
        return self.embedding.weight

    def forward(self, tokens):
        return torch.tanh(self.layer(self.embedding(tokens)))


class _Last(torch.nn.Module):
    """Two layers, so that its buffer differs from the first stage's, and the tied output."""

    share_embeddings_and_output_weights = True

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.layer1 = torch.nn.Linear(HIDDEN, 11).double()
        self.layer2 = torch.nn.Linear(11, HIDDEN).double()
        self.output = torch.nn.Parameter(_First().embedding.weight.detach().clone())
        self.output.shared_embedding = True
        self.output.shared = True

    def shared_embedding_or_output_weight(self):
        return self.output

    def forward(self, hidden, labels):
        logits = self.layer2(torch.tanh(self.layer1(hidden))) @ self.output.t()
        return torch.nn.functional.cross_entropy(logits, labels)


class _Both(torch.nn.Module):
    """One process's model, the embedding really one parameter."""

    def __init__(self):
        super().__init__()
        self.first, self.last = _First(), _Last()
        self.last.output = self.first.embedding.weight

    def forward(self, tokens, labels):
        return self.last(self.first(tokens), labels)


def _tokens(step, dp, microbatch):
    generator = torch.Generator().manual_seed(1000 * step + 10 * dp + microbatch)
    return torch.randint(VOCAB, (2, 8), generator=generator)


def _pipeline_step(chunk, groups, step, num_microbatches):
    """Forward and backward of one microbatch after the other through two stages."""
    first = groups.pp.rank() == 0
    peer = 1 - groups.pp.rank()
    for microbatch in range(num_microbatches):
        tokens, labels = _tokens(step, groups.dp_cp.rank(), microbatch)
        hidden = torch.empty(len(tokens), HIDDEN, dtype=torch.float64)
        is_last = microbatch == num_microbatches - 1
        for group in chunk.bucket_groups:
            group.is_last_microbatch = is_last
        if first:
            output = chunk(tokens)
            dist.send(output.detach(), group=groups.pp, group_dst=peer)
            dist.recv(hidden, group=groups.pp, group_src=peer)
            output.backward(hidden)
        else:
            dist.recv(hidden, group=groups.pp, group_src=peer)
            hidden.requires_grad_()
            (chunk(hidden, labels) / num_microbatches).backward()
            dist.send(hidden.grad, group=groups.pp, group_dst=peer)


def _reference(num_ranks, steps, num_microbatches):
    model = _Both()
    decayed = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2
    )
    for step in range(steps):
        optimizer.zero_grad()
        for dp in range(num_ranks):
            for microbatch in range(num_microbatches):
                loss = model(*_tokens(step, dp, microbatch))
                (loss / (num_ranks * num_microbatches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model


def _tied_embedding(own_bucket):
    if not own_bucket:
        _ParamAndGradBuffer._needs_own_bucket = lambda self, param: False
    groups = make_groups(pp=2)
    reference = _reference(groups.dp_cp.size(), steps=4, num_microbatches=2)
    worst, drift = 0.0, 0.0
    for mode in MODES:
        module = _First() if groups.pp.rank() == 0 else _Last()
        chunk, optimizer = _build(
            module, groups, mode, bucket_size=50, clip_grad=0.5, weight_decay=0.1
        )
        for step in range(4):
            chunk.zero_grad_buffer()
            optimizer.zero_grad()
            _pipeline_step(chunk, groups, step, 2)
            finalize_model_grads([chunk], pg_collection=groups)
            assert optimizer.step()[0]
        chunk.start_param_sync(force_sync=True)
        theirs = reference.first if groups.pp.rank() == 0 else reference.last
        for p, q in zip(module.parameters(), theirs.parameters(), strict=True):
            worst = max(worst, float((p - q).detach().abs().max()))
        mine = module.shared_embedding_or_output_weight().detach()
        other = mine.clone()
        dist.broadcast(other, group=groups.embd, group_src=0)
        drift = max(drift, float((mine - other).abs().max()))
    return worst, drift


def test_a_tied_embedding_stays_one_parameter():
    for worst, drift in run_ranks(_tied_embedding, 4, True):
        assert drift == 0.0
        assert worst < 1e-12


def test_break_the_own_bucket_rule_and_the_copies_drift_apart():
    results = run_ranks(_tied_embedding, 4, False)
    assert max(drift for _, drift in results) > 1e-6
