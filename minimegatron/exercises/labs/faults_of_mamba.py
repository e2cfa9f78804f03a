"""Known mistakes in state-space layers, as patches.

Megatron has no counterpart.
"""

from minimegatron.exercises.labs.fault import Fault

_MIXER = "core/ssm/mamba_mixer.py"
_SCAN = "core/ssm/ops/ssd_combined.py"

FAULTS_OF_MAMBA = (
    # -- The scan --
    Fault(
        "decay-before-input",
        _SCAN,
        "masked_fill(~ones.tril(-1), 0.0)",
        "masked_fill(~ones.tril(), 0.0)",
        "A token's part decays in its own step already. The model trains, a little worse; a model of "
        "Megatron's is read wrongly.",
    ),
    Fault(
        "chunk-state-dropped",
        _SCAN,
        "        before.append(state)\n",
        "        before.append(torch.zeros_like(state))\n",
        "Each chunk begins with an empty state. Sequences of one chunk are right; longer ones forget "
        "everything at the borders. The loss is wrong by little, and stays higher.",
    ),
    Fault(
        "decay-as-a-ratio",
        _SCAN,
        "    decay = torch.exp(segment_sums(a))\n",
        "    grown = torch.exp(-a.cumsum(dim=-1))\n"
        "    decay = (grown[..., None, :] / grown[..., :, None]).tril()\n",
        "The decay between two tokens is a quotient of two exponentials. In a long chunk that decays "
        "fast both are infinite, and the loss becomes NaN.",
    ),
    Fault(
        "conv-not-causal",
        "core/ssm/ops/causal_conv1d.py",
        "F.pad(x, (0, 0, 0, 0, width - 1, 0))",
        "F.pad(x, (0, 0, 0, 0, 0, width - 1))",
        "The convolution sees the next three tokens, which are to be predicted. The loss is wrong: far "
        "too good after some training, and the model writes nonsense.",
    ),
    # -- The mixer --
    Fault(
        "in-proj-cut-across-sections",
        _MIXER,
        "            partition_sizes=self.sections,\n",
        "",
        "The stack of z, x, B, C and dt is cut as one matrix. The first rank takes rows of z where "
        "it needs x, so with t > 1 the loss is wrong: these are other weights than with t = 1. A "
        "checkpoint is read wrongly.",
    ),
    Fault(
        "gate-after-norm",
        _MIXER,
        "        gated = y.to(dtype) * F.silu(z.to(dtype))\n"
        "        groups = gated.unflatten(-1, (self.num_groups, -1))\n"
        "        normed = F.rms_norm(groups, groups.shape[-1:], eps=self.eps).flatten(-2)\n",
        "        groups = y.to(dtype).unflatten(-1, (self.num_groups, -1))\n"
        "        normed = F.rms_norm(groups, groups.shape[-1:], eps=self.eps).flatten(-2)\n"
        "        normed = normed * F.silu(z.to(dtype))\n",
        "The output is normalised first and gated afterwards. It is another model, which trains as "
        "well; one of Megatron's is read wrongly.",
    ),
    Fault(
        "gated-norm-over-whole-width",
        _MIXER,
        "gated.unflatten(-1, (self.num_groups, -1))",
        "gated.unflatten(-1, (1, -1))",
        "All features of a rank are normalised together, and not those of each group. The result "
        "depends on t, which decides what a rank has.",
    ),
    Fault(
        "a-log-cast",
        _MIXER,
        "    return result if result.dtype == tensor.dtype else tensor.to(result.device)\n",
        "    return result\n",
        "A 16-bit model casts the decays too. Heads that remember for long get the same few decays, "
        "and small updates of them are lost.",
    ),
    # -- The layers --
    Fault(
        "letters-of-the-first-stage",
        "core/ssm/mamba_block.py",
        "letters[first:last]",
        "letters[: last - first]",
        "Every stage takes its layers from the beginning of the pattern. One stage is right; with "
        "more, the second has layers of the wrong kind, under the names of others: the loss is wrong.",
    ),
)
