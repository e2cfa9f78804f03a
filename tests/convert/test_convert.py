"""GPT-2, Llama and Mixtral from Hugging Face and back: the same logits, the same bytes."""

import dataclasses
import json
import shlex
import sys
from pathlib import Path

import pytest
import torch

from minimegatron import __main__, pretrain_gpt
from minimegatron.convert import mixtral
from minimegatron.core import parallel_state
from minimegatron.training import checkpoint_args, resume_notes, training
from minimegatron.training.arguments import parse_args
from minimegatron.training.config import SECTIONS
from minimegatron.training.global_vars import destroy_global_vars
from minimegatron.training.initialize import initialize_megatron
from tests.convert.plain_models import (
    GPT2_CONFIG,
    LLAMA_CONFIG,
    MIXTRAL_CONFIG,
    gpt2_logits,
    gpt2_weights,
    llama_logits,
    llama_weights,
    mixtral_logits,
    mixtral_weights,
)
from tests.figures import figure
from tests.ranks import run_ranks

safetensors = pytest.importorskip("safetensors.torch", reason="the extra `convert` is missing")

MODELS = {
    "gpt2": (GPT2_CONFIG, gpt2_weights, gpt2_logits),
    "llama": (LLAMA_CONFIG, llama_weights, llama_logits),
    "mixtral": (MIXTRAL_CONFIG, mixtral_weights, mixtral_logits),
}
REST = "--seq-length 10 --micro-batch-size 2 --train-iters 1 --lr 1 --eval-iters 0"
TOKENS = torch.arange(20).view(2, 10) * 7 % 50


def hf_folder(path: Path, model_type: str) -> Path:
    config, weights, _ = MODELS[model_type]
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    safetensors.save_file(weights(), path / "model.safetensors")
    return path


def convert(capsys, *words: str) -> tuple[int, str]:
    """The command's exit code and what it printed."""
    try:
        code = __main__.main(["convert", *map(str, words)])
    except SystemExit as ending:
        code = ending.code
    out, err = capsys.readouterr()
    return code, out + err


def imported(capsys, path: Path, model_type: str) -> tuple[Path, list[str]]:
    """A converted checkpoint, and the flags that the command says to use."""
    source, target = hf_folder(path / "hf", model_type), path / "ours"
    code, out = convert(
        capsys, "--from", "hf", "--to", "minimegatron", "--load-dir", source, "--save-dir", target
    )
    assert code == 0, out
    return target, shlex.split(out.splitlines()[2])


def test_weights_only_are_for_finetuning(capsys, tmp_path):
    target, flags = imported(capsys, tmp_path, "gpt2")
    assert "--finetune" in flags
    rest = REST.split()
    parse_args(argv=[*flags, *rest], environ={})
    flags.remove("--finetune")
    for more in ([], ["--no-load-optim"]):
        with pytest.raises(ValueError, match=f"{target}.* holds weights only; add --finetune"):
            parse_args(argv=[*flags, *rest, *more], environ={})


def test_s2_a_converted_vocabulary_gets_no_rows(capsys, tmp_path):
    """Was: padded for this run's flags, with rows of no token that the softmax counts."""
    _, flags = imported(capsys, tmp_path, "gpt2")
    rows = json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"]
    at = flags.index("--make-vocab-size-divisible-by")
    tokens = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(rows - 1)]
    argv = [*flags[:at], *flags[at + 2 :], *REST.split(), *tokens]
    args = parse_args(argv=argv, environ={})
    assert args.make_vocab_size_divisible_by == 128 and args.padded_vocab_size == rows


