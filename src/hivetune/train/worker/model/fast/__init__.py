"""The fast path: one hand-written LoRA step for decoder models of the Llama kind, without an autograd graph.

Read it in this order:

    spec.py        what a model is made of, by its config.json
    weights.py     its matrices, merged; their adapters; files.py reads them, stream.py those that do not stay
    tables.py      what the host prepares of a micro-batch
    model.py       the whole: documents in, through all layers, the loss and back, gradients out
    layer.py       forward and backward of a layer, by hand
    ops.py         the work between the products in plain torch; kernels/ in C++
    attention.py   attention in plain torch

docs/engine.md explains why it is built so.
"""
