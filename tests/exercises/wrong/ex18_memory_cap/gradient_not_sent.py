"""No stage sends a gradient.

Expected: rank 0, microbatch 0: gradient is expected from rank 1, which never sends it
"""


def schedule(stage, caps):
    for i in range(stage.num_microbatches):
        yield stage.recv_forward(i)
        yield stage.forward(i)
        yield stage.send_forward(i)
        yield stage.recv_backward(i)
        yield stage.backward(i)
