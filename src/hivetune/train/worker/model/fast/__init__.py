"""The fast path: one hand-written LoRA step for decoder models of the Llama kind, without an autograd graph.

Read it in this order:

    spec.py        what a model is made of, by its config.json
    weights.py     its matrices, read, merged and streamed; their adapters
    tables.py      what the host prepares of a micro-batch
    model.py       the whole: documents in, through all layers, the loss and back, gradients out
    layer.py       forward and backward of a layer, by hand
    ops.py         the operations between buffers, in plain torch or by the kernels, and which of both computes
    attention.py   attention, by both
    backend.py     the kernels in C++ (kernels/) by their Python names; build.py compiles them

docs/engine.md explains why it is built so.
"""
