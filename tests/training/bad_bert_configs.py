"""Configurations of BERT that cannot work; `bad_configs` has these rows too."""

TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"

# (flags, words of the answer, world size)
ROWS = [
    (
        "--context-parallel-size 2",
        ("--context-parallel-size is 2", "BERT's ranks do not share sequences", "give 1"),
        2,
    ),
    ("--num-experts 4", ("--num-experts is 4", "one MLP", "drop it"), 1),
    (
        "--mtp-num-layers 1 --position-embedding-type rope",
        ("--mtp-num-layers is 1", "predicts masked tokens", "drop it"),
        1,
    ),
    (
        "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
        "--overlap-moe-expert-parallel-comm",
        ("--num-experts is 4", "BERT"),
        2,
    ),
    ("--qk-layernorm", ("--qk-layernorm is given", "queries and keys", "drop it"), 1),
    (
        f"{PP2} --defer-embedding-wgrad-compute --untie-embeddings-and-output-weights",
        ("--defer-embedding-wgrad-compute is given", "BERT's output layer", "drop it"),
        2,
    ),
    (
        "--calculate-per-token-loss",
        ("--calculate-per-token-loss is given", "mean of each microbatch", "drop it"),
        1,
    ),
    ("--eod-mask-loss", ("--eod-mask-loss is given", "no end of document", "drop it"), 1),
    ("--sample-tokens 20", ("--sample-tokens is 20", "does not write text", "give 0"), 1),
    (
        "--tokenizer-type ByteLevelTokenizer",
        ("ByteLevelTokenizer", "stands for hidden text", "BertWordPieceLowerCase"),
        1,
    ),
    (
        "--tokenizer-type NullTokenizer --vocab-size 100",
        ("NullTokenizer", "stands for hidden text", "BertWordPieceCase"),
        1,
    ),
    (
        "--position-embedding-type rope --rotary-base 7",
        ("--rotary-base is 7", "BERT's rotary positions have the base 10000", "drop it"),
        1,
    ),
    (
        "--position-embedding-type none",
        ("--position-embedding-type none", "looks both ways", "learned_absolute or rope"),
        1,
    ),
    ("--seq-length 4", ("--seq-length is 4", "[CLS]", "give 5 or more"), 1),
    ("--mask-prob 0", ("--mask-prob", "0"), 1),
    (
        "--hybrid-override-pattern M*",
        ("--hybrid-override-pattern", "pretrain_bert", "run pretrain_mamba"),
        1,
    ),
    (f"{TP2} {PP2}", ("2 processes", f"{TP2} x {PP2}", "= 4"), 2),
]
