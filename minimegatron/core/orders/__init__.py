"""Orders of work: which rank does what, in which order; written down, checked, and run from data.

Megatron has no counterpart: a schedule there is the code that runs it. Where the stages of the model
are (`placement`) and what kinds of work there are (`work`) is asked everywhere; the rest is behind this
door. It loads without torch but for `runnable`, `shared_step` and `planned_schedule`, which train.
"""

from minimegatron.exports import lazily

_ORDERS = "minimegatron.core.orders.orders"

__getattr__, __dir__ = lazily(
    __name__,
    {
        "register_order": f"{_ORDERS}:register_order",
        "get_schedule": f"{_ORDERS}:get_schedule",
        "schedule_names": f"{_ORDERS}:schedule_names",
    },
)
