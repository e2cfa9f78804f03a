"""Known mistakes where further tokens are predicted, as patches.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.fault import Fault

_MTP = "core/transformer/multi_token_prediction.py"
_LOSS = "core/transformer/mtp_loss.py"
_PLACES = "core/transformer/layer_placement.py"
_LANGUAGE = "core/models/common/language_module/language_module.py"

FAULTS_OF_MTP = (
    # -- The losses --
    Fault(
        "mtp-return-dropped",
        _MTP,
        "        hidden_states = MTPLossAutoScaler.apply(hidden_states, weight * losses)\n",
        "        MTPLossAutoScaler.apply(hidden_states, weight * losses)\n",
        "The activation that carries the further losses is thrown away. The log shows their values, "
        "but their layers get no gradient at all.",
    ),
    Fault(
        "mtp-mask-not-passed",
        "pretrain_gpt.py",
        "        output_tensor = model(\n"
        "            tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask\n",
        "        output_tensor = model(\n"
        "            tokens, position_ids, attention_mask, labels=labels\n",
        "Without the mask every token counts at every depth, so the further layers learn padding, and "
        "gradients are wrong. The main loss is right.",
    ),
    Fault(
        "mtp-scale-without-m",
        _LOSS,
        "MTPLossAutoScaler.set_loss_scale(scale.double() * cp_size / num_microbatches)",
        "MTPLossAutoScaler.set_loss_scale(scale.double() * cp_size)",
        "The main loss is divided by the number of microbatches and the further ones are not: their "
        "gradients are M times too large.",
    ),
    Fault(
        "mtp-count-not-clamped",
        _MTP,
        "losses = losses / or_one(counts[depth + 1]).to(losses.dtype)",
        "losses = losses / counts[depth + 1].to(losses.dtype)",
        "Where no token counts at some depth, 0 is divided by 0: all gradients become NaN.",
    ),
    Fault(
        "mtp-depths-weigh-by-their-tokens",
        _MTP,
        "            losses = losses * counts[0].to(losses.dtype)\n",
        "            losses = losses * counts[depth + 1].to(losses.dtype)\n",
        "With a loss per token, a depth counts for fewer tokens than the next token's, so its "
        "gradients are too small. Release 0.16.1 of Megatron does this.",
    ),
    Fault(
        "mtp-counts-of-one-rank",
        _MTP,
        "        all_reduce(counts, model.cp_group)\n",
        "        pass\n",
        "Each rank that shares the sequence divides by its own tokens: gradients depend on how the "
        "mask lies over the ranks, and are too large.",
    ),
    # -- The layers --
    Fault(
        "mtp-depth-two-predicts-depth-one",
        _MTP,
        "cp_group=model.cp_group)[0] for each in targets[-1]))",
        "cp_group=model.cp_group)[0] for each in targets[0]))",
        "Labels are moved by one place, not by one more at each depth. Every further layer learns the "
        "same token, and gradients of the second one are wrong.",
    ),
    Fault(
        "mtp-hidden-before-embedding",
        _MTP,
        "torch.cat((self.enorm(decoder_input), self.hnorm(hidden_states)), dim=-1)",
        "torch.cat((self.hnorm(hidden_states), self.enorm(decoder_input)), dim=-1)",
        "The two halves of the projection's input change places. A model that is trained from the "
        "beginning learns as well; one of Megatron's is read wrongly, and gradients differ.",
    ),
    Fault(
        "mtp-positions-stay",
        _MTP,
        "            position_ids, _ = roll_tensor(position_ids, cp_group=self.cp_group)\n",
        "            pass\n",
        "The next token is embedded at this one's position. With learned positions gradients are "
        "wrong, with rotary ones nothing changes.",
    ),
    Fault(
        "eh-proj-gather-reduces",
        _MTP,
        "        projected = gather_from_tensor_model_parallel_region(projected, "
        "group=self.tp_group)\n",
        "        from minimegatron.core.tensor_parallel import mappings\n\n"
        "        projected = mappings.gather_from_sequence_parallel_region(\n"
        "            projected.movedim(-1, 0), group=self.tp_group\n"
        "        ).movedim(0, -1)\n",
        "All tensor-parallel ranks go on with the same activation, but the gather's backward adds up "
        "their gradients: what lies before it gets gradients t times too large.",
    ),
    Fault(
        "mtp-borders-stay",
        _MTP,
        "        behind = _first_of_next(chunks, dims, cp_group)\n",
        "        behind = [torch.zeros_like(chunk.select(dims, 0)) for chunk in chunks]\n",
        "Where ranks share sequences, the last token of every chunk predicts token 0, and not the "
        "first one of the next chunk, which another rank has: gradients are wrong.",
    ),
    # -- Stages --
    Fault(
        "mtp-stage-outside-embedding-group",
        _PLACES,
        "sorted({pp_ranks[rank] for rank in ends} | set(told.get_mtp_ranks(pp_ranks, config)))",
        "sorted({pp_ranks[rank] for rank in ends})",
        "The stage that predicts further tokens has a copy of the word embedding, but is not in the "
        "group that sums the gradients of the copies: they would become different weights. The end of "
        "the step notices it, and raises an error.",
    ),
    Fault(
        "mtp-stage-without-tokens",
        "pretrain_gpt.py",
        "    return (*GPT_BATCH_KEYS, *more)\n",
        "    return GPT_BATCH_KEYS\n",
        "A stage between the first and the last predicts further tokens, but gets no tokens to embed: "
        "its forward raises an error.",
    ),
    Fault(
        "mtp-final-norm-at-the-loss",
        "core/transformer/transformer_block.py",
        "        is_last = post_process if config.mtp_num_layers is None else has_last_layer\n",
        "        is_last = post_process\n",
        "The final norm stays with the loss. Further layers begin with what it has not yet normalised, "
        "and on a stage of their own they are normalised twice.",
    ),
    Fault(
        "mtp-second-output-weight",
        "core/models/gpt/gpt_model.py",
        "        is_lent = self.pre_process or self.mtp_process\n",
        "        is_lent = self.pre_process\n",
        "Where a tied model predicts further tokens on the last stage, the output layer uses the "
        "embedding's copy there. A weight of its own lies idle, and its gradient never comes.",
    ),
    Fault(
        "mtp-copy-counted-again",
        _LANGUAGE,
        "            weight.shared = not self.pre_process\n",
        "            weight.shared = self.post_process\n",
        "A copy of the embedding between the first and the last stage is in the norm too, so it clips "
        "too much.",
    ),
    Fault(
        "mtp-messages-of-one-length",
        "core/pipeline_parallel/p2p_communication.py",
        "    if sends_shapes(config):\n",
        "    if config.variable_seq_lengths:\n",
        "Behind a stage of their own for further tokens messages are 1 + K times as long as the next "
        "stage expects: it raises an error.",
    ),
    # -- The log --
    Fault(
        "mtp-log-not-over-m",
        _LOSS,
        'losses = tracker["values"] / tracker["num_saved"]',
        'losses = tracker["values"]',
        "The log adds up the further losses over the microbatches. Gradients are right; with more "
        "microbatches the model looks worse.",
    ),
    Fault(
        "mtp-log-of-failed-steps",
        _LOSS,
        "        MTPLossLoggingHelper.clean_loss_in_tracker()\n    return",
        "        pass\n    return",
        "The losses of each step are still there in the next, also those of a step that failed: the "
        "log shows means over all of them. Gradients are right.",
    ),
    Fault(
        "mtp-experts-not-in-the-log",
        "core/transformer/moe/moe_logging.py",
        "num_layers = config.num_layers + (config.mtp_num_layers or 0)",
        "num_layers = config.num_layers",
        "The table of the balance has a row for each layer of the decoder only. Experts in a layer for "
        "further tokens have none: the line of the log raises an error.",
    ),
)
