"""A router and its auxiliary loss: which experts a token goes to, and what keeps their load even."""

import torch


def topk_routing_with_score_function(
    logits,
    topk,
    use_pre_softmax=False,
    scaling_factor=None,
    score_function="softmax",
    expert_bias=None,
):
    is_sigmoid = score_function == "sigmoid"
    preference = logits.detach()
    if is_sigmoid:
        preference = preference.sigmoid()
        if expert_bias is not None:
            preference = preference + expert_bias

    # one expert after the other, the best first
    routing_map = torch.zeros(logits.shape, dtype=torch.bool)
    for _ in range(topk):
        left = preference.masked_fill(routing_map, -float("inf"))
        winner = left.argmax(dim=-1)
        routing_map[torch.arange(len(logits)), winner] = True

    if is_sigmoid:
        probs = logits.sigmoid() * routing_map
        if topk > 1:
            probs = probs / (probs.sum(-1, keepdim=True) + 1e-20)
    elif use_pre_softmax:
        probs = logits.softmax(-1) * routing_map
    else:
        probs = logits.masked_fill(~routing_map, -float("inf")).softmax(-1)

    if scaling_factor:
        probs = probs * scaling_factor
    return probs, routing_map


def switch_load_balancing_loss_func(
    probs, tokens_per_expert, total_num_tokens, topk, num_experts, moe_aux_loss_coeff
):
    mean_score = probs.sum(0) / total_num_tokens
    fraction = tokens_per_expert / (total_num_tokens * topk)
    return moe_aux_loss_coeff * num_experts * torch.dot(fraction.to(mean_score), mean_score)


class MoEAuxLossAutoScaler(torch.autograd.Function):
    main_loss_backward_scale = None

    @staticmethod
    def forward(ctx, output, aux_loss):
        return output.clone()

    @staticmethod
    def backward(ctx, grad_output):
        scale = MoEAuxLossAutoScaler.main_loss_backward_scale
        return grad_output, torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float64)

    @staticmethod
    def set_loss_scale(scale):
        if MoEAuxLossAutoScaler.main_loss_backward_scale is None:
            MoEAuxLossAutoScaler.main_loss_backward_scale = scale
        else:
            MoEAuxLossAutoScaler.main_loss_backward_scale.copy_(scale)


def routing(self, logits):
    probs, routing_map = topk_routing_with_score_function(
        logits,
        self.topk,
        use_pre_softmax=self.use_pre_softmax,
        scaling_factor=self.scaling_factor,
        score_function=self.score_function,
        expert_bias=self.expert_bias,
    )
    if not self.training or not torch.is_grad_enabled():
        return probs, routing_map

    for expert in range(routing_map.shape[1]):
        self.local_tokens_per_expert[expert] += int(routing_map[:, expert].sum())

    if self.score_function == "sigmoid":
        scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    else:
        scores = logits.softmax(-1)
    _, by_score = topk_routing_with_score_function(logits, self.topk)
    loss = switch_load_balancing_loss_func(
        scores,
        by_score.sum(0),
        logits.size(0),
        self.topk,
        logits.size(1),
        self.aux_loss_coeff,
    )
    return MoEAuxLossAutoScaler.apply(probs, loss), routing_map


def forward_backward(layer, loss_func, microbatches, loss_scale=1.0):
    share = loss_scale / len(microbatches)
    for x in microbatches:
        output = layer(x)
        # after the layer: backward is what reads it
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(share, dtype=torch.float64))
        loss = loss_func(output)
        loss.backward(torch.full_like(loss, share))


if __name__ == "__main__":
    from minimegatron.exercises.check import main

    main(__file__)
