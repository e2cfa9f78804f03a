"""`python3 -m tests.gpu`: what only a GPU can show. Each part has a stand-in on the CPU."""
