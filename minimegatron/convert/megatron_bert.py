"""BERT as Megatron has it: the norm before each part of a layer, not after it.

Shoeybi et al. 2019 (https://arxiv.org/abs/1909.08053), section 5.3; Hugging Face's
`MegatronBertForPreTraining`. The first BERT's class there, `BertForPreTraining`, adds and then norms:
no order of weights makes one compute what the other does. For Megatron's counterpart see `family`.
"""

from typing import Any

from minimegatron.convert.family import QKV, ConvertedFamily, Weight, norms, refuse

SAME_IN_A_LAYER = {
    "input_layernorm": "attention.ln",
    "self_attention.linear_proj": "attention.output.dense",
    "pre_mlp_layernorm": "ln",
    "mlp.linear_fc1": "intermediate.dense",
    "mlp.linear_fc2": "output.dense",
}
SAME_AT_THE_ENDS = {
    "encoder.final_layernorm": "bert.encoder.ln",
    "lm_head.dense": "cls.predictions.transform.dense",
    "lm_head.layer_norm": "cls.predictions.transform.LayerNorm",
    "pooler.dense": "bert.pooler.dense",
    "binary_head": "cls.seq_relationship",
}
EMBEDDINGS = {"word": "word", "position": "position", "tokentype": "token_type"}


def arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Their config.json to our arguments."""
    activation, types = config.get("hidden_act", "gelu"), config.get("type_vocab_size", 2)
    refuse(
        "megatron-bert",
        {
            f"hidden_act {activation}": activation != "gelu",
            f"type_vocab_size {types} instead of 2": types != 2,
            "cross-attention": config.get("add_cross_attention", False),
            "causal attention (is_decoder)": config.get("is_decoder", False),
            "an output layer that is not tied": not config.get("tie_word_embeddings", True),
        },
    )
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "ffn_hidden_size": config["intermediate_size"],
        "max_position_embeddings": config["max_position_embeddings"],
        "norm_epsilon": config.get("layer_norm_eps", 1e-12),
        "untie_embeddings_and_output_weights": False,
        **needs({}),
    }


def config(args: dict[str, Any]) -> dict[str, Any]:
    """Our arguments to their config.json."""
    return {
        "architectures": ["MegatronBertForPreTraining"],
        "num_hidden_layers": args["num_layers"],
        "hidden_size": args["hidden_size"],
        "num_attention_heads": args["num_attention_heads"],
        "intermediate_size": args["ffn_hidden_size"],
        "max_position_embeddings": args["max_position_embeddings"],
        "layer_norm_eps": args["norm_epsilon"],
        "hidden_act": "gelu",
        "type_vocab_size": 2,
        "tie_word_embeddings": True,
    }


def needs(args: dict[str, Any]) -> dict[str, Any]:
    """What a `MegatronBertForPreTraining` is."""
    return {
        "bert_binary_head": True,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "swiglu": False,
        "openai_gelu": False,
        "add_bias_linear": True,
        "group_query_attention": False,
        "qk_layernorm": False,
        "kv_channels": None,
        "num_experts": None,
        "untie_embeddings_and_output_weights": False,
    }


def weights(args: dict[str, Any]) -> list[Weight]:
    """Every weight, with its name on both sides."""
    heads, hidden = args["num_attention_heads"], args["hidden_size"]
    qkv = QKV(heads, heads, hidden // heads)
    found = []
    for ours, theirs in EMBEDDINGS.items():
        names = (f"bert.embeddings.{theirs}_embeddings.weight",)
        found.append(Weight(f"embedding.{ours}_embeddings.weight", names))
    for layer in range(args["num_layers"]):
        here, there = f"encoder.layers.{layer}", f"bert.encoder.layer.{layer}"
        for kind in ("weight", "bias"):
            names = tuple(
                f"{there}.attention.self.{part}.{kind}" for part in ("query", "key", "value")
            )
            found.append(Weight(f"{here}.self_attention.linear_qkv.{kind}", names, qkv))
        for ours, theirs in SAME_IN_A_LAYER.items():
            found += norms(f"{here}.{ours}", f"{there}.{theirs}")
    for ours, theirs in SAME_AT_THE_ENDS.items():
        found += norms(ours, theirs)
    found.append(Weight("output_layer.bias", ("cls.predictions.bias",)))
    return found


BERT = ConvertedFamily(
    "megatron-bert",
    arguments,
    config,
    weights,
    needs,
    model_family="bert",
    auto_class="MegatronBertForPreTraining",
    vocabulary=("embedding.word_embeddings.weight", "output_layer.bias"),
)
