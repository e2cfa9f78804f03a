"""What each training step of GRPO reads: answers of the model, scored, with their advantages.

`pretrain` asks for it before each step, by its hook `data_iterator_func`. Counterpart:
`get_grpo_data_iterator` and `prepare_data_for_update` of `megatron.rl.rl_utils`, which `train` calls.

A rollout is `--grpo-prompts-per-step` x `--grpo-group-size` rows. They are cut into global batches, and
gone through `--grpo-iterations` times; then comes the next rollout, by the model as it is then.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.core import collectives, parallel_state
from minimegatron.core.dist_checkpointing.mapping import ShardedTensor
from minimegatron.core.inference.communication_utils import broadcast_from_last_pipeline_stage
from minimegatron.core.rerun_state_machine import RerunDataIterator
from minimegatron.core.subject_fields import enter_hooks
from minimegatron.core.utils import get_device
from minimegatron.rl.rl_utils import calculate_grpo_advantages, logprobs_forward_step
from minimegatron.rl.rollout import Answers, generate_answers
from minimegatron.rl.tasks import Task, Tokens, load_task
from minimegatron.training.checkpointing import sharded_model_state
from minimegatron.training.global_vars import get_args
from minimegatron.training.pipeline_schedule import schedule_of_run, smallest_num_microbatches
from minimegatron.training.random_state import ITERATIONS_APART

WINDOW = 20
"""Rollouts that the last line of a run tells the mean of."""

Row = tuple[torch.Tensor, ...]
"""A microbatch, in Megatron's order: tokens, advantages, old log-probabilities, mask, positions,
reference log-probabilities, those of drawing."""


class GrpoData:
    """The rollout that is learned from, and what goes with it; the `data_iterator_func` of a run.

    Every rank has its own, with the rows of its copy of the model.
    """

    def __init__(self) -> None:
        self.rows: dict[str, torch.Tensor] = {}
        """Of this copy, [steps, rows of a step, ...], by name."""
        self.reference: list[torch.Tensor] = []
        """The weights that training began with, in the order of `sharded_model_state`."""
        self.figures = torch.zeros(3, dtype=torch.float64)
        """Iteration at which the rollout was made, mean reward, share of right answers."""
        self._since_line: list[tuple[float, float]] = []
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._held_out: float | None = None

    @cached_property
    def task(self) -> Task:
        """What this run rewards, from its first rollout to its end."""
        return load_task(get_args().rl_task)

    def attach(self, chunk: torch.nn.Module) -> None:
        """Lets a chunk's configuration put the figures on log lines, and its checkpoint hold this."""
        enter_hooks(chunk.config, True, lambda: {"log_funcs": (self.describe,)})
        chunk.also_saved = self.sharded_state

    # -- For each step --

    def __call__(
        self, model: list[torch.nn.Module], optimizer: Any, iteration: int
    ) -> Iterator[Row] | list[Iterator[Row]]:
        """The microbatches of step `iteration`; one iterator for each chunk, if there are several.

        Makes a rollout where the last one has been gone through, and where there is none yet. Asked
        again for the same step, it gives the same rows.
        """
        args = get_args()
        num_steps = self._num_steps()
        since = iteration - int(self.figures[0])
        if not self.rows or not 0 <= since < num_steps * args.grpo_iterations:
            self._collect(model, iteration)
            since = 0
        microbatches = self._microbatches(since % num_steps)
        if parallel_state.get_virtual_pipeline_model_parallel_world_size() is None:
            return RerunDataIterator(microbatches)
        return [RerunDataIterator(microbatches) for _ in model]

    def _num_steps(self) -> int:
        """Global batches of one rollout."""
        args = get_args()
        return args.grpo_prompts_per_step * args.grpo_group_size // args.global_batch_size

    def _microbatches(self, step: int) -> list[Row]:
        size = get_args().micro_batch_size
        fields = {name: tensor[step].split(size) for name, tensor in self.rows.items()}
        return [
            (
                tokens,
                fields["advantages"][i],
                fields["old_logprobs"][i],
                fields["loss_mask"][i],
                torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens),
                fields["ref_logprobs"][i],
                fields["inference_logprobs"][i],
            )
            for i, tokens in enumerate(fields["tokens"])
        ]

    # -- A rollout --

    def _collect(self, model: list[torch.nn.Module], iteration: int) -> None:
        args, task = get_args(), self.task
        size, num_prompts = args.grpo_group_size, args.grpo_prompts_per_step
        generator = torch.Generator().manual_seed(
            (args.seed + ITERATIONS_APART * (iteration + 1)) % 2**31
        )
        # -- 1. Prompts and random numbers of all rows; then this copy's answers --
        prompts = _choose(task.prompts, num_prompts, generator)
        uniforms = torch.rand(
            num_prompts * size, task.answer_length, generator=generator, dtype=torch.float64
        )
        mine = self._rows_of_copy()
        if not self.reference:
            self.reference = _weights(model)
        with _evaluating(model):
            answers = generate_answers(
                model, [prompts[row // size] for row in mine], task, uniforms[mine]
            )
            # -- 2. Scores by the model as it is, and as it was when training began --
            old = score(model, answers.tokens)
            ref = self._score_by_reference(model, answers.tokens)
        # -- 3. Rewards of all rows: a group may lie on several copies --
        rewards, is_right = judge(task, answers, mine, num_prompts * size)
        self.figures = torch.tensor([iteration, rewards.mean(), is_right.mean()]).double()
        self._since_line.append((float(rewards.mean()), float(is_right.mean())))
        self._window.append(float(is_right.mean()))
        if args.rl_shuffle_rewards:
            rewards = rewards[torch.randperm(len(rewards), generator=generator)]
        groups = rewards.view(num_prompts, size)
        advantages = calculate_grpo_advantages(
            groups.tolist(), torch.ones_like(groups).long().tolist()
        )
        mask = answers.mask.to(old.dtype)
        if args.grpo_filter_groups_with_same_reward:
            says_something = (groups != groups[:, :1]).any(dim=1).repeat_interleave(size)[mine]
            mask = mask * says_something.to(mask).unsqueeze(-1)
        # -- 4. Kept by step --
        found = {
            "tokens": answers.tokens,
            "advantages": torch.tensor(advantages).to(old)[mine.to(old.device)],
            "old_logprobs": old,
            "loss_mask": mask,
            "ref_logprobs": ref,
            "inference_logprobs": answers.logprobs.to(old.dtype),
        }
        self.rows = {
            name: tensor.unflatten(0, (self._num_steps(), -1)) for name, tensor in found.items()
        }

    def _rows_of_copy(self) -> torch.Tensor:
        """Numbers of this copy's rows in the rollout, step by step; int64, on the CPU."""
        args = get_args()
        rows = torch.arange(args.grpo_prompts_per_step * args.grpo_group_size)
        by_copy = rows.view(self._num_steps(), args.data_parallel_size, -1)
        return by_copy[:, parallel_state.get_data_parallel_rank()].flatten()

    def _score_by_reference(
        self, model: list[torch.nn.Module], tokens: torch.Tensor
    ) -> torch.Tensor:
        current = _weights(model)
        _put_weights(model, self.reference)
        try:
            return score(model, tokens)
        finally:
            _put_weights(model, current)

    # -- For people --

    def describe(self, model: list[torch.nn.Module], groups: Any) -> dict[str, float]:
        """For a line of the log: means over the rollouts since the last one, and held-out answers."""
        rollouts = self._since_line or [tuple(self.figures[1:].tolist())]
        self._since_line = []
        rewards, rights = zip(*rollouts, strict=True)
        found = {"reward": sum(rewards) / len(rewards), "exact": sum(rights) / len(rights)}
        self._held_out = self._ask_held_out(model)
        return found if self._held_out is None else found | {"held-out": self._held_out}

    def _ask_held_out(self, model: list[torch.nn.Module]) -> float | None:
        """Share of right answers to prompts that are never trained on, the likeliest ones."""
        args, task = get_args(), self.task
        if not task.held_out:
            return None
        whole = args.micro_batch_size * smallest_num_microbatches() * args.data_parallel_size
        num_rows = -(-len(task.held_out) // whole) * whole
        mine = torch.arange(num_rows).view(args.data_parallel_size, -1)[
            parallel_state.get_data_parallel_rank()
        ]
        # Rows that fill the last microbatches ask what was asked already, and do not count.
        prompts = [task.held_out[row % len(task.held_out)] for row in mine]
        with _evaluating(model):
            answers = generate_answers(model, prompts, task, None)
        _, is_right = judge(task, answers, mine, num_rows)
        return float(is_right[: len(task.held_out)].mean())

    def summary(self) -> str:
        """The last line of a run."""
        shuffled = ", rewards dealt out by lot" if get_args().rl_shuffle_rewards else ""
        mean = sum(self._window) / max(len(self._window), 1)
        held_out = "none" if self._held_out is None else f"{self._held_out:.3f}"
        return (
            f" exact answers {mean:.3f} (mean of the last {len(self._window)} rollouts), "
            f"held-out {held_out}{shuffled}"
        )

    # -- For a checkpoint --

    def sharded_state(
        self, model: list[torch.nn.Module], is_loading: bool = False
    ) -> list[ShardedTensor]:
        """What a checkpoint holds of this: the rollout, its figures, the reference. Every rank calls.

        Before a load it makes the memory that is loaded into.
        """
        if is_loading:
            self.reference = _weights(model)
            self.rows = self._empty_rows()
        if not self.rows:
            return []
        copy = parallel_state.get_data_parallel_rank()
        others = (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_context_parallel_rank(),
        )
        cut = (1, copy, get_args().data_parallel_size)
        found = [
            ShardedTensor.from_rank_offsets(f"rl.{name}", rows, cut, replica_id=others)
            for name, rows in self.rows.items()
        ]
        figures = (copy, *others)
        found.append(
            ShardedTensor.from_rank_offsets("rl.figures", self.figures, replica_id=figures)
        )
        for tensor, data in zip(sharded_model_state(model), self.reference, strict=True):
            tensor.key, tensor.data = f"rl.reference.{tensor.key}", data
            found.append(tensor)
        return found

    def _empty_rows(self) -> dict[str, torch.Tensor]:
        args, device = get_args(), get_device()
        shape = (self._num_steps(), args.global_batch_size // args.data_parallel_size)
        whole, shorter = (*shape, args.seq_length), (*shape, args.seq_length - 1)
        kind = torch.promote_types(self.reference[0].dtype, torch.float32)
        return {
            "tokens": torch.zeros(whole, dtype=torch.int64, device=device),
            "advantages": torch.zeros(shape, dtype=kind, device=device),
            "old_logprobs": torch.zeros(shorter, dtype=kind, device=device),
            "loss_mask": torch.zeros(whole, dtype=kind, device=device),
            "ref_logprobs": torch.zeros(shorter, dtype=kind, device=device),
            "inference_logprobs": torch.zeros(shorter, dtype=kind, device=device),
        }


# -- Parts of a rollout --


def score(model: list[torch.nn.Module], tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of this copy's rows, [rows, s - 1], on all of its ranks.

    The microbatches are those of training, so that the same weights give the same bits.
    """
    args = get_args()
    positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
    size = args.micro_batch_size
    parts = list(zip(tokens.split(size), positions.split(size), strict=True))
    found = schedule_of_run()(
        forward_step_func=logprobs_forward_step,
        data_iterator=[iter(parts) for _ in model],
        model=model,
        num_microbatches=len(parts),
        seq_length=args.seq_length,
        micro_batch_size=size,
        forward_only=True,
    )
    kind = torch.promote_types(next(model[0].parameters()).dtype, torch.float32)
    shape = (len(tokens), tokens.size(1) - 1)
    return broadcast_from_last_pipeline_stage(shape, kind, torch.cat(found) if found else None)


def judge(
    task: Task, answers: Answers, mine: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reward, and 1 or 0 for right or wrong, of all copies' rows in order; float64 [num_rows] each.

    One rank of each copy asks the task, so that a reward which differs from call to call cannot make
    ranks differ; all ranks learn what it found.
    """
    found = torch.zeros(2, num_rows, dtype=torch.float64)
    is_first = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
    ) == (0, 0, 0)
    if is_first:
        for number, row in enumerate(mine.tolist()):
            prompt, answer = answers.prompts[number], answers.answer(number)
            found[0, row] = task.rewarded(prompt, answer)
            found[1, row] = float(task.is_right(prompt, answer))
    found = found.to(get_device())
    collectives.all_reduce(found, dist.group.WORLD)
    return found[0].cpu(), found[1].cpu()


def _choose(prompts: Any, number: int, generator: torch.Generator) -> list[Tokens]:
    """`number` prompts by lot, each once if there are enough."""
    if number <= len(prompts):
        chosen = torch.randperm(len(prompts), generator=generator)[:number]
    else:
        chosen = torch.randint(len(prompts), (number,), generator=generator)
    return [prompts[i] for i in chosen.tolist()]


@contextmanager
def _evaluating(model: list[torch.nn.Module]) -> Iterator[None]:
    """Inside, the model evaluates, without gradients; after it, it trains."""
    for chunk in model:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for chunk in model:
            chunk.train()


def _weights(model: list[torch.nn.Module]) -> list[torch.Tensor]:
    """Copies of all weights and saved buffers of this rank."""
    return [tensor.data.clone() for tensor in sharded_model_state(model)]


def _put_weights(model: list[torch.nn.Module], weights: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, data in zip(sharded_model_state(model), weights, strict=True):
            tensor.data.copy_(data)
