"""Cross-entropy of logits whose vocabulary is cut over the ranks."""

from minimegatron.exercises.exercise import Exercise

EXERCISE = Exercise(
    name="ex03_vocab_parallel_cross_entropy",
    title="Vocab-parallel cross-entropy",
    tier="core",
    minutes=40,
    num_ranks=4,
    mirrors="minimegatron.core.tensor_parallel.cross_entropy.VocabParallelCrossEntropy",
    summary="Compute the loss, and its gradient, from a slice of the vocabulary per rank.",
    real=("minimegatron.core.tensor_parallel.cross_entropy.VocabParallelCrossEntropy",),
    question=(
        "The real forward keeps the softmax for its backward. What would backward have to "
        "send, or to compute again, without it?"
    ),
)
