"""The old place of `set_device`, `get_device` and `choose_backend`, which `core.utils` has now.

Imported by: programs that know this place. Calls: `core.utils`. Megatron has no such module.
"""

from minimegatron.core.utils import choose_backend, get_device, set_device

__all__ = ["choose_backend", "get_device", "set_device"]
