"""One step of the optimizers over real ranks: true norm, common skip, fp32 main parameters."""

import copy
import math

import pytest
import torch
import torch.distributed as dist

from minimegatron.core import optimizer as optimizer_package
from minimegatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchDistributedDataParallel,
)
from minimegatron.core.optimizer import (
    ChainedOptimizer,
    OptimizerConfig,
    SGDOptimizerConfig,
    get_megatron_optimizer,
)
from minimegatron.core.optimizer.clip_grads import (
    clip_grad_by_total_norm_fp32,
    count_zeros_fp32,
    get_grad_norm_fp32,
)
from minimegatron.core.optimizer.optimizer import FP32Optimizer, NamedParamGroup
from minimegatron.core.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    get_canonical_lr_for_logging,
)
from minimegatron.core.parameter import KINDS
from tests.core.distributed.common import (
    Toy,
    loss_of,
    make_batch,
    make_config,
    make_groups,
    run_microbatches,
)
from tests.groups import PretendGroup, pretend_groups
from tests.ranks import run_ranks


def _wrap(module, groups, **kwargs):
    config = DistributedDataParallelConfig(**kwargs)
    return DistributedDataParallel(make_config(), config, module, pg_collection=groups)


def _gathered(tensor, group):
    """`tensor` of every rank of `group`, stacked."""
    result = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(result, tensor.contiguous(), group=group)
    return torch.stack(result)


# -- The norm --


def _full_gradients():
    """What one process would have: name -> (gradient, split over tp, stages that hold it)."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "embedding": (draw(10, 3), True, (0, 1)),
        "norm0": (draw(7), False, (0,)),
        "linear0": (draw(6, 5) * (draw(6, 5) > 0), True, (0,)),
        "norm1": (draw(9), False, (1,)),
        "linear1": (draw(4, 8), True, (1,)),
    }


class _Stage(torch.nn.Module):
    """This rank's part of the parameters above."""

    def __init__(self, tp: int, stage: int, dtype):
        super().__init__()
        self.full = {}
        for name, (grad, is_split, stages) in _full_gradients().items():
            if stage not in stages:
                continue
            part = grad.chunk(2)[tp] if is_split else grad
            param = torch.nn.Parameter(torch.ones_like(part, dtype=dtype))
            param.tensor_model_parallel = is_split
            param.shared = name == "embedding" and stage == 1
            param.shared_embedding = name == "embedding"
            self.register_parameter(name, param)
            self.full[name] = part

    def set_main_grads(self, factor=1.0):
        for name, part in self.full.items():
            getattr(self, name).main_grad.copy_(part * factor)


def _true_norm(local_norm_only):
    groups = make_groups(tp=2, pp=2)
    tp, stage = groups.tp.rank(), groups.pp.rank()
    gradients = [grad for grad, _, _ in _full_gradients().values()]
    expected = math.sqrt(sum(float(grad.square().sum()) for grad in gradients))
    num_zeros = sum(int((grad == 0).sum()) for grad in gradients)
    for dtype, tolerance in ((torch.float64, 1e-15), (torch.bfloat16, 1e-2)):
        chunk = _wrap(_Stage(tp, stage, dtype), groups, grad_reduce_in_fp32=True)
        config = OptimizerConfig(
            optimizer="sgd",
            sgd_momentum=0.0,
            lr=0.5,
            weight_decay=0.0,
            clip_grad=1.0,
            bf16=dtype == torch.bfloat16,
            log_num_zeros_in_grad=True,
        )
        optimizer = get_megatron_optimizer(config, [chunk], pg_collection=groups)
        if local_norm_only:
            optimizer.kinds_of_groups = {(): list(KINDS.values())}
        chunk.module.set_main_grads()
        successful, grad_norm, zeros = optimizer.step()
        if local_norm_only:
            continue
        assert successful and zeros == num_zeros
        assert abs(grad_norm / expected - 1.0) < max(
            tolerance, 1e-6 if dtype != torch.float64 else 0
        )
        for name, part in chunk.module.full.items():
            clipped = 1.0 - 0.5 * part / (expected + 1e-6)
            updated = getattr(chunk.module, name).double()
            assert (updated - clipped).abs().max() < tolerance, name
    # Copies that must stay equal: replicated over tp, and the embedding over stages.
    norm = chunk.module.get_parameter(f"norm{stage}").detach()
    over_tp = _gathered(norm.float(), groups.tp)
    over_pp = _gathered(chunk.module.embedding.detach().float(), groups.pp)
    return torch.equal(over_tp[0], over_tp[1]), torch.equal(over_pp[0], over_pp[1])


