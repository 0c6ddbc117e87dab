"""Exporters of runs to the tools that people already use: TensorBoard, MLflow, trackio, W&B, Prometheus.

They read journals and the registry, in their own process: training never waits for them and never knows whether they
live. The tool itself is asked what it holds, so no cursor can disagree with it.
"""
