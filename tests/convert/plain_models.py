"""GPT-2, Llama and Mixtral written down from Hugging Face's weight names, in a few lines: for tests.

Nothing here is shared with the package or with transformers.
"""

import math

import torch
import torch.nn.functional as F

GPT2_CONFIG = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 16,
    "n_head": 4,
    "n_positions": 12,
    "vocab_size": 50,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
}
LLAMA_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "max_position_embeddings": 12,
    "rope_theta": 500.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "vocab_size": 50,
    "tie_word_embeddings": False,
}
MIXTRAL_CONFIG = LLAMA_CONFIG | {
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}


def gpt2_weights() -> dict[str, torch.Tensor]:
    """Random weights under their names in `GPT2LMHeadModel`."""
    h, v, n = 16, 50, 12
    shapes = {"wte.weight": (v, h), "wpe.weight": (n, h), "ln_f.weight": (h,), "ln_f.bias": (h,)}
    for i in range(2):
        shapes |= {
            f"h.{i}.{name}": shape
            for name, shape in {
                "ln_1.weight": (h,),
                "ln_1.bias": (h,),
                "attn.c_attn.weight": (h, 3 * h),
                "attn.c_attn.bias": (3 * h,),
                "attn.c_proj.weight": (h, h),
                "attn.c_proj.bias": (h,),
                "ln_2.weight": (h,),
                "ln_2.bias": (h,),
                "mlp.c_fc.weight": (h, 4 * h),
                "mlp.c_fc.bias": (4 * h,),
                "mlp.c_proj.weight": (4 * h, h),
                "mlp.c_proj.bias": (h,),
            }.items()
        }
    return _random({f"transformer.{name}": shape for name, shape in shapes.items()})


def llama_weights() -> dict[str, torch.Tensor]:
    """Random weights under their names in `LlamaForCausalLM`."""
    h, v, f = 24, 50, 40
    shapes = {"model.embed_tokens.weight": (v, h), "model.norm.weight": (h,)}
    shapes |= {"lm_head.weight": (v, h)}
    for i in range(2):
        shapes |= {
            f"model.layers.{i}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (h,),
                "self_attn.q_proj": (32, h),
                "self_attn.k_proj": (16, h),
                "self_attn.v_proj": (16, h),
                "self_attn.o_proj": (h, 32),
                "post_attention_layernorm": (h,),
                "mlp.gate_proj": (f, h),
                "mlp.up_proj": (f, h),
                "mlp.down_proj": (h, f),
            }.items()
        }
    return _random(shapes)


def mixtral_weights() -> dict[str, torch.Tensor]:
    """Random weights under their names in `MixtralForCausalLM`."""
    h, f = 24, 40
    shapes = {
        name: tuple(weight.shape) for name, weight in llama_weights().items() if ".mlp." not in name
    }
    for i in range(2):
        name = f"model.layers.{i}.block_sparse_moe"
        shapes[f"{name}.gate.weight"] = (4, h)
        for expert in range(4):
            for part, shape in (("w1", (f, h)), ("w2", (h, f)), ("w3", (f, h))):
                shapes[f"{name}.experts.{expert}.{part}.weight"] = shape
    return _random(shapes)


def _random(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return {
        name: 0.3 * torch.randn(shape, generator=generator) + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in shapes.items()
    }


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention over [b, heads, s, d]; fewer key/value heads serve several queries each."""
    k = k.repeat_interleave(q.size(1) // k.size(1), dim=1)
    v = v.repeat_interleave(q.size(1) // v.size(1), dim=1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    context = scores.masked_fill(later, -math.inf).softmax(-1) @ v
    return context.transpose(1, 2).flatten(2)


def gpt2_logits(w: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """[b, s] -> [b, s, v]."""
    b, s = tokens.shape
    x = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"][:s]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        name = f"transformer.{name}"
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"transformer.{name}.weight"] + w[f"transformer.{name}.bias"]

    for i in range(2):
        qkv = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn")
        q, k, v = (part.view(b, s, 4, 4).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        x = x + linear(attend(q, k, v), f"h.{i}.attn.c_proj")
        wide = F.gelu(linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"), approximate="tanh")
        x = x + linear(wide, f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ w["transformer.wte.weight"].t()


def swiglu(y: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor):
    return (F.silu(y @ gate.t()) * (y @ up.t())) @ down.t()


def llama_mlp(w: dict[str, torch.Tensor], layer: str, y: torch.Tensor) -> torch.Tensor:
    return swiglu(y, *(w[f"{layer}.mlp.{p}_proj.weight"] for p in ("gate", "up", "down")))


def mixtral_mlp(w: dict[str, torch.Tensor], layer: str, y: torch.Tensor) -> torch.Tensor:
    """Token by token: softmax over all experts, the two largest, divided by their sum."""
    layer, out = f"{layer}.block_sparse_moe", torch.zeros_like(y)
    for place in torch.cartesian_prod(*map(torch.arange, y.shape[:-1])).tolist():
        token = y[tuple(place)]
        probs, chosen = (w[f"{layer}.gate.weight"] @ token).softmax(-1).topk(2)
        for prob, expert in zip(probs / probs.sum(), chosen.tolist(), strict=True):
            weights = (w[f"{layer}.experts.{expert}.{p}.weight"] for p in ("w1", "w3", "w2"))
            out[tuple(place)] += prob * swiglu(token, *weights)
    return out


def mixtral_logits(w: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """[b, s] -> [b, s, v]."""
    return llama_logits(w, tokens, mixtral_mlp)


def llama_logits(w: dict[str, torch.Tensor], tokens: torch.Tensor, mlp=llama_mlp) -> torch.Tensor:
    """[b, s] -> [b, s, v]."""
    b, s = tokens.shape
    x = w["model.embed_tokens.weight"][tokens]
    angles = torch.outer(torch.arange(s), 500.0 ** -(torch.arange(0, 8, 2) / 8))
    turn = torch.polar(torch.ones_like(angles), angles)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt() * w[f"{name}.weight"]

    def heads(x: torch.Tensor, name: str, turned: bool) -> torch.Tensor:
        parts = (x @ w[f"{name}.weight"].t()).view(b, s, -1, 8).transpose(1, 2)
        if not turned:
            return parts
        # Feature k and feature k + d/2 are the two coordinates of one pair.
        pairs = torch.complex(*parts.chunk(2, dim=-1)) * turn
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    for i in range(2):
        name = f"model.layers.{i}"
        y = norm(x, f"{name}.input_layernorm")
        q, k = (heads(y, f"{name}.self_attn.{p}_proj", True) for p in "qk")
        v = heads(y, f"{name}.self_attn.v_proj", False)
        x = x + attend(q, k, v) @ w[f"{name}.self_attn.o_proj.weight"].t()
        x = x + mlp(w, name, norm(x, f"{name}.post_attention_layernorm"))
    return norm(x, "model.norm") @ w["lm_head.weight"].t()
