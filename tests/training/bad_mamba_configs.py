"""Configurations of Mamba that cannot work; `bad_configs` has these rows too."""

TP2 = "--tensor-model-parallel-size 2"
PATTERN = "--hybrid-override-pattern"
SIZES = "--mamba-num-groups 2 --mamba-head-dim 16"

# (flags, words of the answer, world size)
ROWS = [
    (
        f"{PATTERN} MMMMMMM*",
        ("2 heads (2 x --hidden-size 64 / --mamba-head-dim 64)", "--mamba-num-groups 8", "give"),
        1,
    ),
    (
        "--mamba-head-dim 48",
        ("2 x --hidden-size 64 = 128", "--mamba-head-dim 48", "such as 64"),
        1,
    ),
    ("--mamba-num-heads 3", ("--mamba-num-heads 3", "--mamba-num-groups 8", "give"), 1),
    ("--mamba-state-dim 0", ("--mamba-state-dim is 0", "1 or more"), 1),
    (
        f"{SIZES} --tensor-model-parallel-size 4",
        ("--mamba-num-groups 2", "--tensor-model-parallel-size 4", "multiple of 4"),
        4,
    ),
    (f"{SIZES} {PATTERN} M*-", ("'M*-' has 3 letters", "--num-layers is 8", "each layer"), 1),
    (f"{SIZES} {PATTERN} -M", (f"{PATTERN}: expected one argument", f"given as {PATTERN}=-"), 1),
    (f"{SIZES} {PATTERN} MMMMMMXM", ("letter 7, 'X', is unknown", "use M (Mamba)"), 1),
    (f"{SIZES} {PATTERN} MMEMMMMM", ("letter 3, 'E'", "experts", "left out here"), 1),
    (
        f"{SIZES} {PATTERN} MMMM|MMMM",
        ("letter 5, '|'", "a border of stages", "--pipeline-model-parallel-layout sets it"),
        1,
    ),
    (f"{SIZES} {PATTERN} MMMMMMMM/M", ("letter 9, '/'", "further tokens", "left out here"), 1),
    (
        f"{SIZES} --context-parallel-size 2",
        ("--context-parallel-size 2", "handing its state from rank to rank", "use 1"),
        2,
    ),
    (f"{SIZES} --num-experts 4", ("--num-experts 4", "no experts here", "leave it out"), 1),
    (
        f"{SIZES} --mtp-num-layers 1 --position-embedding-type none",
        ("--mtp-num-layers 1", "no further tokens here", "leave it out"),
        1,
    ),
    (
        f"{SIZES} --pipeline-model-parallel-size 3",
        ("--num-layers 8", "--pipeline-model-parallel-size 3", "use 6 or 9 layers"),
        3,
    ),
    (
        f"{SIZES} --bert-no-binary-head",
        ("--bert-no-binary-head", "drop it, or run pretrain_bert\n"),
        1,
    ),
]