def test_norm_equals_the_unsharded_one():
    assert run_ranks(_true_norm, 4, False) == [(True, True)] * 4


def test_break_clipping_by_the_local_norm_makes_copies_diverge():
    assert run_ranks(_true_norm, 4, True) == [(False, False)] * 4


def test_norm_functions_on_one_rank():
    grads = [torch.tensor([3.0, -4.0]), torch.tensor([[12.0]]), torch.zeros(0)]
    assert get_grad_norm_fp32(grads) == 13.0
    assert get_grad_norm_fp32(grads, norm_type=1) == 19.0
    assert get_grad_norm_fp32(grads, norm_type=math.inf) == 12.0
    assert get_grad_norm_fp32([]) == 0.0
    assert get_grad_norm_fp32(torch.tensor([3.0, 4.0])) == 5.0
    # A float32 sum of so many squares is wrong in the fourth digit.
    many = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0))
    exact = float(many.double().square().sum().sqrt())
    assert abs(get_grad_norm_fp32([many]) / exact - 1.0) < 1e-14
    halves = get_grad_norm_fp32([many[:1_234_567], many[1_234_567:]])
    assert abs(halves / exact - 1.0) < 1e-14


# -- Overflow --


def _skip_together():
    groups = make_groups(tp=2, pp=2)
    outcomes = []
    for culprit in range(4):
        chunk = _wrap(_Stage(groups.tp.rank(), groups.pp.rank(), torch.float16), groups)
        config = OptimizerConfig(
            lr=0.5, fp16=True, initial_loss_scale=64.0, hysteresis=1, loss_scale_window=2
        )
        optimizer = get_megatron_optimizer(config, [chunk], pg_collection=groups)
        assert optimizer.get_loss_scale() == 64.0
        assert optimizer.scale_loss(torch.tensor(2.0)) == 128.0
        chunk.module.set_main_grads(64.0)
        if groups.mp.rank() == culprit:
            next(iter(chunk.module.parameters())).main_grad.view(-1)[-1] = math.inf
        assert optimizer.step() == (False, None, None)
        assert all(param.eq(1.0).all() for param in chunk.parameters())
        assert optimizer.get_loss_scale() == 32.0
        for scale in (32.0, 64.0):
            chunk.module.set_main_grads(32.0)
            successful, grad_norm, _ = optimizer.step()
            assert successful and optimizer.get_loss_scale() == scale
            outcomes.append(grad_norm)
        assert not any(param.eq(1.0).all() for param in chunk.parameters())
    return outcomes


def test_one_ranks_overflow_skips_the_step_on_all_and_halves_the_scale():
    outcomes = run_ranks(_skip_together, 4)
    assert all(outcome == outcomes[0] for outcome in outcomes)


# -- Half precision --


def _small_updates_add_up():
    groups = make_groups()
    moved = {}
    for dtype in (torch.bfloat16, torch.float16):
        module = torch.nn.Linear(4, 4).to(dtype)
        with torch.no_grad():
            module.weight.fill_(1.0)
            module.bias.fill_(1.0)
        chunk = _wrap(module, groups, grad_reduce_in_fp32=True)
        config = OptimizerConfig(
            optimizer="sgd",
            lr=1e-4,
            sgd_momentum=0.0,
            weight_decay=0.0,
            clip_grad=0.0,
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
            loss_scale=1.0,
        )
        optimizer = get_megatron_optimizer(config, [chunk], pg_collection=groups)
        for _ in range(200):
            module.weight.main_grad.fill_(1.0)
            module.bias.main_grad.fill_(1.0)
            optimizer.step()
        moved[dtype] = 1.0 - float(module.weight.detach().float().mean())
        # The same 200 updates applied to the weight itself.
        naive = torch.ones((), dtype=dtype)
        for _ in range(200):
            naive -= torch.tensor(1e-4, dtype=dtype)
        assert naive == 1.0
    assert abs(moved[torch.bfloat16] - 0.02) < 0.004
    assert abs(moved[torch.float16] - 0.02) < 0.001


