"""A T5 in plain torch operations on a dictionary of weights: what the package must agree with."""

import math

import torch

from tests.core.models.plain_gpt import Weights, linear, mlp, norm, rotate


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """[b, s, heads, d] each -> [b, s, heads d]; `hidden` [b or 1, s, s'] is not looked at."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.size(-1))
    shares = scores.masked_fill(hidden[:, None], -math.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", shares, v).flatten(2)


def self_attention(x, weights: Weights, name: str, config, rope: float, hidden) -> torch.Tensor:
    heads, width = config.num_attention_heads, config.kv_channels
    mixed = linear(x, weights, f"{name}.linear_qkv")
    q, k, v = mixed.view(*x.shape[:2], heads, 3 * width).chunk(3, -1)
    if rope:
        q, k = rotate(q, rope, 10000.0), rotate(k, rope, 10000.0)
    return linear(attend(q, k, v, hidden), weights, f"{name}.linear_proj")


def cross_attention(x, states, weights: Weights, name: str, config, hidden) -> torch.Tensor:
    heads, width = config.num_attention_heads, config.kv_channels
    q = linear(x, weights, f"{name}.linear_q").view(*x.shape[:2], heads, width)
    mixed = linear(states, weights, f"{name}.linear_kv")
    k, v = mixed.view(*states.shape[:2], heads, 2 * width).chunk(2, -1)
    return linear(attend(q, k, v, hidden), weights, f"{name}.linear_proj")


def stack(name: str, ids, weights: Weights, config, rope: float, hidden, states=None, unseen=None):
    """One stack: "encoder", or "decoder" with the encoder's `states`."""
    epsilon = config.layernorm_epsilon
    x = weights["embedding.word_embeddings.weight"][ids]
    positions = weights.get("embedding.position_embeddings.weight")
    if positions is not None:
        x = x + positions[: ids.size(1)]
    for i in range(config.num_layers):
        layer = f"{name}.layers.{i}"
        y = norm(x, weights, f"{layer}.input_layernorm", epsilon)
        x = x + self_attention(y, weights, f"{layer}.self_attention", config, rope, hidden)
        if states is not None:
            y = norm(x, weights, f"{layer}.pre_cross_attn_layernorm", epsilon)
            at = f"{layer}.cross_attention"
            x = x + cross_attention(y, states, weights, at, config, unseen)
        y = norm(x, weights, f"{layer}.pre_mlp_layernorm", epsilon)
        x = x + mlp(y, weights, f"{layer}.mlp", config)
    return norm(x, weights, f"{name}.final_layernorm", epsilon)


def plain_t5_loss(
    weights: Weights, config, encoder_config, text, answer, enc_pad, dec_pad, labels, rope=0.0
) -> torch.Tensor:
    """The loss of each token of the answer, [b, s_dec]; `enc_pad`, `dec_pad` are True at padding."""
    states = stack("encoder", text, weights, encoder_config, rope, enc_pad[:, None, :])
    future = torch.ones(answer.size(1), answer.size(1)).triu(1).bool()
    hidden = dec_pad[:, None, :] | future
    unseen = enc_pad[:, None, :]
    x = stack("decoder", answer, weights, config, rope, hidden, states, unseen)
    tied = weights["embedding.word_embeddings.weight"]
    logits = x @ weights.get("lm_head.output_layer.weight", tied).T
    logits = logits + weights.get("lm_head.output_layer.bias", torch.zeros(()))
    return logits.logsumexp(-1) - logits.gather(-1, labels[..., None])[..., 0]
