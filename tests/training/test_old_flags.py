"""The launch script of older explanations: its flags are known, it ends early without GPUs, and trains.

What it needs is made as its reader would: a vocabulary file, and data by `minimegatron preprocess`.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minimegatron import pretrain_bert
from minimegatron.__main__ import main
from minimegatron.core.datasets.indexed_dataset import IndexedDataset
from minimegatron.core.datasets.stdlib_sentences import documents_of_stdlib
from minimegatron.core.datasets.wordpiece_tokenizer import build_wordpiece
from minimegatron.training.arguments import parse_args
from minimegatron.training.older_arguments import print_old_flags
from tests.training.launch_script import GPUS_PER_NODE, SCRIPT, script
from tests.training.test_bad_configs import launcher_environment, run_main

pytest.importorskip("tokenizers")

ROOT = Path(__file__).parents[2]
BERT = {"model_family": "bert", "tokenizer_type": "BertWordPieceLowerCase"}


@pytest.fixture(scope="module")
def filled_in(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the script's reader fills in."""
    folder = tmp_path_factory.mktemp("script")
    vocab, text = folder / "bert-vocab.txt", folder / "text.txt"
    vocab.write_text("\n".join(build_wordpiece("BertWordPieceLowerCase").pieces) + "\n")
    documents = [document for document in documents_of_stdlib() if len(document) >= 8][:1100]
    text.write_text("\n\n".join("\n".join(document[:8]) for document in documents))
    flags = ("--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", str(vocab))
    command = ["preprocess", "--input", str(text), "--output-prefix", str(folder / "my")]
    done = main([*command, "--document-per", "paragraph", "--split-sentences", "lines", *flags])
    assert done == 0
    return {
        "vocab": str(vocab),
        "data": str(folder / "my_text_sentence"),
        "checkpoints": str(folder / "checkpoints"),
    }


def on_gloo(argv: list[str]) -> list[str]:
    return [*argv, "--distributed-backend", "gloo"]


def test_preprocess_wrote_documents_of_sentences(filled_in):
    dataset = IndexedDataset(filled_in["data"])
    assert len(dataset) == 8 * (len(dataset.document_indices) - 1) == 8 * 1100


def test_all_its_flags_parse(filled_in, capsys):
    argv = on_gloo(script(**filled_in))
    args = parse_args(argv=argv, args_defaults=BERT, environ=launcher_environment(0, GPUS_PER_NODE))
    for flag, value in re.findall(r"--(\S+) (\S+)", SCRIPT):
        if "{" not in value and flag not in ("distributed-backend", "split"):
            found = getattr(args, flag.replace("-", "_"))
            assert found == (value if isinstance(found, str) else float(value)), flag
    assert args.fp16 and args.data_impl == "mmap" and args.bert_binary_head
    assert args.data_parallel_size == GPUS_PER_NODE and args.padded_vocab_size == 2048
    assert capsys.readouterr().out.count("\n") == 1


def test_unchanged_it_ends_before_anything_begins(filled_in, monkeypatch, capfd):
    """Whether the files are there or not: no GPU, no run."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    nowhere = {"vocab": "bert-vocab.txt", "data": "my_text_sentence", "checkpoints": "/tmp"}
    for places in (filled_in, nowhere):
        argv = ["--local-rank=0", *script(**places)]
        assert run_main(monkeypatch, argv, 0, GPUS_PER_NODE, "pretrain_bert") == 2
        out, err = capfd.readouterr()
        assert out == "" and err.count("\n") == 1
        for words in ("--distributed-backend nccl", "a GPU for each of the 8", "gloo"):
            assert words in err
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("flag", ["--local-rank=1", "--local_rank=1"])
def test_a_line_for_each_on_rank_0(filled_in, capsys, flag):
    argv = [flag, *on_gloo(script(**filled_in))]
    args = parse_args(argv=argv, args_defaults=BERT, environ=launcher_environment(1, 2))
    assert capsys.readouterr().out == ""
    print_old_flags(args)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("--local-rank: ") and second.startswith("--data-impl mmap: ")


@pytest.mark.processes
def test_it_trains_on_two_ranks(filled_in):
    """With the launcher that it uses, which adds --local-rank; a smaller model, fewer steps."""
    smaller = (
        *("--num-layers", "2", "--hidden-size", "64"),
        *("--train-iters", "3", "--lr-decay-iters", "3", "--lr-warmup-fraction", "0"),
        *("--log-interval", "1", "--eval-iters", "1", "--seq-length", "32"),
        *("--initial-loss-scale", "4096", "--save", f"{filled_in['checkpoints']}-of-two"),
        *("--load", f"{filled_in['checkpoints']}-of-two"),
    )
    launcher = ("-m", "torch.distributed.launch", "--nproc_per_node", "2", "--standalone")
    done = subprocess.run(
        [
            *(sys.executable, *launcher, pretrain_bert.__file__),
            *on_gloo(script(**filled_in)),
            *smaller,
        ],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=filled_in["vocab"].rpartition("/")[0],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("--local-rank: taken") == 1
    assert done.stdout.count("--data-impl mmap: the only") == 1
    assert "iteration 3/3" in " ".join(done.stdout.split())
    assert re.search(r"validation loss at iteration 3 .*lm loss \d", done.stdout)
    assert Path(f"{filled_in['checkpoints']}-of-two").is_dir()