def _stale_main_params():
    groups = make_groups()
    for sharded in (False, True):
        for reload in (False, True):
            chunk = _wrap(Toy(torch.bfloat16), groups, use_distributed_optimizer=sharded)
            config = OptimizerConfig(lr=1e-6, bf16=True, use_distributed_optimizer=sharded)
            optimizer = get_megatron_optimizer(config, [chunk], pg_collection=groups)
            chunk.load_state_dict(Toy(torch.bfloat16, seed=99).state_dict())
            if reload:
                optimizer.reload_model_params()
            optimizer.step()
            difference = (chunk.module.head.weight - Toy(torch.bfloat16, seed=99).head.weight).abs()
            assert (difference.max() < 1e-3) == reload


def _fp32_refuses_half_precision():
    groups = make_groups()
    chunk = _wrap(Toy(torch.bfloat16), groups)
    with pytest.raises(ValueError, match=r"model0\.inner\.weight is torch\.bfloat16"):
        get_megatron_optimizer(OptimizerConfig(lr=0.1), [chunk], pg_collection=groups)


def _other_kinds():
    """Groups with and without decay, a schedule, an unwrapped model, torch's DDP, an empty stage."""
    groups = make_groups()
    chunk = _wrap(Toy(), groups)
    config = OptimizerConfig(lr=0.1, weight_decay=0.3)
    optimizer = get_megatron_optimizer(config, [chunk], pg_collection=groups)
    names = [
        {shard.name for shard in optimizer.shards if any(shard.main_param is p for p in params)}
        for params in (group["params"] for group in optimizer.param_groups)
    ]
    every = {f"model0.{name}" for name, _ in Toy().named_parameters()}
    undecayed = {name for name in every if name.endswith(".bias") or "norm" in name}
    assert names == [every - undecayed, undecayed]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    scheduler = OptimizerParamScheduler(
        optimizer, 0.0, 0.2, 0.0, 10, 100, "cosine", 0.4, 0.4, 1, "constant"
    )
    scheduler.step(5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
    assert get_canonical_lr_for_logging(optimizer.param_groups) == 0.1
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.4, 0.0]
    with pytest.raises(ValueError, match="lr is None"):
        get_megatron_optimizer(OptimizerConfig(), [chunk], pg_collection=groups)
    zero = OptimizerConfig(lr=0.1, use_distributed_optimizer=True)
    with pytest.raises(ValueError, match="use_distributed_optimizer is True in OptimizerConfig"):
        get_megatron_optimizer(zero, [chunk], pg_collection=groups)
    sharded = _wrap(Toy(), groups, use_distributed_optimizer=True)
    with pytest.raises(ValueError, match="use_distributed_optimizer is False in OptimizerConfig"):
        get_megatron_optimizer(config, [sharded], pg_collection=groups)
    empty = _wrap(torch.nn.Identity(), groups)
    optimizer = get_megatron_optimizer(config, [empty], None, False, groups)  # as Megatron's are
    assert optimizer.step() == (True, 0.0, None)
    assert not optimizer.state and not isinstance(optimizer, ChainedOptimizer)
    with pytest.raises(ValueError, match="ChainedOptimizer of 1 optimizers"):
        ChainedOptimizer([optimizer])
    # Torch's DDP and ours, and one process with torch's own AdamW and clipping.
    rank, num_ranks = groups.dp_cp.rank(), groups.dp_cp.size()
    plain = Toy()
    decayed = [p for name, p in plain.named_parameters() if f"model0.{name}" not in undecayed]
    others = [p for name, p in plain.named_parameters() if f"model0.{name}" in undecayed]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}], lr=0.1
    )
    ours = _wrap(Toy(), groups)
    ddp_config = DistributedDataParallelConfig()
    torchs = TorchDistributedDataParallel(make_config(), ddp_config, Toy(), pg_collection=groups)
    optimizers = [
        get_megatron_optimizer(config, [chunk], pg_collection=groups) for chunk in (ours, torchs)
    ]
    for step in range(3):
        adamw.zero_grad()
        for peer in range(num_ranks):
            for microbatch in range(2):
                loss = loss_of(plain, make_batch(step, peer, microbatch))
                (loss / (2 * num_ranks)).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        adamw.step()
        for chunk, optimizer in zip((ours, torchs), optimizers, strict=True):
            chunk.zero_grad_buffer()
            optimizer.zero_grad()
            run_microbatches(chunk, step, rank, 2)
            chunk.finish_grad_sync()
            assert abs(optimizer.step()[1] / float(norm) - 1.0) < 1e-13
            assert "exp_avg" in optimizer.state[optimizer.get_parameters()[0]]
        for p, q, r in zip(plain.parameters(), ours.parameters(), torchs.parameters(), strict=True):
            assert (p - q).abs().max() < 1e-12
            assert torch.equal(q, r)


