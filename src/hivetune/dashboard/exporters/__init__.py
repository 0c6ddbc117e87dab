"""The points of runs in the tools that people already use: TensorBoard, MLflow, trackio, W&B, Prometheus.

Everything here reads journals and the registry, in a process of its own: training never waits for it and never knows
whether it lives. What a tool holds already is asked of the tool itself, so no cursor can disagree with it.
"""
