"""BERT, Mamba-2 and T5 from Hugging Face and back: the same numbers as transformers', the same bytes.

Weights are random and saved by transformers itself. Ours run on two tensor-parallel ranks.
"""

import json
import shlex
import sys
from pathlib import Path

import pytest
import torch

from minimegatron import pretrain_bert, pretrain_mamba, pretrain_t5
from minimegatron.convert import mamba2
from minimegatron.core import parallel_state
from minimegatron.training import training
from minimegatron.training.global_vars import destroy_global_vars
from minimegatron.training.initialize import initialize_megatron
from tests.convert.test_convert import REST, TOKENS, convert
from tests.figures import figure
from tests.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
safetensors = pytest.importorskip("safetensors.torch", reason="the extra `convert` is missing")

SMALL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2}
BERT = {"num_attention_heads": 4, "intermediate_size": 40, "max_position_embeddings": 12, **SMALL}
MAMBA = {"num_heads": 8, "head_dim": 4, "n_groups": 2, "state_size": 8, "chunk_size": 4, **SMALL}
T5 = {"vocab_size": 50, "d_model": 16, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4}
T5 |= {"d_kv": 4, "d_ff": 40, "relative_attention_num_buckets": 8}
T5 |= {"relative_attention_max_distance": 10, "tie_word_embeddings": False}
THEIRS = {
    "bert": ("MegatronBertConfig", "MegatronBertForPreTraining", BERT),
    "mamba": ("Mamba2Config", "Mamba2ForCausalLM", MAMBA),
    "mamba tied": ("Mamba2Config", "Mamba2ForCausalLM", MAMBA | {"tie_word_embeddings": True}),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-gelu"},
    ),
    "t5 not gated": (
        "T5Config",
        "T5ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gelu", "d_kv": 16},
    ),
}
DEFAULTS = {
    "bert": {"model_family": "bert", "tokenizer_type": "BertWordPieceLowerCase"},
    "t5": {
        "model_family": "t5",
        "tokenizer_type": "BertWordPieceLowerCase",
        "padded_vocab_size": 50,
        "vocab_extra_ids": 2,
    },
    "mamba": {"model_family": "mamba", "padded_vocab_size": 260},
}
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(45))]
PROGRAMS = {"bert": pretrain_bert, "mamba": pretrain_mamba, "t5": pretrain_t5}
MASK = torch.ones(2, 10, dtype=torch.long)
MASK[1, 7:] = 0
TYPES = torch.arange(10).ge(4).long().expand(2, 10)


def their_model(kind: str) -> torch.nn.Module:
    """With weights that no symmetry makes equal: biases and norms are random too."""
    config_class, model_class, settings = THEIRS[kind]
    torch.manual_seed(5)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings))
    for name, param in model.named_parameters():
        if param.dim() == 1:
            torch.nn.init.normal_(param, mean=float("norm" in name or "ln" in name), std=0.2)
    if kind.startswith("t5"):  # what transformers makes is tied, what it loads need not be
        model.lm_head.weight = torch.nn.Parameter(torch.randn(50, 16))
    return model.eval()


def their_outputs(kind: str, model: torch.nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        if kind == "bert":
            found = model(TOKENS, attention_mask=MASK, token_type_ids=TYPES)
            return [found.prediction_logits * MASK[..., None], found.seq_relationship_logits]
        if kind.startswith("t5"):
            return [model(TOKENS, attention_mask=MASK, decoder_input_ids=TOKENS[:, 2:]).logits]
        return [model(TOKENS).logits]


def our_outputs(jobs: list[tuple[str, list[str]]]) -> list[list[torch.Tensor]]:
    """What each imported model computes on these ranks; logits whole on every rank."""
    results = []
    for kind, flags in jobs:
        family = kind.split()[0]
        tp = ["--tensor-model-parallel-size", str(torch.distributed.get_world_size())]
        sys.argv = ["test", *flags, *REST.split(), *tp]
        initialize_megatron(args_defaults=DEFAULTS[family])
        (model,), _, _ = training.setup_model_and_optimizer(PROGRAMS[family].model_provider)
        model.eval()
        with torch.no_grad():
            results.append(FORWARD[family](model))
        destroy_global_vars()
        parallel_state.destroy_model_parallel()
    return results


def whole(logits: torch.Tensor) -> torch.Tensor:
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    torch.distributed.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, dim=-1)[..., :50]


def bert_outputs(model: torch.nn.Module) -> list[torch.Tensor]:
    logits, order = model(TOKENS, MASK, TYPES)
    return [whole(logits) * MASK[..., None], order]


def mamba_outputs(model: torch.nn.Module) -> list[torch.Tensor]:
    return [whole(model(TOKENS, None, None))]


def t5_outputs(model: torch.nn.Module) -> list[torch.Tensor]:
    padding = MASK.eq(0)[:, None, None, :]
    return [whole(model(TOKENS, TOKENS[:, 2:], padding, None, padding))]


