"""What a configuration of experts refuses, in one line with its numbers; and what it fills in."""

import pytest

from minimegatron.core.transformer.transformer_config import TransformerConfig
from minimegatron.training.arguments import core_transformer_config_from_args, parse_args

SIZES = {"num_layers": 4, "hidden_size": 8, "num_attention_heads": 2}
EXPERTS = {"num_moe_experts": 4}
ALLTOALL = {"moe_token_dispatcher_type": "alltoall"}
OVERLAP = {
    **EXPERTS,
    **ALLTOALL,
    "expert_model_parallel_size": 2,
    "overlap_moe_expert_parallel_comm": True,
}
NO_BIAS = {"add_bias_linear": False}
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}

REFUSED = {
    "experts do not divide": (
        {"num_moe_experts": 6, "expert_model_parallel_size": 4},
        "num_moe_experts 6 is not divisible by expert_model_parallel_size 4; try 4",
    ),
    "expert ranks without experts": (
        {"expert_model_parallel_size": 2},
        "expert_model_parallel_size is 2, but num_moe_experts is not given",
    ),
    "a width without experts": ({"moe_ffn_hidden_size": 8}, "moe_ffn_hidden_size is 8, but"),
    "an expert that cannot be cut": (
        {**EXPERTS, **NO_BIAS, "expert_tensor_parallel_size": 2, "moe_ffn_hidden_size": 7},
        "moe_ffn_hidden_size 7 is not divisible by expert_tensor_parallel_size 2",
    ),
    "biases of an expert that is cut": (
        {**EXPERTS, "expert_tensor_parallel_size": 2},
        "expert_tensor_parallel_size 2 with biases: each of the 2 ranks",
    ),
    "tensor ranks without sequence parallelism": (
        {**EXPERTS, **NO_BIAS, "tensor_model_parallel_size": 2},
        "tensor_model_parallel_size 2 needs sequence_parallel",
    ),
    "biases of a shared expert": (
        {**EXPERTS, "moe_shared_expert_intermediate_size": 8},
        "moe_shared_expert_intermediate_size with biases",
    ),
    "a gate without a shared expert": (
        {**EXPERTS, "moe_shared_expert_gate": True},
        "moe_shared_expert_gate weighs a shared expert, but there is none",
    ),
    "layers every zero": ({**EXPERTS, "moe_layer_freq": 0}, "moe_layer_freq is 0; give 1 or more"),
    "a list of too few layers": (
        {**EXPERTS, "moe_layer_freq": [1, 0]},
        "moe_layer_freq lists 2 layers, but num_layers is 4",
    ),
    "a list of something else": (
        {**EXPERTS, "moe_layer_freq": [1, 0, 2, 1]},
        "give a 1 or a 0 for each layer",
    ),
    "a way to balance given twice": (
        {
            **EXPERTS,
            "moe_router_load_balancing_type": ["aux_loss", "aux_loss"],
            "moe_aux_loss_coeff": [0.1, 0.2],
        },
        r"moe_router_load_balancing_type is ['aux_loss', 'aux_loss']; give each way once",
    ),
    "a list of no way to balance": (
        {**EXPERTS, "moe_router_load_balancing_type": [], "moe_aux_loss_coeff": []},
        "moe_router_load_balancing_type is []; give each way once, or none",
    ),
    "a weight that is no number": (
        {**EXPERTS, "moe_aux_loss_coeff": float("nan")},
        "moe_aux_loss_coeff is nan; give 0 or more",
    ),
    "a bias that sinkhorn does not read": (
        {
            **EXPERTS,
            "moe_router_load_balancing_type": "sinkhorn",
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        },
        "moe_router_enable_expert_bias is True, but moe_router_load_balancing_type 'sinkhorn'",
    ),
    "a factor that sinkhorn does not read": (
        {
            **EXPERTS,
            "moe_router_load_balancing_type": "sinkhorn",
            "moe_router_topk_scaling_factor": 2.0,
        },
        "drop moe_router_topk_scaling_factor",
    ),
    "more choices than experts": (
        {**EXPERTS, "moe_router_topk": 5},
        "moe_router_topk 5 is more than num_moe_experts 4",
    ),
    "a weight that is always one": ({**EXPERTS, "moe_router_topk": 1}, "is always 1"),
    "probabilities on several inputs": (
        {**EXPERTS, "moe_apply_probs_on_input": True},
        "it needs moe_router_topk 1",
    ),
    "half of a choice of groups": (
        {**EXPERTS, "moe_router_num_groups": 2},
        "moe_router_num_groups is 2 and moe_router_group_topk is None; give both",
    ),
    "groups of unequal sizes": (
        {**EXPERTS, "moe_router_num_groups": 3, "moe_router_group_topk": 1},
        "not divisible by moe_router_num_groups 3",
    ),
    "too many groups": (
        {**EXPERTS, "moe_router_num_groups": 2, "moe_router_group_topk": 3},
        "moe_router_group_topk 3 is more than moe_router_num_groups 2",
    ),
    "choices that do not divide over groups": (
        {
            **EXPERTS,
            "moe_router_topk": 3,
            "moe_router_num_groups": 2,
            "moe_router_group_topk": 2,
        },
        "moe_router_topk 3 over moe_router_group_topk 2 groups of 2 experts",
    ),
    "an unknown balance": (
        {**EXPERTS, "moe_router_load_balancing_type": "luck"},
        "moe_router_load_balancing_type 'luck' is unknown; use aux_loss",
    ),
    "weights for other losses": (
        {**EXPERTS, "moe_aux_loss_coeff": [0.1, 0.2]},
        "has 1 entries, but moe_aux_loss_coeff has 2",
    ),
    "a negative weight": ({**EXPERTS, "moe_aux_loss_coeff": -0.1}, "moe_aux_loss_coeff is -0.1"),
    "sinkhorn with a loss": (
        {**EXPERTS, "moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.1},
        "'sinkhorn' has no loss, but moe_aux_loss_coeff is 0.1",
    ),
    "sinkhorn beside a loss": (
        {
            **EXPERTS,
            "moe_router_load_balancing_type": ["sinkhorn", "aux_loss"],
            "moe_aux_loss_coeff": [0.0, 0.1],
        },
        "'sinkhorn' stands alone, but 2 are given",
    ),
    "a bias on probabilities": (
        {**EXPERTS, "moe_router_enable_expert_bias": True},
        "needs moe_router_score_function 'sigmoid'",
    ),
    "padding to nothing": (
        {**EXPERTS, "moe_pad_expert_input_to_capacity": True},
        "give moe_expert_capacity_factor",
    ),
    "more places than tokens": (
        {
            **EXPERTS,
            "moe_expert_capacity_factor": 2.5,
            "moe_pad_expert_input_to_capacity": True,
        },
        "give at most num_moe_experts / moe_router_topk = 2",
    ),
    "padding to lengths that differ": (
        {
            **EXPERTS,
            **ALLTOALL,
            "moe_expert_capacity_factor": 1.0,
            "moe_pad_expert_input_to_capacity": True,
            "variable_seq_lengths": True,
        },
        "but variable_seq_lengths is on",
    ),
    "a capacity with sinkhorn": (
        {
            **EXPERTS,
            "moe_router_load_balancing_type": "sinkhorn",
            "moe_expert_capacity_factor": 1.0,
        },
        "moe_expert_capacity_factor 1.0 does not go with moe_router_load_balancing_type 'sinkhorn'",
    ),
    "other lengths on each rank": (
        {**EXPERTS, "variable_seq_lengths": True},
        "variable_seq_lengths needs moe_token_dispatcher_type 'alltoall'",
    ),
    "nothing to hide": (
        {**OVERLAP, "expert_model_parallel_size": 1},
        "but expert_model_parallel_size is 1",
    ),
    "a gather to hide": (
        {**OVERLAP, "moe_token_dispatcher_type": "allgather"},
        "needs moe_token_dispatcher_type 'alltoall', not 'allgather'",
    ),
    "no chunks to run side by side": (
        {**OVERLAP, "pipeline_model_parallel_size": 2},
        "pipeline_model_parallel_size 2 needs several chunks per stage",
    ),
    "layers run again as one": (
        {
            **OVERLAP,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        "recompute_granularity 'full' would run again",
    ),
    "another order": (
        {**OVERLAP, "pipeline_schedule": "no-pipelining"},
        "has an order of its own, but pipeline_schedule is no-pipelining",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what):
    options, words = REFUSED[what]
    with pytest.raises(ValueError) as error:
        TransformerConfig(**SIZES | options)
    message = str(error.value)
    assert words in message and "\n" not in message


def test_what_is_filled_in():
    config = TransformerConfig(**SIZES | EXPERTS)
    assert config.moe_ffn_hidden_size == config.ffn_hidden_size == 32
    assert config.balancing == {"aux_loss": 0.0}
    assert TransformerConfig(**SIZES).moe_layer_pattern == [False] * 4


@pytest.mark.parametrize(
    ("freq", "pattern"),
    [(1, "1111"), (2, "1010"), (3, "1001"), ([2], "1010"), ([0, 1, 1, 0], "0110")],
)
def test_which_layers_have_experts(freq, pattern):
    config = TransformerConfig(**SIZES | EXPERTS, moe_layer_freq=freq)
    one = TransformerConfig(**SIZES | EXPERTS | {"num_layers": 1}, moe_layer_freq=3)
    assert one.moe_layer_pattern == [True]
    assert "".join(str(int(has)) for has in config.moe_layer_pattern) == pattern


# -- On the command line --

WORDS = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --lr 1 "
    "--max-position-embeddings 8 --micro-batch-size 1 --train-iters 1 --num-experts 4 "
)


def parse(words: str, world: int = 1):
    environ = {"WORLD_SIZE": str(world), "RANK": "0", "LOCAL_WORLD_SIZE": str(world)}
    return parse_args(argv=(WORDS + words).split(), environ=environ)


def test_flags():
    args = parse("--moe-layer-freq 0 1 --moe-aux-loss-coeff 0.1 --moe-router-topk 3")
    assert (args.num_experts, args.moe_layer_freq, args.moe_router_topk) == (4, [0, 1], 3)
    assert parse("--moe-layer-freq 2").moe_layer_freq == 2
    two = parse(
        "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.2"
    )
    assert two.moe_aux_loss_coeff == [0.1, 0.2]


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("[0,1]", [0, 1]),
        ("([0]*1+[1]*1)", [0, 1]),
        ("[1, 0]", [1, 0]),
        ("2*[1]", [1, 1]),
        ("([0]+[1])*1", [0, 1]),
        (" 2 ", 2),
    ],
)
def test_b9_layers_with_experts_as_megatron_writes_them(word, value):
    environ = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    given = [*WORDS.split(), "--moe-layer-freq", word]
    args = parse_args(argv=given, environ=environ)
    assert args.moe_layer_freq == value
    assert core_transformer_config_from_args(args).moe_layer_pattern == (
        [True, False] if value == 2 else list(map(bool, value))
    )


