"""A GPT in plain torch operations on a dictionary of weights: what the package must agree with.

It shares no code with the package. Weights go by their names in the full model.
"""

import math

import torch

Weights = dict[str, torch.Tensor]


def norm(x: torch.Tensor, weights: Weights, name: str, epsilon: float) -> torch.Tensor:
    """LayerNorm if there is a bias, RMSNorm if not."""
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    if bias is None:
        return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight + bias


def linear(x: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    y = torch.einsum("bsi,oi->bso", x, weights[f"{name}.weight"])
    bias = weights.get(f"{name}.bias")
    return y if bias is None else y + bias


def rotate(x: torch.Tensor, share: float, base: float) -> torch.Tensor:
    """[b, s, heads, d]: features k and k + d'/2 are a complex number, turned by position."""
    width = int(x.size(-1) * share)
    turned, kept = x[..., :width], x[..., width:]
    k = torch.arange(width // 2, dtype=torch.float64)
    angle = torch.arange(x.size(1), dtype=torch.float64)[:, None] * base ** (-2 * k / width)
    z = torch.complex(*turned.chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((z.real, z.imag, kept), -1)


def attention(x: torch.Tensor, weights: Weights, name: str, config, rope: float) -> torch.Tensor:
    b, s, _ = x.shape
    heads, groups, width = config.num_attention_heads, config.num_query_groups, config.kv_channels
    served = heads // groups
    mixed = linear(x, weights, f"{name}.linear_qkv").view(b, s, groups, served + 2, width)
    q = mixed[:, :, :, :served].reshape(b, s, heads, width)
    k, v = mixed[:, :, :, served], mixed[:, :, :, served + 1]
    if f"{name}.q_layernorm.weight" in weights:
        q = norm(q, weights, f"{name}.q_layernorm", config.layernorm_epsilon)
        k = norm(k, weights, f"{name}.k_layernorm", config.layernorm_epsilon)
    if rope:
        q, k = rotate(q, rope, 10000.0), rotate(k, rope, 10000.0)
    k, v = k.repeat_interleave(served, 2), v.repeat_interleave(served, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(width)
    future = torch.ones(s, s).triu(1).bool()
    shares = scores.masked_fill(future, -math.inf).exp()
    shares = shares / shares.sum(-1, keepdim=True)
    context = torch.einsum("bhqk,bkhd->bqhd", shares, v).reshape(b, s, heads * width)
    return linear(context, weights, f"{name}.linear_proj")


def mlp(x: torch.Tensor, weights: Weights, name: str, config) -> torch.Tensor:
    wide = linear(x, weights, f"{name}.linear_fc1")
    if config.gated_linear_unit:
        gate, up = wide[..., : wide.size(-1) // 2], wide[..., wide.size(-1) // 2 :]
        wide = gate * torch.sigmoid(gate) * up
    else:
        wide = wide * 0.5 * (1 + torch.erf(wide / math.sqrt(2)))
    return linear(wide, weights, f"{name}.linear_fc2")


def plain_gpt_loss(
    weights: Weights, config, ids: torch.Tensor, labels: torch.Tensor, rope: float = 0.0
) -> torch.Tensor:
    """The loss of each token [b, s]; tied if there is no output weight."""
    x = weights["embedding.word_embeddings.weight"][ids]
    positions = weights.get("embedding.position_embeddings.weight")
    if positions is not None:
        x = x + positions[: ids.size(1)]
    epsilon = config.layernorm_epsilon
    for i in range(config.num_layers):
        layer = f"decoder.layers.{i}"
        y = norm(x, weights, f"{layer}.input_layernorm", epsilon)
        x = x + attention(y, weights, f"{layer}.self_attention", config, rope)
        y = norm(x, weights, f"{layer}.pre_mlp_layernorm", epsilon)
        x = x + mlp(y, weights, f"{layer}.mlp", config)
    x = norm(x, weights, "decoder.final_layernorm", epsilon)
    tied = weights["embedding.word_embeddings.weight"]
    logits = x @ weights.get("output_layer.weight", tied).T
    return logits.logsumexp(-1) - logits.gather(-1, labels[..., None])[..., 0]
