"""Configurations that cannot work, as data: what is asked for, and what the answer must say.

Read by `test_bad_configs`. Each row changes one thing about `GOOD`, which works with 1, 2, 4, ...
processes. `{folder}` in flags stands for an empty folder made for the test.
"""

from dataclasses import dataclass
from pathlib import Path

from tests.training import (
    bad_bert_configs,
    bad_context_configs,
    bad_graph_configs,
    bad_mamba_configs,
    bad_masked_data_configs,
    bad_rl_configs,
    bad_t5_configs,
)

GOOD = {
    "--num-layers": "8",
    "--hidden-size": "64",
    "--num-attention-heads": "8",
    "--max-position-embeddings": "64",
    "--seq-length": "64",
    "--micro-batch-size": "1",
    "--global-batch-size": "16",
    "--train-iters": "10",
    "--lr": "1e-3",
    "--eval-iters": "1",
}


@dataclass(frozen=True)
class BadConfig:
    """`flags` are appended to GOOD, or replace what is there; `words` must all be in the answer."""

    flags: str
    words: tuple[str, ...]
    world_size: int = 1
    without: tuple[str, ...] = ()
    lines: int = 1
    program: str = "pretrain_gpt"

    def argv(self, folder: str) -> list[str]:
        """The whole command line."""
        good = [
            word
            for flag, value in GOOD.items()
            if flag not in self.without
            for word in (flag, value)
        ]
        return good + self.flags.format(folder=folder).split()

    def __str__(self) -> str:
        program = "" if self.program == "pretrain_gpt" else f"{self.program} "
        changes = self.flags or f"without {' '.join(self.without)}"
        return f"{program}{changes} on {self.world_size}"


TP2 = "--tensor-model-parallel-size 2"
TP4 = "--tensor-model-parallel-size 4"
PP2 = "--pipeline-model-parallel-size 2"
PP4 = "--pipeline-model-parallel-size 4"
VP2 = "--num-virtual-stages-per-pipeline-rank 2"
LAYOUT = "--pipeline-model-parallel-layout"
GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
SCHEDULE = "--pipeline-schedule"
USER_ORDERS = Path(__file__).with_name("user_orders.py")

