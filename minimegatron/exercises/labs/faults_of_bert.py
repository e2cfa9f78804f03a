"""Known mistakes in BERT, as patches.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.fault import Fault

_MODEL = "core/models/bert/bert_model.py"

FAULTS_OF_BERT = (
    Fault(
        "padding-masks-queries-only",
        _MODEL,
        "both_are_tokens = attention_mask.unsqueeze(1) * attention_mask.unsqueeze(2)\n",
        "both_are_tokens = attention_mask.unsqueeze(2).expand(-1, -1, attention_mask.size(1))\n",
        "Padding looks at nothing, but tokens look at padding: the loss is wrong, and a text's share "
        "depends on how long the others of its batch are.",
    ),
    Fault(
        "mask-only-on-first-stage",
        _MODEL,
        "self.encoder(encoder_input, extended_mask, ",
        "self.encoder(encoder_input, extended_mask if self.pre_process else None, ",
        "The layers of the first stage leave out padding and all others look at it, so the loss is "
        "wrong. With one stage everything is right.",
    ),
    Fault(
        "mlm-head-without-bias",
        _MODEL,
        "            bias=True,\n",
        "            bias=not self.share_embeddings_and_output_weights,\n",
        "A tied output layer has no weight of its own, and here no bias either. So its embedding must "
        "say how often a word occurs. A checkpoint with the bias does not fit.",
    ),
    Fault(
        "lm-head-dense-unflagged",
        "core/models/bert/bert_lm_head.py",
        "            gradient_is_partial=config.sequence_parallel,\n",
        "            gradient_is_partial=False,\n",
        "Each rank's gradient of the head is of its own tokens. Nobody adds them up, so the head's "
        "copies drift apart.",
    ),
    Fault(
        "pooler-flagged-partial",
        "core/models/bert/pooler.py",
        "dtype=config.params_dtype, tp_group=tp_group\n",
        "dtype=config.params_dtype, tp_group=tp_group,\n"
        "            gradient_is_partial=sequence_parallel,\n",
        "Every rank computes the pooler's whole gradient, and these are summed: t times too large.",
    ),
    Fault(
        "mlm-loss-without-mask",
        "pretrain_bert.py",
        "lm_loss = torch.sum(losses * loss_mask) / or_one(loss_mask.sum())\n",
        "lm_loss = losses.mean()\n",
        "Tokens that were not masked count too, with labels that are no token. The loss falls, because "
        "every logit falls.",
    ),
)
