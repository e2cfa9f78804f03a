"""The state of a run, to disk and back: what to save, when, and where it goes at another layout.

Counterpart: `megatron.training.checkpointing`.

A checkpoint knows the full model only, under names that no layout changes:

    model.NAME                        a weight, as the model computes with it
    optimizer.state.fp32_param.NAME   its main copy, where the optimizer has one (bf16, fp16)
    optimizer.state.exp_avg.NAME ...  the moments
    rng.pp0.tp0.dp0.STREAM            random numbers, per place; see `random_state`
    ...                               what the program keeps itself; see `sharded_program_state`
    common.json                       steps, schedule, loss scale, position in the data, arguments

Plain and distributed optimizer save the same, so either can load what the other saved.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core import collectives, dist_checkpointing, parallel_state
from minimegatron.core.datasets.atomic_file import write_atomically
from minimegatron.core.dist_checkpointing.core import CheckpointingException
from minimegatron.core.dist_checkpointing.mapping import ShardedTensor, make_sharded_tensors
from minimegatron.core.dist_checkpointing.meeting import await_all_ranks
from minimegatron.core.distributed.data_parallel_base import _BaseDataParallel
from minimegatron.core.optimizer import MegatronOptimizer
from minimegatron.core.optimizer.optimizer import ParamShard
from minimegatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from minimegatron.core.parameter import kind_of
from minimegatron.core.process_groups_config import groups_of
from minimegatron.core.transformer.module_state import (
    global_parameter_name,
    named_global_parameters,
    named_saved_buffers,
)
from minimegatron.core.transformer.sharded_state import sharded_buffer
from minimegatron.core.utils import barrier, get_device, unwrap_model
from minimegatron.training.checkpoint_args import SAVED_STATE, load_common
from minimegatron.training.checkpoint_folder import (
    complete_iterations,
    find_checkpoint,
    get_checkpoint_name,
    get_checkpoint_tracker_filename,
    remove_checkpoints,
    remove_leftovers,
)
from minimegatron.training.global_vars import get_args, get_train_state
from minimegatron.training.random_state import (
    rng_layout,
    seed_again,
    sharded_rng_state,
    take_rng_state,
)
from minimegatron.training.rerun_state import take_rerun_state
from minimegatron.training.resume_notes import notes_on_resuming
from minimegatron.training.utils import print_rank_0

# -- Saving --


def save_checkpoint(
    iteration: int,
    model: list[torch.nn.Module],
    optimizer: MegatronOptimizer,
    opt_param_scheduler: OptimizerParamScheduler,
) -> None:
    """Saves to `--save`. Every rank must call it; when it returns, the checkpoint is complete.

    Killed at any moment, it leaves the newest complete checkpoint as it is. Raises
    CheckpointingException, on all ranks, if it cannot write (a full disk); the same holds then.
    """
    args, state = get_args(), get_train_state()
    if args.save is None:
        raise ValueError("save_checkpoint saves to --save, which is not given; give a folder")
    folder = Path(get_checkpoint_name(args.save, iteration))
    if state.saved_iteration == iteration:
        print_rank_0(f" the checkpoint of iteration {iteration} is in {folder} already")
        return
    await_all_ranks(f"save {folder}", "save_checkpoint")
    # -- 1. What a killed run left half written, to have the room --
    _on_first_rank(lambda: remove_leftovers(args.save))
    # -- 2. The checkpoint itself, which gets its name last --
    tensors = list(sharded_model_state(model))
    if not args.no_save_optim:
        tensors += sharded_optimizer_state(model, optimizer)
    if not args.no_save_rng:
        tensors += sharded_rng_state(args.data_parallel_random_init)
    tensors += sharded_program_state(model)
    common = _common_state(iteration, model, optimizer, opt_param_scheduler)
    try:
        dist_checkpointing.save_tensors(tensors, common, folder)
    except CheckpointingException as error:
        complete = complete_iterations(args.save)
        left = f"iteration {complete[-1]} is complete there" if complete else "none is complete yet"
        raise CheckpointingException(
            f"{error}; {left}; make room, or give another folder as --save"
        ) from None
    # -- 3. The marker, and only then older checkpoints may go --
    tracker = Path(get_checkpoint_tracker_filename(args.save))
    _on_first_rank(lambda: write_atomically(tracker, str(iteration).encode()))
    if args.keep_last is not None:
        _on_first_rank(lambda: remove_checkpoints(args.save, keep_last=args.keep_last))
    state.saved_iteration = iteration
    print_rank_0(f" saved checkpoint of iteration {iteration} to {folder}")


def sharded_model_state(model: list[torch.nn.Module]) -> Iterator[ShardedTensor]:
    """This rank's part of the weights, and of buffers that are saved. Every rank must call it.

    With `overlap_param_gather`, parts of the weights may still be on other ranks: they are gathered
    first, also where other weights will be loaded into their place.
    """
    for chunk in model:
        if isinstance(chunk, _BaseDataParallel):
            chunk.start_param_sync(force_sync=True)
        for name, param in named_global_parameters(chunk):
            yield from _sharded(f"model.{name}", param, param.detach())
        for name, buffer in named_saved_buffers(chunk):
            key = f"model.{global_parameter_name(chunk, name)}"
            yield sharded_buffer(key, buffer, groups_of(chunk))


def sharded_program_state(
    model: list[torch.nn.Module], is_loading: bool = False
) -> list[ShardedTensor]:
    """What the program keeps beside the model, if its first chunk was given a function `also_saved`.

    That is `also_saved(model, is_loading)`, which returns this rank's part, or the memory to load into.
    Every rank must call it.
    """
    also_saved = vars(unwrap_model(model[0])).get("also_saved")
    return [] if also_saved is None else also_saved(model, is_loading)


def sharded_optimizer_state(
    model: list[torch.nn.Module],
    optimizer: MegatronOptimizer,
    saved_keys: set[str] | None = None,
) -> Iterator[ShardedTensor]:
    """This rank's part of what the optimizer keeps per weight.

    `saved_keys`, when loading, are the checkpoint's: between runs of different precision, main
    parameters come from where the weights are most precise.
    """
    optimizer.initialize_state()
    for name, shard in _named_shards(model, optimizer):
        for what, tensor in optimizer.parameter_state(shard).items():
            key = f"optimizer.state.{what}.{name}"
            if what == "param":
                key = f"optimizer.state.fp32_param.{name}"
                if saved_keys is None and not shard.is_copy:
                    continue  # it is the weight itself
                if saved_keys is not None and key not in saved_keys:
                    key = f"model.{name}"
            yield from _sharded(key, shard.model_param, tensor.detach(), shard.start)


def _named_shards(
    model: list[torch.nn.Module], optimizer: MegatronOptimizer
) -> Iterator[tuple[str, ParamShard]]:
    """This rank's shards, by the parameters' names in the whole model."""
    names = {param: name for chunk in model for name, param in named_global_parameters(chunk)}
    for shard in optimizer.shards:
        yield names[shard.model_param], shard


def _sharded(
    key: str, param: torch.nn.Parameter, data: torch.Tensor, start: int = 0
) -> list[ShardedTensor]:
    tp_group = parallel_state.get_group(kind_of(param).tensor)
    # Each stage's copy of the word embedding is read, but the first stage's alone is written.
    second_copy = getattr(param, "shared", False)
    return make_sharded_tensors(
        key, param, data, tp_group.rank(), tp_group.size(), start, replica_id=int(second_copy)
    )


def _common_state(
    iteration: int,
    model: list[torch.nn.Module],
    optimizer: MegatronOptimizer,
    opt_param_scheduler: OptimizerParamScheduler,
) -> dict[str, Any]:
    args, state = get_args(), get_train_state()
    common = {
        "iteration": iteration,
        "train_state": {name: getattr(state, name) for name in SAVED_STATE},
        "opt_param_scheduler": opt_param_scheduler.state_dict(),
        "optimizer": None if args.no_save_optim else _optimizer_numbers(model, optimizer),
        "rng": None if args.no_save_rng else rng_layout(args.data_parallel_random_init),
        "args": args_as_json(args),
        "torch": torch.__version__,
    }
    return common


def _optimizer_numbers(
    model: list[torch.nn.Module], optimizer: MegatronOptimizer
) -> dict[str, Any]:
    # A rank without parameters has made no step of its own.
    step = torch.tensor(optimizer.get_step(), device=get_device())
    collectives.all_reduce(step, dist.group.WORLD, op=collectives.ReduceOp.MAX)
    # Megatron refuses to save where parameters have made steps of their own.
    found = optimizer.get_steps()
    named = _named_shards(model, optimizer)
    mine = {name: found[shard.name] for name, shard in named if shard.name in found}
    everyones: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, {n: own for n, own in mine.items() if own != int(step)})
    scaler = optimizer.grad_scaler
    return {
        "kind": get_args().optimizer,
        "step": int(step),
        "steps": {name: own for steps in everyones for name, own in steps.items()},
        "grad_scaler": None if scaler is None else scaler.state_dict(),
    }


def args_as_json(args: Any) -> dict[str, Any]:
    """All arguments by section, for people and for `checkpoint_args`; odd types as their words."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return value if isinstance(value, str | int | float | bool | None) else str(value)

    return plain(dataclasses.asdict(args))


