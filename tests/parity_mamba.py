"""Mamba and its hybrids in the parity harness, and the cases. Used by tests/test_parity_mamba.py.

A chunk of the scan has 3 of the 8 tokens, so states pass from chunk to chunk, and the last one is not
full.
"""

from dataclasses import replace
from functools import cache
from typing import Any

from minimegatron.core.models.mamba.mamba_layer_specs import get_mamba_stack_spec
from minimegatron.core.models.mamba.mamba_model import MambaModel
from minimegatron.core.transformer.spec_utils import ModuleSpec
from minimegatron.core.transformer.transformer_config import TransformerConfig
from tests.covering import Row, Rule, Space, covering_array
from tests.parity import SEQ, VOCAB, Case, ModelUnderTest, batches, forward_step_func

MAMBA_SIZES = {"mamba_head_dim": 4, "mamba_num_groups": 4, "mamba_state_dim": 8}


def stack_spec(chunk_size: int | None = 3) -> ModuleSpec:
    """The stack's, with so many tokens in a chunk of the scan."""
    spec = get_mamba_stack_spec()
    layer = spec.submodules.mamba_layer
    mixer = replace(layer.submodules.mixer, params={"chunk_size": chunk_size})
    layer = replace(layer, submodules=replace(layer.submodules, mixer=mixer))
    return replace(spec, submodules=replace(spec.submodules, mamba_layer=layer))


def build_mamba(
    case: Case,
    config: TransformerConfig,
    groups: Any,
    first: bool,
    last: bool,
    vp_stage: int | None,
) -> MambaModel:
    return MambaModel(
        config,
        stack_spec(),
        VOCAB,
        SEQ,
        pre_process=first,
        hybrid_override_pattern=case.pattern,
        post_process=last,
        parallel_output=case.logits != "gathered",
        share_embeddings_and_output_weights=not case.llama,
        position_embedding_type="rope" if case.llama else "none",
        pg_collection=groups,
        vp_stage=vp_stage,
    )


MODEL = ModelUnderTest(
    build_mamba, batches, forward_step_func, config_fields=lambda case: MAMBA_SIZES
)

# -- Every pair of options --

SPACE = Space(
    {
        "world": (2, 4),
        "pattern": ("M", "M*", "M*-", "-M"),
        "tp": (1, 2, 4),
        "pp": (1, 2),
        "dp": (1, 2),
        "vp": (None, 2),
        "M": (1, 3),
        "llama": (False, True),
        "sp": (False, True),
        "planned": (False, True),
        "deallocate": (False, True),
        "recompute": (None, "selective", "full"),
        "dist_opt": (False, True),
        "overlap_grad_reduce": (False, True),
        "overlap_param_gather": (False, True),
        "per_token": (False, True),
        "delay_wgrad": (False, True),
        "evaluates_in": (None, "no_grad", "inference_mode"),
        "fails": (False, True),
        "frozen": (None, "embedding", "all but middle layer", "all but low rank"),
        "weights": (False, True),
        "logits": (None, "gathered"),
        "dtype": ("float64", "float32"),
    },
    [
        Rule(("world", "tp", "pp", "dp"), lambda world, tp, pp, dp: world == tp * pp * dp),
        Rule(("pp", "vp"), lambda pp, vp: vp is None or pp > 1),
        Rule(("tp", "sp"), lambda tp, sp: not sp or tp > 1),
        Rule(("dp", "dist_opt"), lambda dp, dist_opt: not dist_opt or dp > 1),
        Rule(("dist_opt", "overlap_param_gather"), lambda zero, gather: zero >= gather),
        Rule(
            ("overlap_grad_reduce", "overlap_param_gather"), lambda reduce, gather: reduce >= gather
        ),
    ],
)
"""`pattern` is repeated until every chunk has a layer."""


@cache
def pairwise_rows() -> list[Row]:
    """Rows of `SPACE` in which every two values that may meet do meet."""
    return covering_array(SPACE, cost=lambda row: case_of(row).cost)


def case_of(row: Row) -> Case:
    """A row of `SPACE` as a case."""
    p, vp = row["pp"], row["vp"]
    options = {name: value for name, value in row.items() if name != "world"}
    number = -(-len(row["pattern"]) // (p * (vp or 1))) * p * (vp or 1)
    options |= {"model": "mamba", "num_layers": number}
    options |= {"pattern": (row["pattern"] * number)[:number]}
    if vp is not None:
        options |= {"G": p, "M": p * (1 if row["M"] == 1 else 2), "batched": False}
    return Case(**options)


NAMED_CASES = {
    "sections, alone": Case(tp=2, M=1, num_layers=1, pattern="M"),
    "every second stage is no transformer": Case(pp=2, M=3, num_layers=2, pattern="M*"),
    "a layout of the usual letters": Case(
        pp=2, vp=2, G=2, M=4, batched=False, layout="Et|tt|t|tL", num_layers=5, pattern="M*-MM"
    ),
    "overlapped messages": Case(
        pp=2,
        vp=2,
        G=2,
        M=4,
        batched=False,
        overlap=True,
        deallocate=True,
        pattern="M*M-",
        num_layers=4,
    ),
}
"""By what is said of them."""


def all_cases() -> list[Case]:
    """What `make test` compares."""
    named = [replace(case, model="mamba") for case in NAMED_CASES.values()]
    return [*map(case_of, pairwise_rows()), *named]
