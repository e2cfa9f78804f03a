"""Reinforcement learning through the same step: GRPO, from a rollout to the loss.

`train_rl.py`, one folder up, gives these to `pretrain`:

* `tasks`: prompts, and the reward of an answer; plain Python.
* `rollout`: the model answers prompts, token by token, through the pipeline.
* `rl_utils`: log-probabilities, advantages and the loss, under Megatron's names.
* `grpo_data`: what each training step reads: rollouts, their old and reference log-probabilities.
* `rl_arguments`: the flags, and which values cannot work.

`loss_contract` stands by itself: what five frameworks hand to the schedule as their loss, and which
gradient comes of it. Counterpart: `megatron.rl`.
"""
