"""Between a Hugging Face folder and a checkpoint of ours.

Megatron has `tools/checkpoint/convert.py` for this.

    HF folder                             our folder
    config.json                           iter_0000000/common.json
    model.safetensors, or several and     iter_0000000/rank_00000.safetensors
      model.safetensors.index.json

One process holds the whole model in memory. Pickled weights (`pytorch_model.bin`) are not read:
unpickling can execute what it reads.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from minimegatron.convert.family import ConvertedFamily, Weight
from minimegatron.convert.gpt2 import GPT2
from minimegatron.convert.llama import LLAMA
from minimegatron.convert.mamba2 import MAMBA2
from minimegatron.convert.megatron_bert import BERT
from minimegatron.convert.mixtral import MIXTRAL
from minimegatron.convert.model_sizes import check_shape
from minimegatron.convert.t5_version_1_1 import T5
from minimegatron.core import dist_checkpointing
from minimegatron.core.datasets.atomic_file import write_atomically
from minimegatron.core.dist_checkpointing.core import load_common_state_dict
from minimegatron.core.dist_checkpointing.mapping import ShardedTensor
from minimegatron.core.json_text import read_json
from minimegatron.core.left_out_record import known_fields
from minimegatron.training.checkpoint_folder import (
    find_checkpoint,
    get_checkpoint_name,
    get_checkpoint_tracker_filename,
)
from minimegatron.training.config import SECTIONS

FAMILIES = {family.model_type: family for family in (GPT2, LLAMA, MIXTRAL, BERT, T5, MAMBA2)}
MODEL_SECTIONS = ("model", "moe", "bert", "t5", "mamba")
"""Of `training.config`: those that say what a model computes."""

FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes of weights, by safetensors' names: a number is there what it is in the model."""

Progress = Callable[[], Any]


def import_from_hf(load_dir: Path, save_dir: Path, progress: Progress) -> dict[str, Any]:
    """Writes a checkpoint of the weights at iteration 0. Returns the model's arguments.

    `progress` is called once per weight. Raises ValueError for a folder that is none of Hugging
    Face's, or holds another model than is supported, or one whose weights count only with scales.
    """
    config = _read_config(load_dir)
    family = FAMILIES.get(config.get("model_type", ""))
    if family is None:
        raise ValueError(
            f"{load_dir / 'config.json'} has model_type {config.get('model_type')!r}; supported "
            f"are {', '.join(FAMILIES)}"
        )
    args = family.arguments(config) | {"model_family": family.model_family}
    _refuse_quantized(load_dir, config)
    theirs = _read_safetensors(load_dir)
    tensors: list[ShardedTensor] = []
    for weight in family.weights(args):
        missing = [name for name in weight.theirs if name not in theirs]
        if missing:
            raise ValueError(f"{load_dir} has no weight {missing[0]}; is the folder complete?")
        ours = _to_ours(weight, [theirs.pop(name) for name in weight.theirs], args)
        tensors.append(ShardedTensor.from_rank_offsets(f"model.{weight.ours}", ours.contiguous()))
        progress()
    # A run that begins with these weights keeps their softmax, whatever its layout pads to.
    rows = tensors[0].global_shape[0]
    common = {
        "iteration": 0,
        "train_state": {},
        "opt_param_scheduler": None,
        "optimizer": None,
        "rng": None,
        "args": _by_section(args | {"padded_vocab_size": rows}),
    }
    dist_checkpointing.save_tensors(tensors, common, get_checkpoint_name(save_dir, 0))
    write_atomically(Path(get_checkpoint_tracker_filename(save_dir)), b"0")
    return args | {"vocab_size": rows}


