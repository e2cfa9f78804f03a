"""The program of the walk-through that begins with BERT's launch script: providers, forward step.

The script itself, with its launcher, is in `tests.training.test_old_flags`. Here is what the script
starts, written for this test: a model provider of two arguments, a provider of data sets of one, a
forward step that sends each batch to all tensor ranks, and a loss function bound to two tensors.
"""

import importlib
import re
from functools import partial

import pytest
import torch

from minimegatron import pretrain_bert
from minimegatron.core.enums import ModelType
from minimegatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from minimegatron.core.models.bert.bert_model import BertModel
from minimegatron.core.tensor_parallel import broadcast_data
from minimegatron.moved import BEFORE_CORE
from minimegatron.training import get_args, get_timers, print_rank_0
from minimegatron.training.arguments import core_transformer_config_from_args
from minimegatron.training.function_checks import check_chunk, check_datasets
from minimegatron.training.utils import average_losses_across_data_parallel_group
from tests.ranks import run_ranks
from tests.sources.programs import LAYOUTS, run
from tests.training.test_bad_configs import launcher_environment

pytest.importorskip("tokenizers")

KEYS = ["text", "types", "labels", "is_random", "loss_mask", "padding_mask"]
DEFAULTS = {"model_family": "bert", "tokenizer_type": "BertWordPieceLowerCase"}


def model_provider(pre_process=True, post_process=True):
    return make_model(pre_process, post_process)


def model_provider_of_chunks(pre_process=True, post_process=True, vp_stage=None):
    """What the text's provider needs today where a rank has several chunks."""
    return make_model(pre_process, post_process, vp_stage=vp_stage)


def make_model(pre_process, post_process, **which):
    print_rank_0("a BERT")
    args = get_args()
    return BertModel(
        config=core_transformer_config_from_args(args),
        num_tokentypes=2 if args.bert_binary_head else 0,
        transformer_layer_spec=bert_layer_local_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        add_binary_head=args.bert_binary_head,
        share_embeddings_and_output_weights=True,
        parallel_output=True,
        pre_process=pre_process,
        post_process=post_process,
        **which,
    )


def data_provider(train_val_test_num_samples):
    train, valid, test = pretrain_bert.train_valid_test_datasets_provider(
        train_val_test_num_samples
    )
    return train, valid, test


def get_batch(data_iterator):
    sample = next(data_iterator) if data_iterator is not None else None
    found = broadcast_data(KEYS, sample, torch.int64)
    return [
        found[key].float() if key == "loss_mask" else found[key].long()
        for key in ("text", "types", "is_random", "loss_mask", "labels", "padding_mask")
    ]


def loss_func(loss_mask, sentence_order, output_tensor):
    lm_losses, logits = output_tensor
    mask = loss_mask.reshape(-1)
    lm_loss = (lm_losses.float().view(-1) * mask).sum() / mask.sum()
    sop_loss = torch.nn.functional.cross_entropy(
        logits.view(-1, 2).float(), sentence_order.view(-1), ignore_index=-1
    )
    lm_mean, sop_mean = average_losses_across_data_parallel_group([lm_loss, sop_loss])
    return lm_loss + sop_loss, {"lm loss": lm_mean, "sop loss": sop_mean}


def forward_step(data_iterator, model):
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    tokens, types, sentence_order, loss_mask, labels, padding_mask = get_batch(data_iterator)
    timers("batch-generator").stop()
    if not get_args().bert_binary_head:
        types = None
    output_tensor = model(tokens, padding_mask, tokentype_ids=types, lm_labels=labels)
    return output_tensor, partial(loss_func, loss_mask, sentence_order)


def train(layouts):
    """In a rank: what the steps of each layout report."""
    return {
        layout: run(
            LAYOUTS.get(layout, ""),
            data_provider,
            model_provider_of_chunks if layout == "two chunks" else model_provider,
            ModelType.encoder_or_decoder,
            forward_step,
            **DEFAULTS,
        )
        for layout in layouts
    }


def test_it_trains_alike_in_each_layout():
    (alone,) = run_ranks(train, 1, ["alone"], timeout=120)
    *_, last = run_ranks(train, 2, list(LAYOUTS), timeout=200)
    assert len(alone["alone"]) == 2
    first, second = alone["alone"]
    assert first["lm loss"] != second["lm loss"] and set(first) == {"lm loss", "sop loss"}
    for layout, found in last.items():
        for here, there in zip(found, alone["alone"], strict=True):
            assert here == pytest.approx(there, rel=2e-5), layout


# -- Hooks on the nodes of parameters --


