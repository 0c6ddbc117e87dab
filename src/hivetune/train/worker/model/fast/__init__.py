"""The fast path: one hand-written LoRA step for decoder models of the Llama kind, without an autograd graph.

spec.py what a model is made of; weights/ its matrices, merged, and its adapters; state.py what a micro-batch carries;
ops.py and kernels/native.py the elementwise work, twice; attention.py; norms.py; layer.py forward and backward of a
layer; experts.py of routed experts; loss.py; model.py the whole. docs/engine.md tells why it is built so.
"""