BAD_CONFIGS = [
    # -- Missing, unknown, misspelt --
    BadConfig("", ("--num-layers", "missing"), without=("--num-layers",)),
    BadConfig("", ("--seq-length", "missing"), without=("--seq-length",)),
    BadConfig("", ("--lr", "missing"), without=("--lr",)),
    BadConfig("", ("--micro-batch-size", "missing"), without=("--micro-batch-size",)),
    BadConfig("--num-layer 4", ("--num-layer", "did you mean --num-layers")),
    BadConfig("--tensor-parallel 2", ("unknown argument --tensor-parallel",)),
    BadConfig("--frobnicate", ("unknown argument --frobnicate", "--help")),
    BadConfig("surplus", ("unknown argument surplus",)),
    BadConfig("--num-layers", ("--num-layers", "expected one argument")),
    BadConfig("--num-layers four", ("--num-layers", "invalid int value", "four")),
    BadConfig("--lr high", ("--lr", "invalid float value", "high")),
    BadConfig("--lr-decay-style spiral", ("--lr-decay-style", "spiral", "cosine")),
    BadConfig("--normalization BatchNorm", ("--normalization", "BatchNorm", "RMSNorm")),
    BadConfig("--position-embedding-type alibi", ("--position-embedding-type", "alibi", "rope")),
    BadConfig("--optimizer lion", ("--optimizer", "lion", "adam")),
    BadConfig("--DDP-impl horovod", ("--DDP-impl", "horovod", "local")),
    BadConfig("--distributed-backend mpi", ("--distributed-backend", "mpi", "gloo")),
    BadConfig("--tokenizer-type WordPiece", ("--tokenizer-type", "WordPiece")),
    BadConfig("--tokenizer-type BPETokenizer", ("--tokenizer-file",)),
    BadConfig("--tokenizer-type NullTokenizer", ("--tokenizer-type", "--vocab-size None")),
    BadConfig("--vocab-size 9", ("--tokenizer-type", "ByteLevelTokenizer", "--vocab-size 9")),
    BadConfig("--tokenizer-type NullTokenizer --vocab-size 0", ("--vocab-size", "0")),
    BadConfig(
        "--tokenizer-type BPETokenizer --tokenizer-file {folder}/none.json",
        ("--tokenizer-file", "none.json", "is not a file"),
    ),
    # -- Sizes out of range --
    BadConfig("--num-layers -3", ("--num-layers", "-3", "1 or more")),
    BadConfig("--hidden-size 0", ("--hidden-size", "0", "1 or more")),
    BadConfig("--micro-batch-size -1", ("--micro-batch-size", "-1", "1 or more")),
    BadConfig("--global-batch-size 0", ("--global-batch-size", "0", "1 or more")),
    BadConfig("--tensor-model-parallel-size 0", ("--tensor-model-parallel-size", "1 or more")),
    BadConfig("--pipeline-model-parallel-size -2", ("--pipeline-model-parallel-size", "-2")),
    BadConfig("--train-iters -1", ("--train-iters", "-1", "0 or more")),
    BadConfig("--eval-interval 0", ("--eval-interval", "0", "1 or more")),
    BadConfig("--log-interval 0", ("--log-interval", "0", "1 or more")),
    BadConfig("--num-layers 99999999999999", ("--num-layers", "less than 2147483648")),
    BadConfig("--rampup-batch-size 4 4 3000000000", ("--rampup-batch-size", "less than")),
    BadConfig("--lr 0", ("--lr", "more than 0")),
    BadConfig("--lr nan", ("--lr", "nan", "finite")),
    BadConfig("--weight-decay -0.1", ("--weight-decay", "-0.1", "0.0 or more")),
    BadConfig("--adam-beta2 1.0", ("--adam-beta2", "1.0", "less than 1.0")),
    BadConfig("--hidden-dropout 1.5", ("--hidden-dropout", "1.5", "less than 1.0")),
    BadConfig("--clip-grad -1", ("--clip-grad", "-1", "0.0 or more")),
    # -- Heads, widths, vocabulary --
    BadConfig("--num-attention-heads 7", ("--hidden-size", "64", "--num-attention-heads", "7")),
    BadConfig(
        f"{TP2} --hidden-size 63 --num-attention-heads 7",
        ("--num-attention-heads", "7", "--tensor-model-parallel-size", "2"),
        world_size=2,
    ),
    BadConfig(
        "--group-query-attention --num-query-groups 3", ("--num-query-groups", "3", "heads 8")
    ),
    BadConfig(
        f"{TP4} --group-query-attention --num-query-groups 2",
        ("--num-query-groups", "2", "--tensor-model-parallel-size", "4"),
        world_size=4,
    ),
    BadConfig(
        f"{TP4} --ffn-hidden-size 102",
        ("--ffn-hidden-size", "102", "--tensor-model-parallel-size", "4"),
        world_size=4,
    ),
    BadConfig(
        f"{TP2} --padded-vocab-size 513",
        ("--padded-vocab-size", "513", "--tensor-model-parallel-size", "2", "514"),
        world_size=2,
    ),
    BadConfig("--padded-vocab-size 256", ("--padded-vocab-size", "256", "257")),
    BadConfig("--seq-length 128", ("--seq-length", "128", "--max-position-embeddings", "64")),
    BadConfig("--rotary-percent 1.5", ("--rotary-percent", "1.5", "1.0")),
    BadConfig(
        "--position-embedding-type rope --kv-channels 7",
        ("--rotary-percent 1.0", "7 features (--kv-channels)", "turns 7", "an even number"),
    ),
    BadConfig(
        "--position-embedding-type rope --rotary-percent 0.01", ("--rotary-percent 0.01", "turns 0")
    ),
    BadConfig(
        f"{TP4} --sequence-parallel --seq-length 62",
        ("--seq-length", "62", "--sequence-parallel", "60"),
        world_size=4,
    ),
    BadConfig("--sequence-parallel", ("--sequence-parallel", "--tensor-model-parallel-size=1")),
    # -- World and batch --
    BadConfig(f"{TP2} {PP2}", ("6 processes", "2 x", "= 4", "--nproc-per-node 4"), world_size=6),
    BadConfig(TP4, ("2 processes", "--tensor-model-parallel-size 4"), world_size=2),
    BadConfig(
        "--micro-batch-size 3",
        ("--global-batch-size 16", "--micro-batch-size 3", "try 15"),
    ),
    BadConfig("--global-batch-size 6", ("--global-batch-size 6", "4 model copies"), world_size=4),
    BadConfig(
        "--rampup-batch-size 5 3 100",
        ("--rampup-batch-size 5 3 100", "--global-batch-size 16", "multiple of 3"),
    ),
    BadConfig("--rampup-batch-size 4 0 100", ("--rampup-batch-size 4 0 100", "zero")),
    BadConfig(
        "--micro-batch-size 2 --rampup-batch-size 1 1 100",
        ("--global-batch-size 1", "--micro-batch-size 2"),
    ),
    # -- Layers over stages --
    BadConfig(
        f"{PP4} --num-layers 6",
        ("--num-layers 6", "--pipeline-model-parallel-size 4"),
        world_size=4,
    ),
    BadConfig(
        f"{PP2} --account-for-loss-in-pipeline-split", ("--num-layers 8", "+ 1"), world_size=2
    ),
    BadConfig(
        f"{PP2} --decoder-first-pipeline-num-layers 9",
        ("--decoder-first-pipeline-num-layers", "--num-layers 8"),
        world_size=2,
    ),
    BadConfig(
        f"{PP4} --decoder-last-pipeline-num-layers 1",
        ("7 layers", "--decoder-last-pipeline-num-layers"),
        world_size=4,
    ),
    BadConfig(
        f"{PP4} {VP2} --num-layers 4",
        ("--num-virtual-stages-per-pipeline-rank 2", "--num-layers 4"),
        world_size=4,
    ),
    BadConfig(
        f"{PP2} --num-layers-per-virtual-pipeline-stage 3",
        ("--num-layers 8", "--num-layers-per-virtual-pipeline-stage 3", "try --num-layers 6"),
        world_size=2,
    ),
    BadConfig(
        f"{PP2} --pipeline-model-parallel-layout Ettt|ttttLL",
        ("--pipeline-model-parallel-layout", "L stands 2 times"),
        world_size=2,
        lines=3,
    ),
    BadConfig(
        f"{PP2} {VP2} --pipeline-model-parallel-layout Et*4|t*4L",
        ("--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-layout", "keep one"),
        world_size=2,
    ),
    # -- Interleaving --
    BadConfig(
        VP2, ("--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-size is 1")
    ),
    BadConfig(
        f"{PP2} {VP2} --num-layers-per-virtual-pipeline-stage 2",
        ("--num-layers-per-virtual-pipeline-stage", "keep one"),
        world_size=2,
    ),
    BadConfig(
        f"{PP2} {VP2} --no-overlap-p2p-communication",
        ("--pipeline-model-parallel-size 2", "use --overlap-p2p-communication"),
        world_size=2,
    ),
    BadConfig(
        f"{PP2} --overlap-p2p-communication",
        ("--overlap-p2p-communication", "needs interleaving"),
        world_size=2,
    ),
    BadConfig(f"{PP2} {GROUP} 4", (GROUP, "needs interleaving"), world_size=2),
    BadConfig(
        f"{PP4} {VP2} --global-batch-size 2",
        ("--pipeline-model-parallel-size 4", "--global-batch-size 2", "2 microbatches"),
        world_size=4,
    ),
    BadConfig(
        f"{PP4} {VP2} --global-batch-size 6",
        ("6 microbatches in groups of 4", "last group of 2"),
        world_size=4,
    ),
    BadConfig(f"{PP4} {VP2} {GROUP} 2", (GROUP, "less than", "4"), world_size=4),
    BadConfig(
        f"{PP4} {VP2} {GROUP} 32 --global-batch-size 16",
        (GROUP, "4, 32 and 16"),
        world_size=4,
    ),
    BadConfig(
        f"{PP4} {VP2} {GROUP} 5 --global-batch-size 8",
        ("8 microbatches in groups of 5", "last group of 3"),
        world_size=4,
    ),
    # -- The order of work --
    BadConfig(
        f"{PP2} {SCHEDULE} zigzag",
        (SCHEDULE, "unknown schedule 'zigzag'", "gpipe, 1f1b, interleaved", "FILE.py:FUNCTION"),
        world_size=2,
    ),
    BadConfig(
        f"{PP2} {SCHEDULE} no-pipelining",
        (f"{SCHEDULE} no-pipelining", "--pipeline-model-parallel-size is 2"),
        world_size=2,
    ),
    BadConfig(
        f"{PP2} {VP2} {SCHEDULE} 1f1b",
        (f"{SCHEDULE} 1f1b", "1 chunk on each rank, but 2 are asked for"),
        world_size=2,
    ),
    BadConfig(
        f"{PP2} {SCHEDULE} interleaved",
        (f"{SCHEDULE} interleaved", "set --num-virtual-stages-per-pipeline-rank to 2"),
        world_size=2,
    ),
    BadConfig(
        f"{PP4} {VP2} {SCHEDULE} interleaved --global-batch-size 6",
        ("6 microbatches in groups of 4", "last group of 2"),
        world_size=4,
    ),
    BadConfig(
        f"{PP2} {SCHEDULE} {USER_ORDERS}:down_and_up "
        "--num-virtual-stages-per-pipeline-rank 4 --num-layers 8",
        (f"{SCHEDULE} down-and-up", "2 chunks on each rank, but 4 are asked for"),
        world_size=2,
    ),
    BadConfig(
        f"{PP2} {SCHEDULE} {USER_ORDERS}:down_and_up --num-virtual-stages-per-pipeline-rank 1",
        (f"{SCHEDULE} down-and-up", "2 chunks on each rank, but 1 are asked for"),
        world_size=2,
    ),
    BadConfig(
        f"{SCHEDULE} {USER_ORDERS}:down_and_up",
        (f"{SCHEDULE} down-and-up", "2 chunks", "--pipeline-model-parallel-size is 1"),
    ),
    BadConfig(
        f"{PP2} {SCHEDULE} {USER_ORDERS}:down_and_up --global-batch-size 3",
        ("--global-batch-size 3", "3 microbatches", f"{SCHEDULE} down-and-up", "4 or more"),
        world_size=2,
    ),
    BadConfig(
        f"{PP2} {SCHEDULE} {USER_ORDERS}:down_and_up --decoder-first-pipeline-num-layers 2",
        ("--decoder-first-pipeline-num-layers", "[0, 3]", "--pipeline-model-parallel-layout"),
        world_size=2,
    ),
    BadConfig(
        f"{PP2} {SCHEDULE} {USER_ORDERS}:both_ways",
        (f"{SCHEDULE} both-ways", "2 copies of the model", "planned but not trained"),
        world_size=2,
    ),
    BadConfig(
        f"{PP2} {SCHEDULE} {USER_ORDERS}:forgetful",
        (f"{SCHEDULE} forgetful", "rank 1, microbatch 1, chunk 1: absent: backward is never done"),
        world_size=2,
    ),
    BadConfig(
        f"{PP2} {SCHEDULE} {USER_ORDERS}:backwards_first",
        (
            f"{SCHEDULE} backwards-first",
            "deadlock: rank 0 waits with F0 of chunk 1 for the activation",
        ),
        world_size=2,
    ),
    BadConfig(
        f"{PP2} {SCHEDULE} {USER_ORDERS}:fails --global-batch-size 8 --micro-batch-size 1",
        (f"{SCHEDULE} fails", "user_orders.py:", "IndexError: list index out of range"),
        world_size=2,
    ),
    BadConfig(
        f"{PP2} {SCHEDULE} {USER_ORDERS}:for_ever",
        (f"{SCHEDULE} for-ever", "more than", "pieces of work on rank 0", "let it end"),
        world_size=2,
    ),
    BadConfig(
        f"{PP2} {SCHEDULE} {USER_ORDERS}:even --sample-tokens 3",
        (f"{SCHEDULE} even", "with 1 microbatches", "RuntimeError: M is odd"),
        world_size=2,
    ),
    BadConfig(
        f"{PP2} {SCHEDULE} {USER_ORDERS}:split",
        (f"{SCHEDULE} split", "backward-input", "can be planned and simulated but not run"),
        world_size=2,
    ),
    BadConfig(
        f"{PP4} {SCHEDULE} {USER_ORDERS}:too_short",
        (f"{SCHEDULE} too-short", "on 2 ranks", "--pipeline-model-parallel-size is 4"),
        world_size=4,
    ),
    BadConfig(
        f"{PP2} {SCHEDULE} {USER_ORDERS}:one_at_a_time",
        (SCHEDULE, "one_at_a_time", "not registered", "@register_order"),
        world_size=2,
    ),
    BadConfig(
        f"{PP2} {SCHEDULE} {USER_ORDERS}:no_such",
        (SCHEDULE, "no function 'no_such'"),
        world_size=2,
    ),
    BadConfig(
        f"{PP2} {SCHEDULE} {{folder}}/mine.py:order",
        (SCHEDULE, "there is no file", "mine.py"),
        world_size=2,
    ),
    # -- Options that exclude or need each other --
    BadConfig("--bf16 --fp16", ("--bf16", "--fp16", "choose one")),
    BadConfig("--min-lr 1", ("--min-lr 1.0", "--lr 0.001")),
    BadConfig("--lr-warmup-iters 10", ("--lr-warmup-iters 10", "--train-iters")),
    BadConfig("--lr-warmup-iters 1 --lr-warmup-fraction 0.1", ("--lr-warmup-fraction", "keep one")),
    BadConfig("--lr-decay-style WSD", ("WSD", "--lr-wsd-decay-iters")),
    BadConfig(
        "--lr-decay-style WSD --lr-wsd-decay-iters 20",
        ("--lr-wsd-decay-iters 20", "more than the 10 steps", "--train-iters"),
    ),
    BadConfig("--loss-scale 8", ("--loss-scale 8", "--fp16 or --bf16")),
    BadConfig(
        "--fp16 --initial-loss-scale 2 --min-loss-scale 4",
        ("--min-loss-scale <= --initial-loss-scale", "4.0, 2.0"),
    ),
    BadConfig(
        "--calculate-per-token-loss --ddp-average-in-collective",
        ("--ddp-average-in-collective", "--calculate-per-token-loss", "turn one"),
    ),
    BadConfig("--end-weight-decay 0.1", ("--end-weight-decay 0.1", "--weight-decay-incr-style")),
    BadConfig("--overlap-param-gather", ("--overlap-param-gather", "--use-distributed-optimizer")),
    BadConfig("--DDP-impl torch --use-distributed-optimizer", ("--DDP-impl local",)),
    BadConfig(f"--DDP-impl torch {PP2}", ("--DDP-impl torch", "pipeline"), world_size=2),
    BadConfig(
        "--DDP-impl torch --accumulate-allreduce-grads-in-fp32",
        ("--accumulate-allreduce-grads-in-fp32", "--DDP-impl local"),
    ),
    BadConfig("--swiglu --openai-gelu", ("--swiglu", "--openai-gelu", "keep one")),
    BadConfig(
        "--override-opt-param-scheduler --use-checkpoint-opt-param-scheduler",
        ("--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler", "keep one"),
    ),
    BadConfig("--recompute-granularity full", ("--recompute-granularity", "--recompute-method")),
    BadConfig("--distributed-backend nccl", ("--distributed-backend nccl", "gloo")),
    BadConfig("--device cuda", ("--device cuda", "needs a GPU", "--device cpu")),
    BadConfig("--device cpu --distributed-backend nccl", ("nccl", "--device is cpu", "gloo")),
    BadConfig("--device tpu", ("--device", "tpu", "auto")),
    # -- Files and folders --
    BadConfig(
        "--data-path {folder}/no-such-data", ("--data-path", "no-such-data.idx", "preprocess")
    ),
    BadConfig("--data-path 0.5 {folder}/a x {folder}/b", ("--data-path", "weight", "x")),
    BadConfig("--data-path", ("--data-path is empty",)),
    BadConfig("--split 1,2,3,4", ("--split", "1,2,3,4")),
    BadConfig("--split 99999,1,1", ("--split 99999,1,1", "validation", "built-in text")),
    BadConfig("--split none", ("--split", "none", "949,50,1")),
    BadConfig("--save /proc/no-such-place", ("--save", "/proc/no-such-place", "writable")),
    BadConfig("--save /dev/null/x", ("--save", "/dev/null/x", "writable")),
    BadConfig("--save-interval 5", ("--save-interval 5", "--save")),
    BadConfig("--load {folder}", ("--load", "holds no checkpoint")),
    BadConfig("--load {folder}/nowhere", ("--load", "nowhere", "no checkpoint")),
    BadConfig("--save {folder}/a --load {folder}/b", ("--load", "same folder as --save")),
    BadConfig("--keep-last 0", ("--keep-last", "0", "1 or more")),
    BadConfig("--exit-interval 0", ("--exit-interval", "0", "1 or more")),
    BadConfig("--exit-duration-in-mins 0", ("--exit-duration-in-mins", "more than 0")),
    BadConfig("--tensorboard-dir /proc/x", ("--tensorboard-dir", "/proc/x", "writable")),
    BadConfig("--data-cache-path /proc/x", ("--data-cache-path", "/proc/x")),
    # -- Further tokens --
    BadConfig("--mtp-num-layers 0", ("--mtp-num-layers is 0", "1 or more")),
    BadConfig(
        f"{PP2} --mtp-num-layers 2",
        ("--mtp-num-layers 2", "learned positions", "--position-embedding-type rope"),
        world_size=2,
    ),
    BadConfig(
        "--mtp-num-layers 64",
        ("--seq-length 64", "too short for --mtp-num-layers 64", "65 or more"),
    ),
    BadConfig(
        f"{PP2} --mtp-num-layers 1 --position-embedding-type rope {LAYOUT} Et*4|t*4L",
        ("m stands 0 times but --mtp-num-layers is 1", "^"),
        world_size=2,
        lines=3,
    ),
    BadConfig(
        f"{PP2} --mtp-num-layers 1 --position-embedding-type rope {LAYOUT} Et*4|t*4mmL",
        ("m stands 2 times but --mtp-num-layers is 1", "remove 1"),
        world_size=2,
        lines=3,
    ),
    BadConfig(
        f"{PP2} --position-embedding-type rope {LAYOUT} Et*4|t*4mL",
        ("m stands 1 time but --mtp-num-layers is 0", "remove 1"),
        world_size=2,
        lines=3,
    ),
    BadConfig(
        f"{PP2} --mtp-num-layers 1 --position-embedding-type rope {LAYOUT} Et*4m|t*4L",
        ("m stands before a t", "behind the last t"),
        world_size=2,
        lines=3,
    ),
    BadConfig(
        f"{PP2} --mtp-num-layers 1 --position-embedding-type rope {LAYOUT} Et*4|t*4m||L",
        ("m is in chunk 0 of pipeline rank 1", "chunk 1"),
        world_size=2,
        lines=3,
    ),
    BadConfig(
        f"{PP2} {SCHEDULE} {USER_ORDERS}:fold --mtp-num-layers 1 --position-embedding-type rope "
        f"{LAYOUT} Et*4|t*4m||L",
        ("m is in chunk 0 of pipeline rank 1", "one of the last 2 stages"),
        world_size=2,
        lines=3,
    ),
    BadConfig(
        "--mtp-num-layers 1 --num-experts 4 --expert-model-parallel-size 2 "
        "--moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm",
        ("--mtp-num-layers 1", "--overlap-moe-expert-parallel-comm", "drop one"),
        world_size=2,
    ),
    BadConfig(
        "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
        "--overlap-moe-expert-parallel-comm --log-straggler",
        ("--log-straggler", "--overlap-moe-expert-parallel-comm", "in pieces", "drop one"),
        world_size=2,
    ),
    # -- Steps that are run again, or skipped --
    BadConfig("--iterations-to-skip 3 0", ("--iterations-to-skip is 0", "1 is the first")),
    BadConfig(
        "--error-injection-rate 5",
        ("--error-injection-rate 5", "--rerun-mode disabled", "add --rerun-mode validate_results"),
    ),
    BadConfig(
        "--error-injection-type persistent_error",
        ("persistent_error without --error-injection-rate", "add --error-injection-rate 1000"),
    ),
    BadConfig(
        "--result-rejected-tracker-filename /no/such/folder/lines",
        ("/no/such/folder/lines: No such file or directory", "in a folder that exists"),
    ),
    BadConfig("--straggler-minmax-count 0", ("--straggler-minmax-count is 0", "1 or more")),
    # -- Recording and pacing --
    BadConfig("--trace /proc/no-such-place", ("--trace", "/proc/no-such-place", "writable")),
    BadConfig("--trace-num-steps 2", ("--trace-num-steps 2", "--trace")),
    BadConfig("--trace-first-step 2", ("--trace-first-step 2", "--trace")),
    BadConfig("--trace-lines 2", ("--trace-lines 2", "--trace")),
    BadConfig("--trace {folder} --trace-lines 10", ("--trace-lines 10", "give 0 to 9")),
    BadConfig(
        "--trace {folder} --trace-first-step 2 --trace-num-steps 3 --trace-lines 5",
        ("--trace-lines 5", "--trace-num-steps 3", "give 2 to 4"),
    ),
    BadConfig(
        "--trace {folder} --trace-first-step 10", ("--trace-first-step 10", "--train-iters 10")
    ),
    BadConfig("--pace-forward-ms 40", ("--pace-forward-ms", "--pace-backward-ms")),
    BadConfig("--pace-backward-ms 80", ("--pace-forward-ms", "--pace-backward-ms")),
    BadConfig("--pace-all-to-all-ms 5", ("--pace-all-to-all-ms", "without --pace-forward-ms")),
    BadConfig(
        "--pace-forward-ms -1 --pace-backward-ms 80", ("--pace-forward-ms is -1", "0 or more")
    ),
    # -- Ranks that share sequences --
    *(BadConfig(flags, words, world_size) for flags, words, world_size in bad_context_configs.ROWS),
    # -- BERT --
    *(
        BadConfig(flags, words, world_size, program="pretrain_bert")
        for flags, words, world_size in bad_bert_configs.ROWS
    ),
    # -- T5 --
    *(
        BadConfig(flags, words, world_size, program="pretrain_t5")
        for flags, words, world_size in bad_t5_configs.ROWS
    ),
    # -- Mamba --
    *(
        BadConfig(flags, words, world_size, program="pretrain_mamba")
        for flags, words, world_size in bad_mamba_configs.ROWS
    ),
    BadConfig("--mamba-state-dim 16", ("--mamba-state-dim", "pretrain_gpt", "run pretrain_mamba")),
    # -- Reinforcement learning --
    *(
        BadConfig(bad_rl_configs.GOOD + flags, words, world_size, program="train_rl")
        for flags, words, world_size in bad_rl_configs.ROWS
    ),
    # -- A step that is captured --
    *(BadConfig(*row) for row in bad_graph_configs.ROWS),
    # -- Samples with hidden words, and flags of older launch scripts --
    *(
        BadConfig(flags, words, program=program)
        for program, flags, words in bad_masked_data_configs.ROWS
    ),
]
