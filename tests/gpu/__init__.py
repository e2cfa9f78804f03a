"""`make gpu-check`: what only a GPU can show, in thirteen parts. Each has a stand-in on the CPU."""
