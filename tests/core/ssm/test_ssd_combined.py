"""The scan: by hand, chunks against the recurrence with all gradients, and what it does not do."""

import math
from functools import partial

import pytest
import torch

from minimegatron.core.ssm.ops.causal_conv1d import causal_conv1d
from minimegatron.core.ssm.ops.ssd_combined import (
    mamba_chunk_scan_combined,
    mamba_recurrence,
    segment_sums,
)

HEADS, GROUPS, P, N = 4, 2, 3, 5


def inputs(length: int, dtype: torch.dtype = torch.float64, batch: int = 2) -> dict:
    """Of a scan, by argument; and a state to begin with."""
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "x": draw(batch, length, HEADS, P),
        "dt": draw(batch, length, HEADS).exp() / 4,
        "A": -draw(HEADS).exp(),
        "B": draw(batch, length, GROUPS, N),
        "C": draw(batch, length, GROUPS, N),
        "initial_states": draw(batch, HEADS, P, N),
    }


def gradients(scan, given: dict, **options) -> dict[str, torch.Tensor]:
    """What the scan returns, and the gradients of all that it was given, where all outputs count."""
    leaves = {name: value.clone().requires_grad_() for name, value in given.items()}
    y, state = scan(**leaves, return_final_states=True, **options)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(each.shape, generator=generator, dtype=y.dtype) for each in (y, state)]
    ((y * weights[0]).sum() + (state * weights[1]).sum()).backward()
    found = {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}
    return found | {"y": y.detach(), "state": state.detach()}


SCANS = pytest.mark.parametrize(
    "scan",
    [mamba_recurrence, partial(mamba_chunk_scan_combined, chunk_size=2)],
    ids=("recurrence", "chunks"),
)


@SCANS
def test_three_tokens_by_hand(scan):
    """One head, P = N = 1. The state halves for each unit of time: A = -log 2."""
    A = torch.tensor([-math.log(2.0)], dtype=torch.float64)
    x, dt, B, C = (
        torch.tensor(values, dtype=torch.float64)
        for values in ([8.0, 4.0, 2.0], [1.0, 2.0, 1.0], [1.0, 3.0, 5.0], [1.0, 1.0, 10.0])
    )
    y, state = scan(
        x.view(1, 3, 1, 1),
        dt.view(1, 3, 1),
        A,
        B.view(1, 3, 1, 1),
        C.view(1, 3, 1, 1),
        return_final_states=True,
    )
    # S_1 = 1 x 8 x 1; S_2 = 8/4 + 2 x 4 x 3; S_3 = 26/2 + 1 x 2 x 5.
    assert y.flatten().tolist() == pytest.approx([8.0, 26.0, 230.0], abs=1e-12)
    assert state.item() == pytest.approx(23.0, abs=1e-12)


@pytest.mark.parametrize("length", [1, 7, 32])
@pytest.mark.parametrize("chunk_size", [1, 4, 5, 8, 32, 100])
def test_chunks_equal_the_recurrence_with_all_gradients(length, chunk_size):
    given = inputs(length)
    wanted = gradients(mamba_recurrence, given)
    found = gradients(mamba_chunk_scan_combined, given, chunk_size=chunk_size)
    off = {name: (found[name] - wanted[name]).abs().max().item() for name in wanted}
    assert max(off.values()) < 1e-12, off


@SCANS
def test_without_a_state_it_begins_with_zeros(scan):
    given = inputs(6)
    given["initial_states"] = torch.zeros_like(given["initial_states"])
    with_zeros = scan(**given)
    del given["initial_states"]
    assert torch.equal(scan(**given), with_zeros)


@SCANS
def test_a_sequence_in_two_parts_is_the_sequence(scan):
    """The state is all that the second part knows of the first."""
    given = inputs(10)
    whole, last = scan(**given, return_final_states=True)
    parts, state = [], given.pop("initial_states")
    A = given.pop("A")
    for part in (slice(0, 6), slice(6, 10)):
        cut = {name: value[:, part] for name, value in given.items()}
        y, state = scan(**cut, A=A, initial_states=state, return_final_states=True)
        parts.append(y)
    assert (torch.cat(parts, dim=1) - whole).abs().max() < 1e-13
    assert (state - last).abs().max() < 1e-13


@SCANS
def test_the_state_does_not_grow_with_the_sequence(scan):
    sizes = set()
    for length in (1, 8, 64):
        _, state = scan(**inputs(length), return_final_states=True)
        sizes.add((state.shape, state.numel()))
    assert sizes == {((2, HEADS, P, N), 2 * HEADS * P * N)}


def test_long_chunks_that_decay_fast_do_not_overflow():
    """exp(-sum) of the whole chunk would be exp(2000): infinite in float32, as a factor."""
    given = inputs(200, torch.float32, batch=1)
    given |= {"A": torch.full((HEADS,), -10.0), "dt": torch.ones_like(given["dt"])}
    found = gradients(mamba_chunk_scan_combined, given, chunk_size=200)
    wanted = gradients(mamba_recurrence, given)
    for name, value in found.items():
        assert value.isfinite().all(), name
        scale = wanted[name].abs().max().clamp(min=1.0)
        assert ((value - wanted[name]).abs().max() / scale) < 1e-5, name


def test_small_parts_of_long_sums_keep_their_digits():
    """A difference of running sums near 30 000 would be wrong by a thousandth in float32."""
    a = torch.full((64,), -1000.0)
    a[60:] = -1e-3
    sums = segment_sums(a)
    assert sums[63, 60].item() == pytest.approx(-3e-3, rel=1e-6)


def test_the_convolution_is_that_of_torch_with_the_future_cut_off():
    generator = torch.Generator().manual_seed(3)
    x, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((9, 2, 6), (6, 1, 4), (6,))
    )
    wanted = torch.nn.functional.conv1d(x.permute(1, 2, 0), weight, bias, padding=3, groups=6)
    found = causal_conv1d(x, weight, bias)
    assert (found - wanted[..., :9].permute(2, 0, 1)).abs().max() < 1e-14
    changed = x.clone()
    changed[5] += 1.0
    assert torch.equal(causal_conv1d(changed, weight, bias)[:5], found[:5])
