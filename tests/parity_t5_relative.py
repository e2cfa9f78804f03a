"""T5 with relative positions for `tests.parity`: all else is as in `tests.parity_t5`."""

import dataclasses
from typing import Any

from minimegatron.core.models.T5.t5_model import T5Model
from minimegatron.core.models.T5.t5_spec import (
    decoder_model_with_local_spec,
    encoder_model_with_local_spec,
)
from tests import parity_t5
from tests.parity import VOCAB, Case


def build_chunk(case: Case, config: Any, groups: Any, *_: Any) -> T5Model:
    return T5Model(
        config,
        config,
        encoder_model_with_local_spec(has_bias=True),
        decoder_model_with_local_spec(has_bias=True),
        VOCAB,
        parity_t5.S_ENC,
        share_embeddings_and_output_weights=not case.llama,
        position_embedding_type="relative",
        relative_attention_num_buckets=8,
        relative_attention_max_distance=10,
        pg_collection=groups,
    )


MODEL = dataclasses.replace(parity_t5.MODEL, build_chunk=build_chunk)
