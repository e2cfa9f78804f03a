"""What the benchmarked pipelines compute: the same plain-torch stages for every implementation.

Read by: `peers` (which wraps a chunk as each implementation expects it), `step_time`, `paced`.
Two kinds: real transformer blocks, whose work competes for the cores, and paced stages, which sleep
for a fixed time and so leave the cores free, the way a stage on its own device would.
"""

import statistics
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Case:
    """One pipeline to time. A message holds seq_length x 1 x hidden_size float32 values."""

    label: str
    num_stages: int
    num_chunks: int
    num_microbatches: int
    seq_length: int
    hidden_size: int
    num_blocks: int = 0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0

    @property
    def is_paced(self) -> bool:
        return self.num_blocks == 0

    @property
    def num_virtual_stages(self) -> int:
        return self.num_stages * self.num_chunks

    @property
    def message_shape(self) -> tuple[int, int, int]:
        return (self.seq_length, 1, self.hidden_size)

    @property
    def ideal_factor(self) -> float:
        """(M v + p - 1) / (M v): what the fill and drain add to the work of one stage."""
        slots = self.num_microbatches * self.num_chunks
        return (slots + self.num_stages - 1) / slots

    @property
    def paced_ideal_seconds(self) -> float:
        """(M v + p - 1)(tF + tB), with tF and tB the times of one chunk."""
        slots = self.num_microbatches * self.num_chunks + self.num_stages - 1
        return slots * (self.forward_seconds + self.backward_seconds)


class Block(nn.Module):
    """A pre-norm transformer block in plain torch; [s, b, h] in and out."""

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(hidden_size)
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)
        self.norm2 = nn.LayerNorm(hidden_size)
        self.fc1 = nn.Linear(hidden_size, 4 * hidden_size)
        self.fc2 = nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s, b, h = x.shape
        qkv = self.qkv(self.norm1(x)).view(s, b, 3, self.num_heads, h // self.num_heads)
        q, k, v = qkv.permute(2, 1, 3, 0, 4)
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(context.permute(2, 0, 1, 3).reshape(s, b, h))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class _Paced(torch.autograd.Function):
    """x + weight, forwards and backwards padded with sleep to a fixed length."""

    @staticmethod
    def forward(ctx, x, weight, stage, start):
        ctx.stage = stage
        y = x + weight
        stage.sleep_until(start + stage.forward_seconds - stage.forward_lateness)
        return y

    @staticmethod
    def backward(ctx, grad):
        stage, start = ctx.stage, time.perf_counter()
        # Accumulated here, within the padded time, instead of by autograd after it.
        stage.weight.grad += grad.sum()
        grad_x = grad.clone()
        stage.sleep_until(start + stage.backward_seconds - stage.backward_lateness)
        return grad_x, None, None, None


class PacedStage(nn.Module):
    """A stage that takes a fixed time and almost no processor. One weight, so that it can learn.

    A sleep ends late, and autograd takes its time before and after: by a few tenths of a
    millisecond a stage on its own is late. `calibrate` measures that and takes it off, so that a
    forward of 10 ms takes its caller 10 ms, and what is left over the ideal is the schedule's.
    """

    def __init__(self, forward_seconds: float, backward_seconds: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.weight.grad = torch.zeros(1)
        self.forward_seconds = forward_seconds
        self.backward_seconds = backward_seconds
        self.forward_lateness = self.backward_lateness = 0.0

    @staticmethod
    def sleep_until(end: float) -> None:
        remaining = end - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Paced.apply(x, self.weight, self, time.perf_counter())

    def calibrate(self, shape: tuple[int, ...], repetitions: int = 11) -> None:
        """Sets the usual lateness of each direction, the medians of a stage alone."""
        forwards, backwards = [], []
        for _ in range(repetitions + 1):
            x, grad = torch.zeros(shape, requires_grad=True), torch.zeros(shape)
            start = time.perf_counter()
            y = self(x)
            middle = time.perf_counter()
            torch.autograd.backward(y, grad)
            forwards.append(middle - start - self.forward_seconds)
            backwards.append(time.perf_counter() - middle - self.backward_seconds)
        # The first backward of a process starts autograd.
        self.forward_lateness = statistics.median(forwards[1:])
        self.backward_lateness = statistics.median(backwards[1:])


def build_chunk(case: Case, virtual_stage: int) -> nn.Module:
    """The part of the model on `virtual_stage`, with the same weights whoever runs it."""
    torch.manual_seed(1000 + virtual_stage)
    if case.is_paced:
        stage = PacedStage(case.forward_seconds, case.backward_seconds)
        stage.calibrate(case.message_shape)
        return stage
    num_blocks = case.num_blocks // case.num_virtual_stages
    num_heads = max(1, case.hidden_size // 64)
    return nn.Sequential(*(Block(case.hidden_size, num_heads) for _ in range(num_blocks)))


def build_inputs(case: Case) -> torch.Tensor:
    """All microbatches, stacked along the sequence: [M * s, 1, h]."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(
        case.num_microbatches * case.seq_length, 1, case.hidden_size, generator=generator
    )


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """A loss that needs no labels. One row is enough: a loss is not what is being measured."""
    return output[0].square().mean()
