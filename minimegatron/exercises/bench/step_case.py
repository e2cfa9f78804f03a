"""The ways of cutting a small model's step that a check, or a lab, can ask for.

Torch-free. Megatron has no counterpart.
"""

from dataclasses import asdict, dataclass
from typing import Any

from minimegatron.core.rank_generator import DEFAULT_ORDER

VOCAB, SEQ, MICRO_BATCH, HIDDEN, HEADS = 16, 4, 2, 16, 2


@dataclass(frozen=True)
class StepCase:
    """One way of cutting the step; the data-parallel size is what remains of the world."""

    tp: int = 1
    pp: int = 1
    vp: int | None = None
    num_microbatches: int = 2
    """Of each data-parallel replica."""
    num_layers: int = 0
    """0 for one layer per virtual stage."""
    seed: int = 0
    """Of weights and data."""
    family: str = "gpt"
    """Which model: "gpt", "bert", "t5" or "mamba"; "policy" is a GPT that learns from rewards."""
    tied: bool = True
    order: str = DEFAULT_ORDER
    """How ranks are numbered, as `initialize_model_parallel` takes it."""
    swiglu: bool = False
    sequence_parallel: bool = False
    per_token: bool = False
    overlap_grad_reduce: bool = False
    distributed_optimizer: bool = False
    clip_grad: float = 0.0
    loss_scale: float | None = None
    """A first dynamic loss scale; None for no scaling."""
    loss_scale_window: int = 2
    hysteresis: int = 2
    # -- Experts --
    num_experts: int = 0
    """Of every layer; 0 for MLPs."""
    ep: int = 1
    etp: int | None = None
    """None for tp."""
    topk: int = 2
    dispatcher: str = "alltoall"
    balance: str = "none"
    """The loss that keeps experts balanced; one process must find the same of it."""
    overlap_moe: bool = False
    """Combined 1F1B: a forward beside each backward, layer by layer."""
    # -- Ranks that share sequences; further tokens --
    cp: int = 1
    comm: str = "p2p"
    """How attention gets the keys of other ranks: `cp_comm_type`."""
    mtp: int = 0
    """Depths: how many tokens after the next one are predicted."""
    rope: bool = False
    """Positions by rotation, as always with `mtp`; else from a table."""

    # -- Steps that run again --
    rerun: bool = False
    """The first run comes out wrong on one rank. One process computes the step once."""
    dropout: float = 0.0
    """Of hidden states. Only one rank draws what one process draws."""

    # -- Other families --
    split: int | None = None
    """T5's first decoder stage."""
    pattern: str | None = None
    """Mamba's letters, one for each layer."""

    @property
    def values(self) -> dict[str, Any]:
        """The fields, as a `Case` carries them."""
        return asdict(self)

    @property
    def layers(self) -> int:
        """Transformer layers of the whole model."""
        return self.num_layers or self.pp * (self.vp or 1)