def export_to_hf(
    load_dir: Path,
    save_dir: Path,
    progress: Progress,
    vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[dict[str, Any], str]:
    """Writes config.json and model.safetensors from the newest checkpoint.

    Returns the config, and the name of the class of transformers that loads the folder.

    Args:
        vocab_size: rows of the embedding to keep; None for all, padding included.
        dtype: of the written weights; None for that of the checkpoint.
    """
    folder = find_checkpoint(load_dir)
    if folder is None:
        raise ValueError(f"{load_dir} holds no checkpoint")
    args = _model_arguments(folder)
    family = _family_of(args)
    ours = dist_checkpointing.load_plain_tensors(folder, prefix="model.")
    rows = len(ours[f"model.{family.vocabulary[0]}"])
    vocab_size = rows if vocab_size is None else vocab_size
    if not 0 < vocab_size <= rows:
        raise ValueError(f"--vocab-size {vocab_size} must be 1 to {rows}, the embedding's rows")
    theirs: dict[str, torch.Tensor] = {}
    for weight in family.weights(args):
        tensor = ours.pop(f"model.{weight.ours}").to(dtype)
        if weight.ours in family.vocabulary:
            tensor = tensor[:vocab_size]
        parts = weight.way.to_theirs([tensor])
        theirs |= {
            name: part.contiguous().clone() for name, part in zip(weight.theirs, parts, strict=True)
        }
        progress()
    config = {
        "model_type": family.model_type,
        **family.config(args),
        "vocab_size": vocab_size,
        "torch_dtype": str(next(iter(theirs.values())).dtype).removeprefix("torch."),
    }
    save_dir.mkdir(parents=True, exist_ok=True)
    _safetensors().save_file(theirs, save_dir / "model.safetensors", metadata={"format": "pt"})
    write_atomically(save_dir / "config.json", json.dumps(config, indent=2).encode())
    return config, family.auto_class


def _to_ours(weight: Weight, tensors: list[torch.Tensor], args: dict[str, Any]) -> torch.Tensor:
    """One weight of ours. Raises ValueError if theirs are not as large as their config.json says."""
    source = weight.theirs[0]
    try:
        (ours,) = weight.way.to_ours(tensors)
    except RuntimeError as error:
        raise ValueError(
            f"config.json and weights disagree: {source} and what belongs to it cannot make "
            f"{weight.ours} ({error}); take both from one model"
        ) from None
    check_shape(weight.ours, ours, args, source)
    return ours


def _by_section(args: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """As a run writes them. Raises TypeError for an argument that no section has."""
    section_of = {
        field.name: section
        for section in MODEL_SECTIONS
        for field in dataclasses.fields(SECTIONS[section])
    }
    found: dict[str, dict[str, Any]] = {section: {} for section in MODEL_SECTIONS}
    for name, value in args.items():
        found[section_of.get(name, "model")][name] = value
    return {section: known_fields(SECTIONS[section], values) for section, values in found.items()}


def _model_arguments(folder: Path) -> dict[str, Any]:
    saved, found = load_common_state_dict(folder)["args"], {}
    for section in MODEL_SECTIONS:
        config = SECTIONS[section]
        found |= {field.name: field.default for field in dataclasses.fields(config)}
        found |= known_fields(config, saved.get(section, {}))
    return found


def _family_of(args: dict[str, Any]) -> ConvertedFamily:
    """The family that computes the same. Raises ValueError naming what none of them has."""
    if args["mtp_num_layers"] is not None:
        raise ValueError(
            f"the model has mtp_num_layers {args['mtp_num_layers']}, and no model of Hugging Face that "
            "is written here has layers for further tokens; train it without them to convert it"
        )
    model_family = args["model_family"] or "gpt"
    differing = {
        family.model_type: [
            f"{key} is {args[key]!r}"
            for key, value in family.needs(args).items()
            if args[key] != value
        ]
        for family in FAMILIES.values()
        if family.model_family == model_family
    }
    for name, differences in differing.items():
        if not differences:
            return FAMILIES[name]
    reasons = "; ".join(f"no {name}, since {', '.join(why)}" for name, why in differing.items())
    raise ValueError(f"Hugging Face has no model that computes what this one does: {reasons}")


def _read_config(load_dir: Path) -> dict[str, Any]:
    path = load_dir / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} is missing; give the folder of a downloaded model")
    config = read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path} is damaged: it holds a {type(config).__name__}, not an object")
    return config


def _weight_files(load_dir: Path) -> list[Path]:
    index = load_dir / "model.safetensors.index.json"
    if not index.is_file():
        return [load_dir / "model.safetensors"]
    try:
        return [load_dir / name for name in sorted(set(read_json(index)["weight_map"].values()))]
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{index} is damaged: it has no weight_map of names") from None


def _refuse_quantized(load_dir: Path, config: dict[str, Any]) -> None:
    """Raises ValueError, before weights are read, for some that count only with scales beside them."""
    said = config.get("quantization_config") or config.get("compression_config")
    name, dtype = next(_not_floats(_weight_files(load_dir)), ("", ""))
    if said or name:
        weights = f"{name} is {dtype}" if name else f"config.json says {said}"
        raise ValueError(
            f"{load_dir} holds quantized weights ({weights}), which count only with the scales beside "
            "them; take the model in bfloat16, or let transformers dequantize and save it"
        )


def _not_floats(files: list[Path]) -> Iterator[tuple[str, str]]:
    """Name and dtype of each weight that is not in one of FLOATS. Buffers, such as masks, may be."""
    for path in files:
        if path.is_file():
            with _safetensors().safe_open(path, "pt") as file:
                for name in sorted(file.keys()):
                    dtype = file.get_slice(name).get_dtype()
                    if name.endswith("weight") and dtype not in FLOATS:
                        yield name, dtype


def _read_safetensors(load_dir: Path) -> dict[str, torch.Tensor]:
    """All weights, under names with their model's prefix."""
    weights: dict[str, torch.Tensor] = {}
    for path in _weight_files(load_dir):
        if not path.is_file():
            raise ValueError(
                f"{path} is missing; pickled weights (*.bin) are not read, since they can execute "
                "code: save the model with safetensors"
            )
        weights |= _safetensors().load_file(path)
    # The published GPT-2 files are of the model without its head, and so without this prefix.
    if "wte.weight" in weights:
        weights = {f"transformer.{name}": tensor for name, tensor in weights.items()}
    return weights


def _safetensors() -> Any:
    try:
        import safetensors.torch  # an extra
    except ImportError:
        raise ValueError(
            "conversion needs the package safetensors; pip install 'minimegatron[convert]'"
        ) from None
    return safetensors.torch