FORWARD = {"bert": bert_outputs, "mamba": mamba_outputs, "t5": t5_outputs}


def there(capsys, path: Path, kind: str) -> tuple[Path, list[str]]:
    """A folder that transformers has saved, converted; and the flags that the command says to use."""
    their_model(kind).save_pretrained(path / "hf")
    if not kind.startswith("mamba"):
        (path / "hf/vocab.txt").write_text("\n".join(PIECES[: 40 if kind.startswith("t5") else 50]))
    capsys.readouterr()
    words = ("--from", "hf", "--to", "minimegatron", "--load-dir", path / "hf")
    code, out = convert(capsys, *words, "--save-dir", path / "ours")
    assert code == 0, out
    assert f"flags of pretrain_{kind.split()[0]}," in out
    return path / "ours", shlex.split(" ".join(out.splitlines()[2:]))


def test_imported_models_compute_what_transformers_computes(capsys, tmp_path):
    jobs = [(kind, there(capsys, tmp_path / kind.replace(" ", "-"), kind)[1]) for kind in THEIRS]
    results = run_ranks(our_outputs, 2, jobs, timeout=240)[0]
    for kind, found in zip(THEIRS, results, strict=True):
        expected = their_outputs(kind, their_model(kind))
        difference = max(
            (ours - theirs).abs().max().item() / theirs.abs().max().item()
            for ours, theirs in zip(found, expected, strict=True)
        )
        figure(f"{kind}: differs by {difference:.2g} of the largest number")
        assert difference < 5e-6


@pytest.mark.parametrize("kind", THEIRS)
def test_there_and_back(capsys, tmp_path, kind):
    ours, _ = there(capsys, tmp_path, kind)
    words = ("--from", "minimegatron", "--to", "hf", "--load-dir", ours)
    code, out = convert(capsys, *words, "--save-dir", tmp_path / "b")
    assert code == 0, out
    before = safetensors.load_file(tmp_path / "hf/model.safetensors")
    after = safetensors.load_file(tmp_path / "b/model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    _, model_class, _ = THEIRS[kind]
    # The class that the command names loads it, and computes what it did.
    auto_class = out.split("transformers.")[1]
    back = getattr(transformers, auto_class.split(".")[0]).from_pretrained(tmp_path / "b").eval()
    assert type(back).__name__ == model_class
    for one, other in zip(
        their_outputs(kind, back), their_outputs(kind, their_model(kind)), strict=True
    ):
        assert torch.allclose(one, other, atol=1e-6)  # in chunks of another size


REFUSED = {
    "activation": ("bert", {"hidden_act": "gelu_new"}, "hidden_act gelu_new"),
    "types": ("bert", {"type_vocab_size": 3}, "type_vocab_size 3 instead of 2"),
    "post-norm": ("bert", {"model_type": "bert"}, "'bert'; supported are gpt2"),
    "layers": ("bert", {"num_hidden_layers": 3}, "no weight bert.encoder.layer.2"),
    "width": ("bert", {"hidden_size": 32}, "50 x 16, but by config.json it is any x 32"),
    "relu": ("t5", {"feed_forward_proj": "relu"}, "feed_forward_proj relu"),
    "tied": ("t5", {"scale_decoder_outputs": True}, "the tied output layer of T5's first version"),
    "heads of t5": ("t5", {"d_kv": 8}, "SelfAttention.q.weight makes encoder.layers.0"),
    "buckets": (
        "t5",
        {"relative_attention_num_buckets": 9},
        "8 x 4, but by config.json it is 9 x 4",
    ),
    "convolution": ("mamba", {"conv_kernel": 3}, "conv_kernel 3 instead of 4"),
    "time": ("mamba", {"time_step_limit": [0.0, 0.1]}, "a limit on the time step"),
    "heads": ("mamba", {"num_heads": 6}, "6 heads of 4 features, where expand x hidden_size is 32"),
    "state": ("mamba", {"state_size": 16}, "104 x 16, but by config.json it is 136 x 16"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_refused(capsys, tmp_path, change):
    kind, changed, words = REFUSED[change]
    folder = tmp_path / "hf"
    their_model(kind).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    capsys.readouterr()
    direction = ("--from", "hf", "--to", "minimegatron", "--load-dir", folder)
    code, out = convert(capsys, *direction, "--save-dir", tmp_path / "ours")
    assert code == 2 and words in out and len(out.splitlines()) == 1, out
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("heads", [2, 6])
def test_no_config_that_transformers_refuses_is_written(heads):
    args = mamba2.arguments(their_model("mamba").config.to_dict())
    with pytest.raises(ValueError, match=f"{heads} heads of 4 features, not a multiple of .* 16"):
        mamba2.config(args | {"mamba_num_heads": heads})