@pytest.mark.parametrize(
    ("dtype", "said", "words"),
    [
        (torch.float8_e4m3fn, {"quant_method": "fp8"}, "0.mlp.down_proj.weight is F8_E4M3)"),
        (torch.float8_e5m2, None, "0.mlp.down_proj.weight is F8_E5M2)"),
        (torch.int8, {"load_in_8bit": True}, "0.mlp.down_proj.weight is I8)"),
        (torch.float32, {"quant_method": "gptq"}, "(config.json says {'quant_method': 'gptq'})"),
    ],
)
def test_v6_quantized_weights_are_refused(capsys, tmp_path, dtype, said, words):
    """Was: the scales were left out, and nobody said so."""
    weights = {}
    for name, weight in llama_weights().items():
        weights[name] = weight.to(dtype) if "proj" in name else weight
        if "proj" in name and said is not None:
            weights[f"{name}_scale_inv"] = torch.ones(1, 1)
    (tmp_path / "config.json").write_text(
        json.dumps(LLAMA_CONFIG | ({} if said is None else {"quantization_config": said}))
    )
    safetensors.save_file(weights, tmp_path / "model.safetensors")
    flags = ("--from", "hf", "--to", "minimegatron", "--load-dir", tmp_path)
    code, out = convert(capsys, *flags, "--save-dir", tmp_path / "ours")
    assert code != 0 and "holds quantized weights" in out and words in out
    assert "take the model in bfloat16" in out and not (tmp_path / "ours").exists()


def logits_of(all_flags: list[list[str]]) -> list[torch.Tensor]:
    """What each imported model computes on these ranks: [b, s, v], on every rank."""
    results = []
    for flags in all_flags:
        tp = ["--tensor-model-parallel-size", str(torch.distributed.get_world_size())]
        if "--num-experts" in flags:
            tp += ["--sequence-parallel", "--expert-tensor-parallel-size", "1"]
            tp += ["--expert-model-parallel-size", str(torch.distributed.get_world_size())]
        sys.argv = ["test", *flags, *REST.split(), *tp, "--padded-vocab-size", "260"]
        initialize_megatron()
        (model,), _, _ = training.setup_model_and_optimizer(pretrain_gpt.model_provider)
        model.eval()
        with torch.no_grad():
            logits = model(TOKENS, torch.arange(10).expand(2, 10), None)
        group = parallel_state.get_tensor_model_parallel_group()
        parts = [torch.empty_like(logits) for _ in range(group.size())]
        torch.distributed.all_gather(parts, logits.contiguous(), group=group)
        results.append(torch.cat(parts, dim=-1))
        destroy_global_vars()
        parallel_state.destroy_model_parallel()
    return results


def test_imported_models_compute_the_same(capsys, tmp_path):
    flags = [imported(capsys, tmp_path / name, name)[1] for name in MODELS]
    results = run_ranks(logits_of, 2, flags)[0]
    for (name, (_, weights, logits)), found in zip(MODELS.items(), results, strict=True):
        expected = logits(weights(), TOKENS)
        assert expected.std() > 0.5
        difference = (found[..., :50] - expected).abs().max().item()
        figure(f"{name}: logits differ by {difference:.2g} at most")
        assert difference < 2e-5


@pytest.mark.parametrize("model_type", MODELS)
def test_there_and_back(capsys, tmp_path, model_type):
    ours, _ = imported(capsys, tmp_path, model_type)
    back = tmp_path / "back"
    direction = ("--from", "minimegatron", "--to", "hf")
    code, out = convert(capsys, *direction, "--load-dir", ours, "--save-dir", back)
    assert code == 0 and f"wrote {back}" in out
    before = safetensors.load_file(tmp_path / "hf/model.safetensors")
    after = safetensors.load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    config = json.loads((back / "config.json").read_text())
    assert MODELS[model_type][0].items() <= config.items()

    short = (*direction, "--vocab-size", "40", "--dtype", "bfloat16")
    code, out = convert(capsys, *short, "--load-dir", ours, "--save-dir", tmp_path / "short")
    assert code == 0, out
    shorter = safetensors.load_file(tmp_path / "short/model.safetensors")
    name = next(name for name in before if "embed_tokens" in name or "wte" in name)
    assert torch.equal(shorter[name], before[name][:40].bfloat16())


