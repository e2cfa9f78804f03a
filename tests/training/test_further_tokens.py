"""Further tokens in a run: which chunk gets what of a batch, the mask, checkpoints over layouts."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from minimegatron import pretrain_gpt
from minimegatron.convert import hugging_face
from minimegatron.core.transformer import multi_token_prediction
from minimegatron.training import checkpoint_args
from tests.ranks import run_ranks
from tests.training.short_runs import PP2, ZERO1, run


def arguments(num_depths: int | None = 1, **more) -> SimpleNamespace:
    """What is asked of a run's arguments."""
    sizes = {
        "num_layers": 4,
        "mtp_num_layers": num_depths,
        "pipeline_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_model_parallel_layout": "Ett|tt|m|L" if num_depths else None,
        "pipeline_schedule": None,
        "untie_embeddings_and_output_weights": False,
    }
    return SimpleNamespace(**sizes | more)


@pytest.mark.parametrize("num_depths", [None, 1])
def test_which_chunk_gets_what(num_depths, monkeypatch):
    monkeypatch.setattr(pretrain_gpt, "get_args", lambda: arguments(num_depths))
    found = []
    for rank in range(4):
        monkeypatch.setattr(multi_token_prediction, "pipeline_rank", lambda *_, rank=rank: rank)
        (_, first), (_, last), *more = pretrain_gpt.keys_of_chunks()
        ends = (
            ((lambda rank=rank, **_: rank == 0), first),
            ((lambda rank=rank, **_: rank == 3), last),
        )
        with mock.patch.object(pretrain_gpt, "GPT_BATCH_KEYS", ends):
            keys = pretrain_gpt.batch_keys(None, pretrain_gpt.keys_of_chunks())
            assert pretrain_gpt.has_data(None) == bool(keys)
        found.append(keys)
    tokens, labels = ["tokens", "position_ids"], ["labels", "loss_mask"]
    assert found == [tokens, [], tokens if num_depths else [], labels]


def test_which_ranks_hold_the_embedding(monkeypatch):
    for tied, num_depths, wanted in (
        (True, 1, [10, 12, 13]),
        (False, 1, [10, 12]),
        (True, None, [10, 13]),
        (False, None, [10]),
    ):
        args = arguments(num_depths, untie_embeddings_and_output_weights=not tied)
        monkeypatch.setattr(pretrain_gpt, "get_args", lambda args=args: args)
        assert pretrain_gpt.get_embedding_ranks([10, 11, 12, 13]) == wanted


def test_the_model_gets_the_mask(monkeypatch):
    batch = tuple(torch.full((1, 2), float(i)) for i in range(5))
    monkeypatch.setattr(pretrain_gpt, "get_batch", lambda *_: batch)
    timers = mock.MagicMock()
    monkeypatch.setattr(pretrain_gpt, "get_timers", lambda: timers)
    model = mock.MagicMock(vp_stage=None)
    monkeypatch.setattr(pretrain_gpt, "get_attr_wrapped_model", lambda *_: None)
    pretrain_gpt.forward_step(None, model)
    tokens, labels, loss_mask, attention_mask, positions = batch
    (arguments, named) = model.call_args
    assert arguments == (tokens, positions, attention_mask)
    assert named["labels"] is labels and named["loss_mask"] is loss_mask


def test_no_model_of_hugging_face_has_such_layers():
    with pytest.raises(ValueError, match="mtp_num_layers 2, and no model of Hugging Face"):
        hugging_face._family_of({"mtp_num_layers": 2})


def test_a_checkpoint_of_another_number_of_them():
    differs = partial(checkpoint_args._difference, "mtp_num_layers", folder=Path("run"))
    flag = "--mtp-num-layers"
    assert differs(2, None) == f"{flag} is 2, but not given in the checkpoint run; drop {flag}"
    assert differs(None, 2) == f"{flag} is not given, but 2 in the checkpoint run; use {flag} 2"


SAME = "--mtp-num-layers 2 --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0"


def runs(folder: str) -> dict[str, list[float]]:
    """Losses of four steps; in the last two runs a checkpoint and another layout lie between."""
    layout = "--pipeline-model-parallel-layout"
    found = {"copies": run(SAME, 4)["losses"]}
    first = run(f"{SAME} {PP2} --save {folder}", 2)["losses"]
    rest = run(f"{SAME} {PP2} {layout} Ett|ttmmL {ZERO1} --load {folder}", 4)["losses"]
    found["two stages, then a layout"] = first + rest
    rest = run(f"{SAME} {ZERO1} --load {folder}", 4)["losses"]
    found["two stages, then copies"] = first + rest
    return found


def test_runs_of_any_layout_have_the_same_losses(tmp_path):
    for found in run_ranks(partial(runs, str(tmp_path)), 2, timeout=120):
        wanted = found.pop("copies")
        assert len(wanted) == 4 and wanted[3] < wanted[0]
        for name, losses in found.items():
            assert losses == pytest.approx(wanted, abs=2e-5), name
