"""What a training step costs under each engine: seconds, bytes, calls, messages, side by side.

`python -m benchmarks.step` launches torchrun itself. In one process group the engines take turns,
one step each a round, in an order shuffled for every round, so that whatever else the machine does
falls on all of them. Read `works` for what is trained, `engines` for how, `timing` for the timed
run, `counts` and `memory` for what is counted apart from it, and `figures` for what each figure
means.
"""