def _all_about_one_rank_or_two():
    _small_updates_add_up()
    _stale_main_params()
    _fp32_refuses_half_precision()
    _other_kinds()


def test_half_precision_and_other_kinds():
    run_ranks(_all_about_one_rank_or_two, 2)


def test_other_names_of_megatrons():
    """The rules are torch's; a config may be named after its rule; one tensor may stand for a list."""
    assert optimizer_package.Adam is torch.optim.AdamW and optimizer_package.SGD is torch.optim.SGD
    assert issubclass(optimizer_package.MegatronModule, torch.nn.Module)
    assert SGDOptimizerConfig(lr=0.1).optimizer == "sgd"
    assert optimizer_package.AdamOptimizerConfig(lr=0.1) != OptimizerConfig(lr=0.1)
    param = torch.nn.Parameter(torch.ones(2, 2))
    param.grad = torch.tensor([[0.0, 4.0], [0.0, 3.0]])
    assert count_zeros_fp32(param) == 2
    clip_grad_by_total_norm_fp32(param, 1.0, 5.0)
    assert get_grad_norm_fp32(param.grad) == pytest.approx(1.0, rel=1e-6)


# -- State --


def two_weights() -> tuple[torch.nn.Linear, FP32Optimizer]:
    """A module, and an optimizer of its two weights in a world of one."""
    module = torch.nn.Linear(3, 2, dtype=torch.float64)
    torch.nn.init.constant_(module.weight, 0.5)
    torch.nn.init.constant_(module.bias, 0.5)
    config = OptimizerConfig(lr=1e-2, clip_grad=0.0)
    groups = [NamedParamGroup([(f"model0.{n}", param)]) for n, param in module.named_parameters()]
    return module, FP32Optimizer(groups, config, None, pretend_groups(mp=PretendGroup()))


def train_two_weights(module, optimizer, steps):
    """The bias has no gradient in the first three steps."""
    for step in steps:
        optimizer.zero_grad()
        module.bias.requires_grad_(step >= 3)
        module(torch.full((4, 3), 1.0 + step, dtype=torch.float64)).square().sum().backward()
        assert optimizer.step()[0]


def test_s11_every_weight_goes_on_with_its_own_number_of_updates():
    """Was: one number for all, so that Adam's bias correction of the later weight was another."""
    whole, optimizer = two_weights()
    train_two_weights(whole, optimizer, range(4))
    assert optimizer.get_steps() == {"model0.weight": 4, "model0.bias": 1}
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    train_two_weights(whole, optimizer, range(4, 7))
    resumed, second = two_weights()
    resumed.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    train_two_weights(resumed, second, range(4, 7))
    for name, tensor in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name


