"""What layers of a hybrid model cost: time of each kind, parameters, activations, the state.

Megatron has no counterpart.

Letters as in `memory`; n heads of P features in G groups, with a state of N columns; e = nP; chunks of
Q tokens. A Mamba layer's activations grow with s, those of attention also with a s². The state of one
layer is b n P N numbers for a sequence of any length: it is what would be kept to write text.

"""

from minimegatron.core.ssm.mamba_config import MambaSizes
from minimegatron.core.ssm.mamba_hybrid_layer_allocation import allocate_layers
from minimegatron.core.transformer.pipeline_parallel_layer_layout import (
    PipelineParallelLayerLayout,
)
from minimegatron.planner.memory import Bytes


def named_layers(layout: PipelineParallelLayerLayout, pattern: str) -> list[list[list[str]]]:
    """The names of a layout's layers, [rank][chunk], with a decoder layer's letter for its name.

    For `Costs.from_layout`, with times for each letter. Raises ValueError for a pattern that is not of
    as many letters as the layout has decoder layers, or that has letters which are not known.

    >>> layout = PipelineParallelLayerLayout.from_str("Et|ttL", 2)
    >>> named_layers(layout, "M*-")
    [[['embedding', 'M']], [['*', '-', 'loss']]]
    """
    named = [[[layer.name for layer in chunk] for chunk in chunks] for chunks in layout.layout]
    number = sum(names.count("decoder") for chunks in named for names in chunks)
    letters = iter(allocate_layers(number, override_pattern=pattern))
    for rank, chunk in map(layout.placement.place_of, range(layout.placement.num_stages)):
        names = named[rank][chunk]
        named[rank][chunk] = [next(letters) if name == "decoder" else name for name in names]
    return named


def num_mamba_parameters(
    hidden_size: int, sizes: MambaSizes, d_conv: int = 4, norm_has_bias: bool = True
) -> int:
    """Parameters of one Mamba layer with the norm before it, before tensor parallelism divides them.

    Two projections, the convolution of x, B and C with biases, three numbers per head, a norm of e.

    >>> num_mamba_parameters(64, MambaSizes(num_heads=8, head_dim=16, num_groups=2, state_dim=16))
    30424
    """
    n, P, G, N = sizes
    h, e = hidden_size, n * P
    projections = h * (2 * e + 2 * G * N + n) + e * h
    convolution = (e + 2 * G * N) * (d_conv + 1)
    return projections + convolution + 3 * n + e + h * (1 + norm_has_bias)


def mamba_state_bytes(
    micro_batch_size: int,
    sizes: MambaSizes,
    tensor_parallel_size: int = 1,
    bytes_per_element: int = 4,
) -> Bytes:
    """The state of one layer on one rank: b n/t P N numbers, however long the sequence is.

    >>> mamba_state_bytes(1, MambaSizes(num_heads=32, head_dim=64, num_groups=8, state_dim=128))
    1048576
    """
    n, P, _, N = sizes
    return micro_batch_size * n // tensor_parallel_size * P * N * bytes_per_element


def scan_elements(
    seq_length: int,
    micro_batch_size: int,
    sizes: MambaSizes,
    chunk_size: int | None,
    tensor_parallel_size: int = 1,
) -> int:
    """Decays inside chunks and states between them: of what a scan keeps for backward, once each.

    In chunks: for each of n/t heads, a matrix [Q, Q] per chunk, and a state. Token after token (None):
    a state per token, Q P N / (Q² + P N) times as much, once s fills a chunk. Both grow with s;
    attention that keeps its scores grows with a s². What `mamba_chunk_scan_combined` keeps in all is
    several times as much: also its inputs, and products of as many numbers.

    >>> sizes = MambaSizes(num_heads=2, head_dim=64, num_groups=1, state_dim=128)
    >>> scan_elements(512, 1, sizes, 128), scan_elements(512, 1, sizes, None)
    (196608, 8388608)
    """
    n, P, _, N = sizes
    heads = micro_batch_size * n // tensor_parallel_size
    if chunk_size is None:
        return heads * seq_length * P * N
    Q = min(chunk_size, seq_length)
    return heads * -(-seq_length // Q) * (Q * Q + P * N)
