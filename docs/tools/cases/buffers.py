"""Which buffers six parameters of two kinds get: the small case that older texts have.

Called by: `cases`, for pages. Calls: the package's wrapper, with a group of one.
"""

import torch

from minimegatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from minimegatron.core.process_groups_config import ProcessGroupCollection
from minimegatron.core.transformer.transformer_config import TransformerConfig
from pictures import pictures

SIZES = {"a": 400, "b": 300, "c": 300, "d": 250, "e": 250, "f": 100}
IN_FP16 = "bde"
WORDS = {torch.float32: ("fp32", 6), torch.float16: ("fp16", 7)}
"""And the hue that stands for it."""


class _Alone:
    """A group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def _model() -> torch.nn.Module:
    model = torch.nn.Module()
    for name, size in SIZES.items():
        dtype = torch.float16 if name in IN_FP16 else torch.float32
        setattr(model, name, torch.nn.Parameter(torch.zeros(size, dtype=dtype)))
    return model


def _buffers(grad_reduce_in_fp32: bool) -> tuple[dict, list]:
    """The parameters by name, and the buffers that they got."""
    alone = _Alone()
    groups = ProcessGroupCollection(dp_cp=alone, pp=alone, tp=alone)
    config = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=grad_reduce_in_fp32)
    model = _model()
    wrapped = DistributedDataParallel(config, ddp_config, model, pg_collection=groups)
    return dict(model.named_parameters()), wrapped.buffers


def figure() -> str:
    """Gradients in their buffers, one buffer after another, and the kind of number in each."""
    named, buffers = _buffers(grad_reduce_in_fp32=False)
    _, in_fp32 = _buffers(grad_reduce_in_fp32=True)
    gradients, kinds, wide_kinds, begin = [], [], [], 0
    for buffer, wide in zip(buffers, in_fp32, strict=True):
        for param, (start, end, _) in buffer.param_index_map.items():
            name = next(name for name, found in named.items() if found is param)
            gradients.append((begin + start, begin + end, name, list(SIZES).index(name)))
        place = (begin, begin + buffer.numel)
        kinds.append((*place, *WORDS[buffer.grad_dtype]))
        wide_kinds.append((*place, *WORDS[wide.grad_dtype]))
        begin += buffer.numel
    rows = [
        ("gradients", sorted(gradients)),
        ("buffers", kinds),
        ("summed in fp32", wide_kinds),
    ]
    return pictures.strip_picture(rows, begin, "elements")


def count(grad_reduce_in_fp32: bool) -> int:
    """How many buffers the six parameters get."""
    return len(_buffers(grad_reduce_in_fp32)[1])


def count_by_gradient(grad_reduce_in_fp32: bool) -> int:
    """How many there would be with one for each kind of gradient, whatever the parameters are."""
    return len({buffer.grad_dtype for buffer in _buffers(grad_reduce_in_fp32)[1]})
