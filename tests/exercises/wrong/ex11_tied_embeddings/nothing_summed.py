"""Nothing is summed: the model trains, and its two copies drift apart.

Expected: Your function left this gradient as it was
"""


def _allreduce_word_embedding_grads(model, embd_group, pp_group):
    return
