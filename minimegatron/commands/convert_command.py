"""`minimegatron convert --from hf --to minimegatron --load-dir gpt2 --save-dir ckpt`, or back.

Counterpart: Megatron's `tools/checkpoint/convert.py`.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from minimegatron.convert.hugging_face import MODEL_SECTIONS, export_to_hf, import_from_hf
from minimegatron.core.dist_checkpointing.core import CheckpointingException
from minimegatron.training.argument_utils import flag_name
from minimegatron.training.config import SECTIONS

FORMS = ("hf", "minimegatron")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

USAGE = "--from F --to F --load-dir D --save-dir D [options]"
EXAMPLES = (
    "--from hf --to minimegatron --load-dir gpt --save-dir own",
    "--from minimegatron --to hf --load-dir own --save-dir hf",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Directions, folders, and what to keep."""
    add = parser.add_argument
    add("--from", dest="source", choices=FORMS, required=True)
    add("--to", dest="target", choices=FORMS, required=True)
    add("--load-dir", type=Path, required=True, metavar="D", help="folder to read")
    add("--save-dir", type=Path, required=True, metavar="D", help="folder to write")
    add(
        "--vocab-size",
        type=int,
        metavar="N",
        help="to hf: rows of the embedding to keep (default: all, with their padding, which is in the "
        "softmax: fewer give another loss)",
    )
    add("--dtype", choices=DTYPES, help="to hf: of the weights (default: the checkpoint's)")


def run(args: argparse.Namespace) -> None:
    """Converts weights of GPT-2, Llama, Mixtral, BERT, T5 and Mamba-2. Raises ValueError."""
    if args.source == args.target:
        raise ValueError(f"--from and --to are both {args.source}; one of them must be the other")
    if not args.load_dir.is_dir():
        raise ValueError(f"--load-dir: there is no folder {args.load_dir}")
    try:
        # Not at once: a refusal then stands on a line of its own.
        bar = tqdm(desc="converting", unit=" weights", disable=None, leave=False, delay=0.5)
        with bar:
            if args.source == "hf":
                found = import_from_hf(args.load_dir, args.save_dir, bar.update)
            else:
                dtype = None if args.dtype is None else DTYPES[args.dtype]
                found = export_to_hf(
                    args.load_dir, args.save_dir, bar.update, args.vocab_size, dtype
                )
    except CheckpointingException as error:
        raise ValueError(str(error)) from None
    print(f"wrote {args.save_dir}")
    if args.source == "hf":
        program = f"pretrain_{found['model_family']}"
        print(f"train on from it with these flags of {program}, and others of your own:")
        print(f"  {' '.join(flags(found))} --load {args.save_dir} --finetune")
        pieces = args.load_dir / "vocab.txt"
        if pieces.is_file():
            print(f"  --vocab-file {pieces}")
        elif (args.load_dir / "tokenizer.json").is_file():
            file = args.load_dir / "tokenizer.json"
            print(f"  --tokenizer-type BPETokenizer --tokenizer-file {file}")
    else:
        _, auto_class = found
        print(f"load it with transformers.{auto_class}.from_pretrained({str(args.save_dir)!r})")


def flags(model_args: dict[str, Any]) -> list[str]:
    """The flags that describe this model, where they are not the defaults."""
    words = []
    told = model_args.keys() - {"model_family"}  # the program says that
    for field in (f for name in MODEL_SECTIONS for f in dataclasses.fields(SECTIONS[name])):
        if field.name in told and model_args[field.name] != field.default:
            words.append(flag_name(field))
            if not isinstance(model_args[field.name], bool):
                words.append(str(model_args[field.name]))
    return [*words, "--make-vocab-size-divisible-by", "1"]
