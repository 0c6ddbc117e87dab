"""The fast path: one hand-written LoRA step for decoder models of the Llama kind, without an autograd graph.

Read it in this order:

    spec.py        what a model is made of, by its config.json
    weights/       its matrices, merged; their adapters; layers that are streamed
    tables.py      what the host prepares of a micro-batch
    model.py       the whole: documents in, gradients out
    passes.py      a micro-batch through all layers, the loss, and back
    layer.py       forward and backward of a layer, by hand
    ops.py         the work between the products in plain torch; kernels/ in C++
    attention.py   attention in plain torch
    state.py       what a micro-batch carries

docs/engine.md explains why it is built so.
"""
