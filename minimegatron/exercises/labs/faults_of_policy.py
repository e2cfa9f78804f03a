"""Known mistakes in reinforcement learning, as patches.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.fault import Fault

_FORMULAS = "rl/rl_utils.py"
_DATA = "rl/grpo_data.py"
_PROGRAM = "train_rl.py"

FAULTS_OF_POLICY = (
    # -- Log-probabilities --
    Fault(
        "logprob-of-the-same-token",
        _FORMULAS,
        "tokens.roll(-1, dims=1)",
        "tokens",
        "Each log-probability is that of the token the model has just read, not of the one it "
        "predicts. Ratios begin at 1 all the same, for old ones have the same mistake; the reward does "
        "not rise.",
    ),
    Fault(
        "logprobs-without-temperature",
        _FORMULAS,
        "output[..., : args.unpadded_vocab_size] / args.rl_default_temperature",
        "output[..., : args.unpadded_vocab_size]",
        "Tokens are drawn at one temperature and scored at another. Nothing shows it as long as old "
        "and new scores agree; the sampling log-probabilities do not.",
    ),
    Fault(
        "padding-of-the-vocabulary-scored",
        _FORMULAS,
        "output[..., : args.unpadded_vocab_size] /",
        "output /",
        "Rows of padding have a share of the probability. It depends on the number of tensor ranks, "
        "and so does the loss.",
    ),
    Fault(
        "gather-takes-its-part",
        _FORMULAS,
        "tensor_parallel_output_grad=sums_gradients",
        "tensor_parallel_output_grad=False",
        "Ranks that share a sequence gather log-probabilities, and backward each keeps its own part "
        "where the divisor expects a sum over them. Gradients are c times too small.",
    ),
    # -- The loss --
    Fault(
        "clipped-from-above-only",
        _FORMULAS,
        "ratios.clamp(1 - clamp_eps_lower, 1 + clamp_eps_upper)",
        "ratios.clamp(max=1 + clamp_eps_upper)",
        "Answers that were worse than their group are pushed down without a bound; the loss is wrong "
        "as soon as a ratio has left its bounds.",
    ),
    Fault(
        "best-of-both-ratios",
        _FORMULAS,
        "torch.minimum(ratios * advantages, clipped * advantages)",
        "clipped * advantages",
        "The clipped ratio is used also where the plain one is the worse: a token that has moved too "
        "far the wrong way gets no gradient back, and the loss is wrong.",
    ),
    Fault(
        "distance-the-other-way",
        _FORMULAS,
        "difference = ref_logprobs - current_logprobs",
        "difference = current_logprobs - ref_logprobs",
        "The estimate is of another distance. It is still not negative and 0 at the beginning; later "
        "the loss is wrong.",
    ),
    Fault(
        "weights-without-a-cap",
        _FORMULAS,
        ".exp().clamp(max=largest)",
        ".exp()",
        "One token whose sampling log-probability was far off outweighs all others; the loss is wrong.",
    ),
    Fault(
        "deviation-of-a-sample",
        _FORMULAS,
        "values.std(correction=0)",
        "values.std()",
        "Advantages are divided by the unbiased deviation, as ROLL, verl and slime do: in a group of 8 "
        "they are 0.935 times Megatron's.",
    ),
    Fault(
        "empty-microbatch-counts-a-token",
        _PROGRAM,
        "num_tokens = loss_mask.sum().detach()",
        "num_tokens = loss_mask.sum().clamp(min=1).detach()",
        "A microbatch of padding counts one token. The step's mean is N / (N + 1) of what it should "
        "be, and changes with the number of microbatches.",
    ),
    Fault(
        "mean-of-microbatches",
        _PROGRAM,
        '    "calculate_per_token_loss": True,\n',
        "",
        "Each microbatch divides by its own tokens, as Megatron's train_rl does without the flag. The "
        "gradient changes with the number of microbatches and of copies.",
    ),
    # -- Rollouts --
    Fault(
        "mask-starts-one-late",
        _PROGRAM,
        "partial(loss_func, loss_mask[:, 1:], logged, model=model)",
        "partial(loss_func, loss_mask[:, :-1], logged, model=model)",
        "The mask is not shifted with the log-probabilities: the first token of each answer is not "
        "learned, and one after its end is.",
    ),
    Fault(
        "advantage-over-the-batch",
        _DATA,
        "groups.tolist(), torch.ones_like(groups).long().tolist()",
        "groups.view(1, -1).tolist(), torch.ones_like(groups).long().view(1, -1).tolist()",
        "Answers are compared with those to other prompts: an easy prompt is rewarded for being easy.",
    ),
    Fault(
        "old-policy-follows",
        _DATA,
        "        microbatches = self._microbatches(since % num_steps)\n",
        '        flat = {n: rows.flatten(0, 1) for n, rows in self.rows.items() if n == "tokens"}\n'
        "        with _evaluating(model):\n"
        '            old = score(model, flat["tokens"])\n'
        '        self.rows["old_logprobs"] = old.unflatten(0, (num_steps, -1))\n'
        "        microbatches = self._microbatches(since % num_steps)\n",
        "Old log-probabilities are computed anew before each inner step. The ratio is always 1 and "
        "nothing is ever clipped.",
    ),
    Fault(
        "reference-follows",
        _DATA,
        "        _put_weights(model, self.reference)\n",
        "",
        "The reference's scores are the model's own. The distance is 0 at each rollout, and does not "
        "hold the model back.",
    ),
    Fault(
        "numbers-of-each-copy",
        _DATA,
        "task, uniforms[mine]",
        "task, uniforms[: len(mine)]",
        "Each copy of the model draws with the same numbers. Two copies answer one prompt alike, and "
        "another number of copies gives another run.",
    ),
    Fault(
        "one-iterator-for-all-chunks",
        _DATA,
        "return [RerunDataIterator(microbatches) for _ in model]",
        "return [RerunDataIterator(microbatches)] * len(model)",
        "The chunks of a stage take each other's microbatches, until there are none left.",
    ),
    Fault(
        "held-out-rows-not-padded",
        _DATA,
        "num_rows = -(-len(task.held_out) // whole) * whole",
        "num_rows = len(task.held_out)",
        "Copies of the model have different numbers of rows, so different numbers of microbatches; one "
        "waits for the other for ever.",
    ),
    Fault(
        "a-repeated-step-reads-on",
        "core/rerun/data_iterator.py",
        "        self.replaying, self.replay_pos = True, 0\n",
        "",
        "A step that is run again finds no rows.",
    ),
    Fault(
        "dropout-in-the-update",
        "rl/rl_arguments.py",
        "if getattr(args, name) > 0:",
        "if getattr(args, name) > 1:",
        "Training has dropout and scores have none: ratios do not begin at 1, and half of the tokens "
        "are clipped before anything has changed.",
    ),
)
