"""Configurations of T5 that cannot work; `bad_configs` has these rows too.

Each has 8 layers, 64 tokens, and 20 sentinels unless it says otherwise.
"""

TP2 = "--tensor-model-parallel-size 2"
PP2 = "--pipeline-model-parallel-size 2"
PP3 = "--pipeline-model-parallel-size 3"
SPLIT = "--pipeline-model-parallel-split-rank"

# (flags, words of the answer, world size)
ROWS = [
    (PP2, (PP2, f"{SPLIT} is not given", "give 1, or use 1 stage"), 2),
    (f"{PP3} {SPLIT} 3", (PP3, f"{SPLIT} is 3", "give 1 to 2"), 3),
    (f"{SPLIT} 1", (f"{SPLIT} is 1", "no stages to split", "drop it"), 1),
    (
        f"{PP3} {SPLIT} 2 --encoder-num-layers 3",
        ("--encoder-num-layers 3", "encoder's 2 stages", PP3, f"{SPLIT} 2", "multiple of 2"),
        3,
    ),
    (
        f"{PP3} {SPLIT} 1 --decoder-num-layers 5",
        ("--decoder-num-layers 5", "decoder's 2 stages", f"{SPLIT} 1", "another split rank"),
        3,
    ),
    (
        f"{PP2} {SPLIT} 1 --num-virtual-stages-per-pipeline-rank 2 --overlap-p2p-communication",
        ("--num-virtual-stages-per-pipeline-rank is 2", "plain 1F1B only", "leave it out"),
        2,
    ),
    (
        f"{PP2} {SPLIT} 1 --num-layers-per-virtual-pipeline-stage 2",
        ("--num-layers-per-virtual-pipeline-stage is 2", "plain 1F1B only", "drop it"),
        2,
    ),
    (
        f"{PP2} {SPLIT} 1 --pipeline-schedule gpipe",
        ("--pipeline-schedule is given", "plain 1F1B only"),
        2,
    ),
    (
        f"{PP2} {SPLIT} 1 --decoder-first-pipeline-num-layers 3",
        ("--decoder-first-pipeline-num-layers is given", "cuts one stack", "T5 has two"),
        2,
    ),
    (
        "--context-parallel-size 2",
        ("--context-parallel-size is 2", "cross attention needs the whole text"),
        2,
    ),
    ("--num-experts 4", ("--num-experts is 4", "one MLP", "leave it out for T5"), 1),
    ("--mtp-num-layers 1 --position-embedding-type rope", ("--mtp-num-layers is 1", "T5"), 1),
    (
        "--group-query-attention --num-query-groups 2",
        ("--num-query-groups is 2", "each of 8 heads has keys of its own"),
        1,
    ),
    ("--qk-layernorm", ("--qk-layernorm is on", "T5 has no such norms"), 1),
    (
        "--encoder-seq-length 32",
        ("--encoder-seq-length 32", "--seq-length 64", "drop --encoder-seq-length"),
        1,
    ),
    (
        "--decoder-seq-length 4096",
        ("--decoder-seq-length 4096", "--max-position-embeddings", "raise"),
        1,
    ),
    (
        f"{TP2} --sequence-parallel --decoder-seq-length 33",
        ("--decoder-seq-length 33", TP2, "try 32"),
        2,
    ),
    (
        f"{TP2} --sequence-parallel --seq-length 33",
        ("minimegatron: --seq-length 33 is not", TP2, "try 32"),
        2,
    ),
    ("--max-position-embeddings 32", ("minimegatron: --seq-length 64 is more", "raise the sec"), 1),
    ("--vocab-extra-ids 2", ("--mask-prob 0.15", "--vocab-extra-ids gives 2", "give"), 1),
    ("--bert-no-binary-head", ("--bert-no-binary-head is given", "no binary head"), 1),
    ("--sample-tokens 20", ("--sample-tokens is 20", "writes no sample", "give 0"), 1),
    (
        "--position-embedding-type none",
        ("--position-embedding-type none", "looks both ways", "learned_absolute, rope or relative"),
        1,
    ),
    (
        "--tokenizer-type ByteLevelTokenizer",
        ("ByteLevelTokenizer", "stands for hidden text"),
        1,
    ),
]