def _resume():
    groups = make_groups()
    rank = groups.dp_cp.rank()
    cases = [
        (dtype, rule, sharded)
        for dtype in (torch.float64, torch.float32, torch.float16)
        for rule in ("adam", "sgd")
        for sharded in (False, True)
    ]

    def build(dtype, rule, sharded):
        chunk = _wrap(Toy(dtype), groups, use_distributed_optimizer=sharded, bucket_size=300)
        config = OptimizerConfig(
            optimizer=rule,
            lr=1e-2,
            fp16=dtype == torch.float16,
            initial_loss_scale=2.0**4,
            loss_scale_window=3,
            use_distributed_optimizer=sharded,
        )
        return chunk, get_megatron_optimizer(config, [chunk], pg_collection=groups)

    def train(chunk, optimizer, steps):
        for step in steps:
            chunk.zero_grad_buffer()
            optimizer.zero_grad()
            x = make_batch(step, rank, 0, chunk.module.head.weight.dtype)
            optimizer.scale_loss(loss_of(chunk, x)).backward()
            chunk.finish_grad_sync()
            assert optimizer.step()[0]

    for case in cases:
        chunk, optimizer = build(*case)
        train(chunk, optimizer, range(4))
        saved = copy.deepcopy((chunk.state_dict(), optimizer.state_dict()))
        train(chunk, optimizer, range(4, 7))
        resumed, resumed_optimizer = build(*case)
        resumed.load_state_dict(saved[0])
        resumed_optimizer.load_state_dict(saved[1])
        assert resumed_optimizer.get_step() == (4 if case[1] == "adam" else 0)
        train(resumed, resumed_optimizer, range(4, 7))
        for name, tensor in chunk.state_dict().items():
            assert torch.equal(tensor, resumed.state_dict()[name]), (case, name)
        state, again = optimizer.state_dict(), resumed_optimizer.state_dict()
        for name, tensors in state["state"].items():
            assert tensors.keys() == again["state"][name].keys()
            assert torch.equal(tensors["param"], again["state"][name]["param"])
        assert state["step"] == again["step"]
        assert state["param_groups"] == again["param_groups"]
        if case[0] == torch.float16:
            assert state["grad_scaler"] == again["grad_scaler"]
        # Together the ranks' ranges are each parameter once, or each rank has all of it.
        for name, param in chunk.module.named_parameters():
            entry = state["state"].get(f"model0.{name}", {"start": 0, "end": 0})
            covered = torch.zeros(param.numel())
            covered[entry["start"] : entry["end"]] = 1
            dist.all_reduce(covered, group=groups.dp_cp)
            assert covered.eq(1 if case[2] else groups.dp_cp.size()).all()
        # What does not fit is refused, before anything is changed.
        victim = next(iter(saved[1]["state"]))
        for damage in ("exp_avg", "momentum_buffer", "param"):
            broken = copy.deepcopy(saved[1])
            if broken["state"][victim].pop(damage, None) is not None:
                with pytest.raises(ValueError, match=victim):
                    resumed_optimizer.load_state_dict(broken)
        del saved[1]["state"][victim]
        with pytest.raises(ValueError, match="1 of"):
            resumed_optimizer.load_state_dict(saved[1])


def test_resume_is_bit_exact_and_refuses_what_does_not_fit():
    run_ranks(_resume, 2)


def test_f7_an_optimizer_reads_as_a_chain_of_one():
    """As clients go through Megatron's, which chains one for dense parameters and one for experts."""
    weight, groups = torch.nn.Parameter(torch.ones(2)), pretend_groups(mp=PretendGroup())
    config = OptimizerConfig(lr=0.1)
    optimizer = FP32Optimizer([NamedParamGroup([("w", weight)], 1.0)], config, None, groups)
    (only,) = optimizer.chained_optimizers
    assert only is optimizer and not only.is_stub_optimizer and only.config is config
    assert only.optimizer.param_groups[0]["params"] == [weight]
    assert FP32Optimizer([NamedParamGroup([], 1.0)], config, None, groups).is_stub_optimizer
