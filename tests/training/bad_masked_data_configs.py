"""Data of BERT and T5 that cannot work, and flags of older scripts; `bad_configs` has the rows too."""

from pathlib import Path

NO_VOCABULARY = Path(__file__)
"""A file, but of Python."""

BERT, T5, GPT = "pretrain_bert", "pretrain_t5", "pretrain_gpt"
NO_MASK = ("has no token that stands for hidden text", "BertWordPieceLowerCase or")

# (program, flags, words of the answer)
ROWS = [
    (T5, "--tokenizer-type NullTokenizer --vocab-size 100", ("NullTokenizer", *NO_MASK)),
    (BERT, "--vocab-file {folder}/none.txt", ("--vocab-file", "none.txt is not a file")),
    (BERT, f"--vocab-file {NO_VOCABULARY}", ("--vocab-file", "has no piece [PAD]", "drop")),
    (BERT, "--vocab-size 100", ("BertWordPieceLowerCase", "--vocab-size 100", "NullTokenizer")),
    (BERT, "--mask-prob 1", ("--mask-prob is 1.0", "give less than 1")),
    (BERT, "--short-seq-prob 1", ("--short-seq-prob is 1.0", "give less than 1")),
    (BERT, "--data-path {folder}/none", ("--data-path", "none.idx", "not both there")),
    (
        BERT,
        "--split 9999,1,0",
        ("--split 9999,1,0 gives validation none", "documents of the built-in text", "raise"),
    ),
    (
        T5,
        "--vocab-extra-ids 8",
        ("--mask-prob 0.15 of --seq-length 64", "up to 9", "gives 8 sentinels", "give 9"),
    ),
    (
        T5,
        "--vocab-extra-ids 20 --decoder-seq-length 10",
        ("up to 9 tokens", "do not fit --decoder-seq-length 10", "give 11 or more"),
    ),
    (T5, "--seq-length 3", ("minimegatron: --seq-length is 3", "give 4 or more")),
    (GPT, "--mask-prob 0.2", ("--mask-prob", "pretrain_gpt", "run pretrain_bert or pretrain_t5")),
    (GPT, "--data-impl lazy", ("--data-impl lazy", "drop it, or give mmap")),
    (GPT, "--local-rank 3", ("--local-rank is 3", "LOCAL_RANK is 0", "drop it")),
    (GPT, "--local_rank=x", ("--local-rank/--local_rank", "'x'")),
]
