"""Vocabulary-parallel cross-entropy equals torch's, whatever the cut."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from minimegatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tests.groups import PretendGroup
from tests.ranks import run_ranks

SEQUENCE, BATCH, VOCABULARY = 5, 3, 24


def _sample(scale: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shape = (SEQUENCE, BATCH)
    logits = torch.randn(*shape, VOCABULARY, generator=generator, dtype=torch.float64) * scale
    target = torch.randint(VOCABULARY, shape, generator=generator)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    return logits.to(dtype), target, weight


def _torch_loss(logits, target, label_smoothing):
    """torch spreads e over all V classes, Megatron over the V - 1 others."""
    spread = label_smoothing * VOCABULARY / (VOCABULARY - 1)
    flat = F.cross_entropy(
        logits.flatten(0, 1), target.flatten(), reduction="none", label_smoothing=spread
    )
    return flat.view(SEQUENCE, BATCH)


def compare(group=None) -> list[tuple[str, float]]:
    """(case, largest difference in loss and gradient) for each case."""
    group = group or dist.group.WORLD
    share = VOCABULARY // group.size()
    mine = slice(group.rank() * share, (group.rank() + 1) * share)
    errors = []
    for label_smoothing in (0.0, 0.1):
        # At scale 300, exp overflows unless the maximum is taken off first.
        for scale in (1.0, 300.0):
            logits, target, weight = _sample(scale, torch.float64)
            whole = logits.clone().requires_grad_()
            expected = _torch_loss(whole, target, label_smoothing)
            (expected * weight).sum().backward()
            cut = logits[..., mine].clone().requires_grad_()
            loss = vocab_parallel_cross_entropy(cut, target, label_smoothing, group)
            (loss * weight).sum().backward()
            case = f"label_smoothing={label_smoothing} scale={scale}"
            errors.append((f"{case} loss", (loss - expected).abs().max().item() / scale))
            errors.append((f"{case} grad", (cut.grad - whole.grad[..., mine]).abs().max().item()))
    return errors


@pytest.mark.parametrize("size", [2, 4])
def test_equals_torch_when_cut(size):
    for rank, errors in enumerate(run_ranks(compare, size)):
        for case, error in errors:
            assert error < 1e-12, f"{case} on rank {rank} of {size}: off by {error}"


def test_equals_torch_whole():
    for case, error in compare(PretendGroup()):
        assert error < 1e-12, f"{case}: off by {error}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_loss_is_float32_for_smaller_logits(dtype):
    logits, target, _ = _sample(1.0, dtype)
    before = logits.clone()
    logits.requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, target, tp_group=PretendGroup())
    loss.sum().backward()
    assert loss.dtype == torch.float32
    assert logits.grad.dtype == dtype
    assert torch.equal(logits.detach(), before)
    expected = _torch_loss(logits.detach().float(), target, 0.0)
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-6, atol=1e-6)


def test_gradcheck():
    logits, target, _ = _sample(1.0, torch.float64)
    logits.requires_grad_()
    for label_smoothing in (0.0, 0.2):
        assert torch.autograd.gradcheck(
            lambda x, e=label_smoothing: vocab_parallel_cross_entropy(x, target, e, PretendGroup()),
            (logits,),
        )


def test_label_smoothing_must_be_a_share():
    with pytest.raises(ValueError, match=r"label_smoothing is 1\.5"):
        vocab_parallel_cross_entropy(torch.zeros(1, 2), torch.zeros(1).long(), 1.5, PretendGroup())
