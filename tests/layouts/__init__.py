"""Tables of layouts of our own models, each compared with one process: `python -m tests.layouts`.

quick: one or two layouts of each axis, and the full house. single: each axis alone. pairs: every two values of 30 axes
that a legal layout of at most 8 ranks can hold together. houses: five axes and more at once. full: these three, and
layouts of data and tensor parallelism. training: 20 steps of SGD and of Adam against `torch.optim`.

Each layout runs in fp64 and in fp32. Rows marked `deterministic` add in rank order: among those, layouts that differ
only in strategy, overlap and bucket size agree in every bit. Layouts with the model `tagged` have a parameter for each
rule of `core.distributed.contract.gradient_contract` that our GPT does not need.
"""
