"""The scan of a state-space layer: each token writes to a state, and reads what earlier ones wrote.

Megatron has no counterpart; it calls kernels for the GPU, those of the package mamba_ssm.

A head's state S has P rows and N columns. Token t lets it decay, adds its own part, and reads:

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T        y_t = S_t C_t

`mamba_recurrence` is this definition, token after token. `mamba_chunk_scan_combined` computes the same
in matrix products, chunk after chunk (Dao and Gu 2024, https://arxiv.org/abs/2405.21060): it runs.

Both take x [b, s, n, P]; dt [b, s, n], positive; A [n], negative; B and C [b, s, G, N], where each of
the G groups serves n/G heads, neighbours. Both return y [b, s, n, P], and on request the last state,
[b, n, P, N], which does not grow with s. They work in the dtype that they are given.
"""

import torch
import torch.nn.functional as F

Scanned = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def mamba_recurrence(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
) -> Scanned:
    """The definition; see above.

    Args:
        initial_states: [b, n, P, N], the state before the first token; None for zeros.
        return_final_states: return (y, last state), not y alone.
    """
    heads_per_group = x.size(2) // B.size(2)
    B, C = (each.repeat_interleave(heads_per_group, dim=2) for each in (B, C))
    decay = torch.exp(dt * A)
    state = initial_states
    if state is None:
        state = x.new_zeros(x.size(0), x.size(2), x.size(3), B.size(3))
    outputs = []
    for t in range(x.size(1)):
        written = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
        state = decay[:, t, :, None, None] * state + written
        outputs.append((state @ C[:, t, :, :, None]).squeeze(-1))
    y = torch.stack(outputs, dim=1)
    return (y, state) if return_final_states else y


def segment_sums(a: torch.Tensor) -> torch.Tensor:
    """[..., Q] -> [..., Q, Q]: entry (i, j) is the sum of a over k = j+1 .. i; -inf for j > i.

    Each is summed by itself: the exponential of a difference of running sums loses digits, and that of
    their ratio overflows, once a chunk is long and decays fast.

    >>> segment_sums(torch.tensor([1.0, 2.0, 4.0])).tolist()
    [[0.0, -inf, -inf], [2.0, 0.0, -inf], [6.0, 4.0, 0.0]]
    """
    ones = torch.ones(a.size(-1), a.size(-1), dtype=torch.bool, device=a.device)
    rows = a.unsqueeze(-1).expand(*a.shape, a.size(-1)).masked_fill(~ones.tril(-1), 0.0)
    return rows.cumsum(dim=-2).masked_fill(~ones.tril(), -torch.inf)


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    *,
    initial_states: torch.Tensor | None = None,
    return_final_states: bool = False,
) -> Scanned:
    """The same as `mamba_recurrence`, by chunks of `chunk_size` tokens.

    Inside a chunk it is attention without softmax: C_i B_j^T, times how much has decayed from j to i.
    From chunk to chunk the state is handed on. A last chunk that is not full is filled with tokens of
    dt = 0, which neither decay nor write.
    """
    b, s, n, P = x.shape
    G, N = B.shape[2:]
    Q = min(chunk_size, s)
    missing = -s % Q
    dt = F.pad(dt, (0, 0, 0, missing))
    x, B, C = (F.pad(each, (0, 0, 0, 0, 0, missing)) for each in (x, B, C))
    # -- One chunk is one matrix: [b, chunks, G, heads of the group, Q, features] --
    written = (x * dt[..., None]).view(b, -1, Q, G, n // G, P).permute(0, 1, 3, 4, 2, 5)
    a = (dt * A).view(b, -1, Q, G, n // G).permute(0, 1, 3, 4, 2)
    B, C = (each.view(b, -1, Q, G, 1, N).permute(0, 1, 3, 4, 2, 5) for each in (B, C))

    # -- Inside each chunk, all at once --
    decay = torch.exp(segment_sums(a))
    y = (C @ B.transpose(-1, -2) * decay) @ written
    left = (decay[..., -1, :, None] * written).transpose(
        -1, -2
    ) @ B  # at the chunk's end, [.., P, N]

    # -- From chunk to chunk --
    since_start = torch.exp(a.cumsum(dim=-1))
    state = left.new_zeros(left[:, 0].shape)
    if initial_states is not None:
        state = initial_states.view(state.shape)
    before = []
    for chunk in range(left.size(1)):
        before.append(state)
        state = since_start[:, chunk, ..., -1, None, None] * state + left[:, chunk]
    y = y + since_start[..., None] * (C @ torch.stack(before, dim=1).transpose(-1, -2))
    y = y.permute(0, 1, 4, 2, 3, 5).reshape(b, -1, n, P)[:, :s]
    return (y, state.reshape(b, n, P, N)) if return_final_states else y
