"""Known mistakes where samples with masked tokens are made, as patches.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.fault import Fault

_MASKED = "core/datasets/masked_dataset.py"
_BERT = "core/datasets/bert_dataset.py"
_T5 = "core/datasets/t5_dataset.py"

FAULTS_OF_MASKED_DATA = (
    Fault(
        "padding-mask-holds-pad-id",
        _BERT,
        "        padding_mask = numpy.zeros(s, dtype=numpy.int64)\n",
        "        padding_mask = numpy.full(s, tokenizer.pad, dtype=numpy.int64)\n",
        "At padding the mask is the id of [PAD], which hides it where that id is 0. With any other "
        "vocabulary every token looks at padding.",
    ),
    Fault(
        "masked-tokens-not-whole-words",
        _MASKED,
        "            begins[1:] = self._begins_word[token_ids[1:]] | is_fixed[1:] | is_fixed[:-1]\n",
        "            begins[1:] = True\n",
        "Pieces are hidden one by one: what is left of a word gives most of the hidden part away, and "
        "the loss falls without anything learnt of sentences.",
    ),
    Fault(
        "separators-are-masked",
        _MASKED,
        "            if not fixed[begin]\n",
        "            if True\n",
        "[CLS] and [SEP] are hidden like words. They always stand in the same places, so a part of the "
        "loss costs no effort.",
    ),
    Fault(
        "replaced-nine-times-in-ten",
        _BERT,
        "kind < (1 + SHOWN_AS_MASK) / 2",
        "kind < 1",
        "A hidden token that is not [MASK] is always another one. The model learns that the token it "
        "sees is never right where it has to guess.",
    ),
    Fault(
        "sentinel-twice",
        _T5,
        "        for sentinel, (begin, end) in zip(sentinels, runs, strict=False):\n",
        "        for sentinel, (begin, end) in zip(sentinels[:1] * len(runs), runs, strict=False):\n",
        "All runs are taken out under one name. The decoder cannot tell which it writes, and from the "
        "output nobody can put the text together.",
    ),
    Fault(
        "mask-from-ids",
        _T5,
        "    mask[: len(values)] = 1\n",
        "    mask[: len(values)] = padded[: len(values)] >= 1\n",
        "Id 0 counts as padding, whatever token has it: in some texts a token in the middle is not "
        "looked at and costs nothing.",
    ),
    Fault(
        "short-samples-hide-as-many",
        _MASKED,
        "        left = min(most, max_hidden_tokens(probability, len(token_ids)))\n",
        "        left = most\n",
        "A document's last sample hides as many tokens as a full one: of a short text nothing is left "
        "to guess from.",
    ),
)
