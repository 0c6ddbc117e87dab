"""The fast path: one hand-written LoRA step for decoder models of the Llama kind, without an autograd graph.

spec.py what a model is made of; weights.py its matrices, merged; layout.py documents as one flat row of tokens with
shared prefixes; ops.py and native.py the elementwise work, twice; attention.py; layer.py forward and backward of a
layer; loss.py; model.py the whole. docs/engine.md tells why it is built so.
"""
