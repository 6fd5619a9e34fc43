"""One training step of a model as wide as Llama 2 70B, held against the whole model and its plan.

Two layers of the 70B model with embedding and head, 2,235,604,992 parameters in bfloat16, each
block recomputed in backward, plain SGD, a row of 16 tokens on each of two ranks. First a process
of its own trains the whole model; then two ranks with a shard each, in processes of their own, are
compared with it, and their peak memory with a formula and with the plan. Read `work` for what is
trained, `processes` for who does what, `verdict` for what must be equal, and how nearly.
"""
