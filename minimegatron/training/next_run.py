"""What a run leaves in its process is forgotten, so that another may begin.

Counterpart: `megatron.training.global_vars`.
"""

from minimegatron.core.full_cuda_graph import destroy_full_cuda_graphs
from minimegatron.core.microbatch_getters import destroy_num_microbatches_calculator
from minimegatron.core.rerun_state_machine import destroy_rerun_state_machine
from minimegatron.training import global_vars
from minimegatron.training.curves import close_writer


def destroy_global_vars() -> None:
    """Forgets them, so that another run may begin in this process."""
    close_writer()
    destroy_rerun_state_machine()
    destroy_full_cuda_graphs()
    global_vars._globals = global_vars._Globals()
    destroy_num_microbatches_calculator()
