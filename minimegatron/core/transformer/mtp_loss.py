"""The losses of further tokens: how they join the main loss's backward, and the log.

Counterpart: parts of `megatron.core.transformer.multi_token_prediction`, which has these names too.
"""

from typing import Any


def check_mtp(config: Any) -> None:
    """Enters the hooks; raises ValueError, with numbers and remedy, for what cannot be."""