@pytest.mark.parametrize("nodes_are_kept", [True, False])
def test_a_hook_on_the_node_of_a_parameter_lives_as_long_as_the_node(nodes_are_kept):
    """What the text's `expand_as` and `grad_accs` are for."""
    param, grad_accs, seen = torch.nn.Parameter(torch.ones(2)), [], []
    assert param.grad_fn is None
    node = param.expand_as(param).grad_fn.next_functions[0][0]
    node.register_hook(lambda *unused: seen.append(param.grad.clone()))
    if nodes_are_kept:
        grad_accs.append(node)
    del node
    for _ in range(2):
        (3 * param).sum().backward()
    assert [grad.tolist() for grad in seen] == ([[3, 3], [6, 6]] if nodes_are_kept else [])
    after = []
    param.register_post_accumulate_grad_hook(lambda param: after.append(param.grad.clone()))
    param.sum().backward()
    assert [grad.tolist() for grad in after] == [[7, 7]]


# -- What cannot be: one sentence, before any process group --


def provider_of_stacks(pre_process, post_process, add_encoder, add_decoder):
    """As an older text has it, for a model of two stacks."""


def provider_without_numbers():
    """A provider of data sets that is not told how many samples are needed."""


def step_of_one(data_iterator):
    """A forward step that is given no model."""


GOOD = (data_provider, model_provider, ModelType.encoder_or_decoder, forward_step)
BAD = {
    "a model provider of stacks": (
        (data_provider, provider_of_stacks, *GOOD[2:]),
        "",
        "the model provider, provider_of_stacks(pre_process, post_process, add_encoder, add_decoder), "
        "is called with pre_process and post_process by name: missing a required argument: "
        "'add_encoder'; let it take these two by name",
    ),
    "no place for the number of the chunk": (
        GOOD,
        LAYOUTS["two chunks"],
        "the model provider, model_provider(pre_process=True, post_process=True), is called with "
        "pre_process and post_process and vp_stage by name: got an unexpected keyword argument "
        "'vp_stage'; let it take these by name: a rank has 2 chunks, and the model is told which by "
        "vp_stage",
    ),
    "data without numbers of samples": (
        (provider_without_numbers, *GOOD[1:]),
        "",
        "the provider of data sets, provider_without_numbers(), is called with 1 by position: too many "
        "positional arguments; let it take one argument, the three numbers of samples",
    ),
    "a step without a model": (
        (*GOOD[:3], step_of_one),
        "",
        "the forward step, step_of_one(data_iterator), is called with 2 by position: too many "
        "positional arguments; let it take two arguments, data_iterator and model",
    ),
    "providers in the wrong order": (
        (model_provider, data_provider, *GOOD[2:]),
        "",
        "the model provider, data_provider(train_val_test_num_samples), is called with pre_process and "
        "post_process by name: missing a required argument: 'train_val_test_num_samples'; let it take "
        "these two by name",
    ),
    "no function": (
        (data_provider, None, *GOOD[2:]),
        "",
        "the model provider is None, which cannot be called; give a function",
    ),
    "places of an older pretrain": (
        (*GOOD, None, {"num_layers": 2}),
        "",
        "extra_args_provider is {'num_layers': 2}, not a function; if these are defaults of arguments, "
        "give them by name, args_defaults=: their place in pretrain is another today",
    ),
    "an extra provider without the parser": (
        (*GOOD, None, provider_without_numbers),
        "",
        "extra_args_provider, provider_without_numbers(), is called with 1 by position: too many "
        "positional arguments; let it take one argument, the parser",
    ),
    "a function for evaluations": (
        (*GOOD, step_of_one),
        "",
        "process_non_loss_data_func, step_of_one(data_iterator), is called with 3 by position: too "
        "many positional arguments; let it take three arguments, data, iteration and writer",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_functions_that_cannot_be_called_are_named_first(name, monkeypatch, capsys):
    functions, flags, sentence = BAD[name]
    num_ranks = 2 if flags else 1
    for key, value in launcher_environment(0, num_ranks).items():
        monkeypatch.setenv(key, value)
    with pytest.raises(SystemExit) as left:
        run(flags, *functions, **DEFAULTS)
    out, err = capsys.readouterr()
    assert left.value.code == 2 and out == ""
    assert err.startswith(f"minimegatron: {sentence}") and err.count("\n") == 1
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("datasets", "words"),
    [
        (None, "returned None; return three"),
        (([], []), "returned 2 values; return three"),
        ((1, None, None), "returned an entry of type int; return three"),
    ],
)
def test_a_provider_gives_three_data_sets(datasets, words):
    with pytest.raises(ValueError, match=words):
        check_datasets(datasets)
    assert check_datasets([[1], None, None]) == ([1], None, None)


def test_a_provider_gives_a_model():
    with pytest.raises(
        ValueError, match="the model provider returned a NoneType; return one module"
    ):
        check_chunk(None)


@pytest.mark.parametrize("name", ["mpu", "get_args", "model", "initialize"])
def test_imports_of_the_text_say_where_it_is_today(name):
    words = re.escape(f"minimegatron.{name} is a name of before Megatron Core; today: ")
    with pytest.raises(ModuleNotFoundError, match=words):
        exec(f"from minimegatron import {name}")
    with pytest.raises(ModuleNotFoundError, match=words):
        importlib.import_module(f"minimegatron.{name}")
    advised = re.findall(r"minimegatron[\w.]+", BEFORE_CORE[name])
    assert advised and all(importlib.import_module(module) for module in advised)
