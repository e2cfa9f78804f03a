"""Memory that ranks of one machine share, as a backend of `torch.distributed`."""