def _on_first_rank(action: Callable[[], Any]) -> None:
    """Does it on rank 0, while the others wait. An OSError there is everybody's."""
    failure: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            failure = [str(error)]
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise CheckpointingException(f"cannot save to {get_args().save}: {failure[0]}")


# -- Loading --


def load_checkpoint(
    ddp_model: list[torch.nn.Module],
    optimizer: MegatronOptimizer,
    opt_param_scheduler: OptimizerParamScheduler,
) -> tuple[int, int]:
    """Takes the newest complete checkpoint of `--load`, of whatever layout, into all three.

    Returns its iteration, and 0; Megatron's second number is the floating-point operations so far,
    which nobody counts here. The iteration is 0 too if there is no checkpoint yet; `--load` and
    `--save` are the same folder then. Raises ValueError or CheckpointingException for a checkpoint
    that cannot be used.
    """
    args, state = get_args(), get_train_state()
    folder = find_checkpoint(args.load)
    if folder is None:
        print_rank_0(f" no checkpoint in {args.load} yet: beginning at iteration 0")
        return 0, 0
    common = load_common(folder)
    for note in notes_on_resuming(args, common["args"]):
        print_rank_0(f" {note}")
    with_optimizer = not (args.no_load_optim or args.finetune)
    if with_optimizer:
        opt_param_scheduler.load_state_dict(common["opt_param_scheduler"])
    tensors = list(sharded_model_state(ddp_model))
    if with_optimizer:
        saved_keys = set(dist_checkpointing.load_tensors_metadata(folder))
        tensors += sharded_optimizer_state(ddp_model, optimizer, saved_keys)
    same_place = common["rng"] == rng_layout(args.data_parallel_random_init)
    with_rng = same_place and not (args.no_load_rng or args.finetune)
    rng = sharded_rng_state(args.data_parallel_random_init) if with_rng else []
    tensors += [] if args.finetune else _program_state_in(folder, ddp_model)
    dist_checkpointing.load_tensors(tensors + rng, folder)

    if with_optimizer:
        _take_optimizer_numbers(ddp_model, optimizer, common["optimizer"])
    else:
        # Otherwise the first step would copy old main parameters over what was just loaded.
        optimizer.reload_model_params()
    if args.finetune:
        print_rank_0(f" loaded the weights of {folder}; beginning at iteration 0")
        return 0, 0
    for name in SAVED_STATE:
        setattr(state, name, common["train_state"][name])
    if with_rng:
        take_rng_state(rng)
    elif not args.no_load_rng:
        # At another layout nobody's numbers would go on where they stopped; but they must not
        # begin again either, or dropout would repeat the run's first steps.
        seed_again(args.seed, state.iteration, args.data_parallel_random_init)
        print_rank_0(" random numbers are seeded anew: the checkpoint is of another layout")
    if args.save is not None and Path(args.load).resolve() == Path(args.save).resolve():
        state.saved_iteration = state.iteration
    take_rerun_state(folder)
    barrier()
    print_rank_0(f" loaded checkpoint of iteration {state.iteration} from {folder}")
    return state.iteration, 0


def _program_state_in(folder: Path, model: list[torch.nn.Module]) -> list[ShardedTensor]:
    """Memory for what the program keeps beside the model. Raises ValueError if it is not there."""
    tensors = sharded_program_state(model, is_loading=True)
    saved_keys = set(dist_checkpointing.load_tensors_metadata(folder)) if tensors else set()
    missing = [tensor.key for tensor in tensors if tensor.key not in saved_keys]
    if missing:
        raise ValueError(
            f"{folder} has no {missing[0]}: another program saved it; add --finetune to begin at "
            "iteration 0 with its weights"
        )
    return tensors


def _take_optimizer_numbers(
    model: list[torch.nn.Module], optimizer: MegatronOptimizer, numbers: dict[str, Any]
) -> None:
    step, steps = numbers["step"], numbers.get("steps", {})
    shards = _named_shards(model, optimizer)
    optimizer.set_step(step, {shard.name: steps.get(name, step) for name, shard in shards})
    scaler = optimizer.grad_scaler
    # A run that had no loss scale, or a constant one, says nothing about where a dynamic one is.
    if scaler is not None and numbers["grad_scaler"]:
        scaler.load_state_dict(numbers["grad_scaler"])
