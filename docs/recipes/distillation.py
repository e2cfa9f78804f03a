"""A small GPT learns from a frozen one over two stages: `torchrun --nproc-per-node 2 distillation.py`.

A stage sends both hidden states in one message, and `adjust_tensor_shapes_fn` says how wide it is.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from minimegatron.core import parallel_state
from minimegatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from minimegatron.core.models.gpt.gpt_model import GPTModel
from minimegatron.core.pipeline_parallel.schedules import get_forward_backward_func
from minimegatron.core.transformer.module import MegatronModule
from minimegatron.core.transformer.transformer_config import TransformerConfig

SEQ, BATCH, MICROBATCHES, VOCAB, WIDTHS = 16, 4, 4, 64, (16, 32)


def part_of_gpt(h: int, dtype: torch.dtype) -> GPTModel:
    """This stage's layers of a GPT with four."""
    stage, stages = dist.get_rank(), dist.get_world_size()
    sizes = {"num_layers": 4, "hidden_size": h, "num_attention_heads": 4, "init_method_std": 0.1}
    off = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "pipeline_model_parallel_size": stages}
    config = TransformerConfig(**sizes, **off, params_dtype=dtype, pipeline_dtype=dtype)
    ends = {"pre_process": stage == 0, "post_process": stage == stages - 1}
    return GPTModel(config, get_gpt_layer_local_spec(), VOCAB, SEQ, **ends)


class Pair(MegatronModule):
    """A stage of both models. Its output is [s, b, both h], or, on the last stage, [b, s, 2 vocab]."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        student, teacher = (part_of_gpt(width, dtype) for width in WIDTHS)
        super().__init__(student.config)
        self.student, self.teacher = student, teacher.requires_grad_(False)

    def set_input_tensor(self, received):
        parts = (None, None) if received[0] is None else received[0].split(WIDTHS, dim=-1)
        self.student.set_input_tensor([parts[0]])
        self.teacher.set_input_tensor([parts[1]])

    def forward(self, tokens):
        with torch.no_grad():
            of_teacher = self.teacher(tokens, None, None)
        return torch.cat([self.student(tokens, None, None), of_teacher], dim=-1)


def both_widths(receive, send):
    """[s, b, student's h] -> [s, b, both h], forwards; gradients have the shapes of their messages."""
    return [[(*shape[:-1], sum(WIDTHS)) for shape in shapes] for shapes in (receive, send)]


def loss_func(logits):
    """How far the student's predictions are from the teacher's: KL divergence, nats a token."""
    student, teacher = (F.log_softmax(part, -1).flatten(0, 1) for part in logits.chunk(2, dim=-1))
    loss = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
    return loss, {"loss": loss.detach()}


def step(model, number=0, adjust=both_widths):
    """Forwards and backwards of all microbatches; on the last stage, their reports."""
    draw = torch.Generator().manual_seed(number)
    return get_forward_backward_func()(
        forward_step_func=lambda batches, model: (model(next(batches)), loss_func),
        data_iterator=iter(torch.randint(VOCAB, (MICROBATCHES, BATCH, SEQ), generator=draw)),
        model=model,
        num_microbatches=MICROBATCHES,
        seq_length=SEQ,
        micro_batch_size=BATCH,
        adjust_tensor_shapes_fn=adjust,
    )


if __name__ == "__main__":
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    model = Pair()
    optimizer = torch.optim.Adam(model.student.parameters(), lr=1e-2)
    for number in range(100):
        optimizer.zero_grad()
        losses = [report["loss"] for report in step(model, number)]
        optimizer.step()
        if losses and number % 20 == 0:
            print(f"step {number}: {sum(losses) / MICROBATCHES:.4f} nats a token", flush=True)
    dist.destroy_process_group()