@pytest.mark.parametrize(
    "word",
    [
        "[0,",
        "every",
        "",
        "1.5",
        "[1.5]",
        "[True]",
        "[0]-[1]",
        "[[0],1]",
        "[0]*[1]",
        "[0]+1",
        "(0,1)",
        "-[0]",
    ]
    + [
        "[1]*99999",
        "[0]*9**9",
        "__import__('os').abort()",
        "[x for x in (0, 1)]",
        "(" * 999,
        "0\0",
    ],
)
def test_b9_nothing_else_is_run(word):
    """Also no code: Megatron looks at the characters and lets Python evaluate the rest."""
    with pytest.raises(
        ValueError, match=r"--moe-layer-freq: .* is no whole number, and no list such"
    ):
        parse_args(argv=[*WORDS.split(), f"--moe-layer-freq={word}"], environ={})


@pytest.mark.parametrize(
    ("words", "world", "message"),
    [
        (
            "--expert-model-parallel-size 4",
            2,
            "are 2 per stage, which do not divide into --expert-m",
        ),
        (
            "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2",
            2,
            "2 processes over --pipeline-model-parallel-size 2 are 1 per stage",
        ),
        ("--moe-router-topk 5", 1, "--moe-router-topk 5 is more than --num-experts 4"),
        (
            "--tensor-model-parallel-size 2 --disable-bias-linear",
            2,
            "--tensor-model-parallel-size 2 needs --sequence-parallel",
        ),
        ("--expert-tensor-parallel-size 2", 2, "add --disable-bias-linear, or use --expert-tensor"),
        ("--moe-aux-loss-coeff 0.1 0.2", 1, "--moe-aux-loss-coeff has 2"),
        ("--moe-expert-capacity-factor 0", 1, "--moe-expert-capacity-factor is 0.0"),
    ],
)
def test_flags_that_are_refused(words, world, message):
    with pytest.raises(ValueError) as error:
        parse(words, world)
    assert message in str(error.value) and "\n" not in str(error.value)
