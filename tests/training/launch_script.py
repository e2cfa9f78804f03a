"""The launch script that explanations of Megatron's BERT begin with, flag by flag.

Its places to fill in are names in braces: `vocab`, `data` and `checkpoints`.
"""

SCRIPT = """
--num-layers 24
--hidden-size 1024
--num-attention-heads 16
--micro-batch-size 4
--global-batch-size 32
--seq-length 512
--max-position-embeddings 512
--train-iters 1000000
--save {checkpoints}
--load {checkpoints}
--data-path {data}
--vocab-file {vocab}
--data-impl mmap
--split 949,50,1
--distributed-backend nccl
--lr 0.0001
--lr-decay-style linear
--min-lr 1.0e-5
--lr-decay-iters 990000
--weight-decay 1e-2
--clip-grad 1.0
--lr-warmup-fraction .01
--log-interval 100
--save-interval 10000
--eval-interval 1000
--eval-iters 10
--fp16
"""

GPUS_PER_NODE = 8


def script(vocab: object, data: object, checkpoints: object) -> list[str]:
    """Its arguments, with files and folders filled in."""
    return SCRIPT.format(vocab=vocab, data=data, checkpoints=checkpoints).split()
