"""The toy model for `tests.parity`, with the microbatches of GPT."""

from functools import partial

from tests.parity import VOCAB, ModelUnderTest, batches, loss_func
from tests.toy_model import ConvolutionModel


def build_chunk(case, config, groups, first, last, vp_stage) -> ConvolutionModel:
    return ConvolutionModel(config, VOCAB, groups, first, last, vp_stage)


def step(data_iterator, model):
    batch = next(data_iterator)
    output = model(batch["tokens"], None, None, labels=batch["labels"])
    return output, partial(loss_func, batch["mask"])


MODEL = ModelUnderTest(build_chunk, batches, step, is_tied=lambda case: False)