REFUSED = {
    "model_type": ({"model_type": "mamba"}, "'mamba'; supported are gpt2, llama, mixtral"),
    "activation": ({"hidden_act": "relu"}, "hidden_act relu"),
    "bias": ({"attention_bias": True}, "attention_bias"),
    "scaling": ({"rope_scaling": {"rope_type": "llama3"}}, "scaled by llama3"),
    "layers": ({"num_hidden_layers": 3}, "no weight model.layers.2"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_refused(capsys, tmp_path, change):
    folder = hf_folder(tmp_path / "hf", "llama")
    changed, words = REFUSED[change]
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG | changed))
    target = tmp_path / "ours"
    code, out = convert(
        capsys, "--from", "hf", "--to", "minimegatron", "--load-dir", folder, "--save-dir", target
    )
    assert code == 2 and words in out and len(out.splitlines()) == 1
    assert not target.exists()


def test_refused_folders(capsys, tmp_path):
    from_hf = ("--from", "hf", "--to", "minimegatron", "--save-dir", tmp_path / "x")
    code, out = convert(capsys, *from_hf, "--load-dir", tmp_path)
    assert code == 2 and "config.json is missing" in out
    folder = hf_folder(tmp_path / "hf", "gpt2")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    code, out = convert(capsys, *from_hf, "--load-dir", folder)
    assert code == 2 and "can execute code" in out
    code, out = convert(
        capsys, "--from", "hf", "--to", "hf", "--load-dir", folder, "--save-dir", folder
    )
    assert code == 2 and "both hf" in out


@pytest.mark.parametrize("model_type", MODELS)
def test_transformers_computes_the_same(tmp_path, model_type):
    """That the plain models, and so ours, are what Hugging Face means."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = hf_folder(tmp_path / "hf", model_type)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        found = theirs(TOKENS).logits
    _, weights, logits = MODELS[model_type]
    assert torch.allclose(found, logits(weights(), TOKENS), atol=2e-5)


SMALL = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
LLAMA = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, **SMALL}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
THEIR_OWN = {
    "gpt2": ("GPT2Config", {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 16, **SMALL}),
    "llama": ("LlamaConfig", LLAMA),
    "llama tied": (
        "LlamaConfig",
        LLAMA | {"tie_word_embeddings": True, "rope_theta": 5000.0, "attention_bias": False},
    ),
}


@pytest.mark.parametrize("kind", THEIR_OWN)
def test_what_transformers_saves_comes_back_to_it(capsys, tmp_path, kind):
    """Random weights, saved by transformers, through both conversions and loaded by transformers."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config_class, settings = THEIR_OWN[kind]
    config = getattr(transformers, config_class)(**settings)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    theirs.save_pretrained(tmp_path / "hf")
    for way in (("hf", "hf", "minimegatron", "ours"), ("minimegatron", "ours", "hf", "back")):
        words = ("--from", way[0], "--load-dir", tmp_path / way[1])
        code, out = convert(capsys, *words, "--to", way[2], "--save-dir", tmp_path / way[3])
        assert code == 0, out
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        assert torch.equal(back(TOKENS).logits, theirs(TOKENS).logits)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_router_load_balancing_type", ["sinkhorn"]),
        ("moe_expert_capacity_factor", 0.5),
        ("moe_apply_probs_on_input", True),
    ],
)
def test_f3_experts_chosen_otherwise_are_no_mixtral(name, value):
    """Was: written as one, whose logits were others."""
    assert mixtral.needs({"num_experts": 2, name: value})[name] != value


def test_f4_what_a_mixtral_computes_is_in_its_checkpoint():
    """Was: a run with another score function took the weights without a word."""
    told = {*checkpoint_args.COMPARED, *resume_notes.WHICH_EXPERTS} - {"moe_token_drop_policy"}
    names = {field.name for field in dataclasses.fields(SECTIONS["moe"])} & told
    assert names and names <= mixtral.arguments(MIXTRAL_CONFIG).keys()
