"""What lies in a run folder, by name. The only place that knows; docs/formats.md tells what is in each file.

One writer per file: the worker writes METRICS, the supervisor EVENTS and AMENDMENTS, whoever holds the lock the rest.
"""

CONFIG = "config.resolved.yaml"
RECORD = "run.json"
PLAN, PLAN_ROWS, AMENDMENTS = "plan.json", "plan.bin", "amendments.jsonl"
# Of stage 2: what the reference adapter says of each judged row.
REFERENCE = "reference.json"
METRICS, EVENTS = "metrics.jsonl", "events.jsonl"
# The loss of each validation row at each validation.
ROW_LOSSES = "validation.jsonl"
WORKER_LOG, SUPERVISOR_LOG = "child.log", "supervisor.log"
# What each task's folder has; the run folder is that of its worker.
TASK, OUTCOME = "task.json", "outcome.json"
# PEFT's own two names; at the top of the folder when the run is done.
ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
EVALUATION, VERDICT = "eval.json", "gate.json"
LOSS_CURVE = "loss.svg"
# Folders: of the measurement before step 0, of the child that saves an adapter, of exports.
PROBE, SALVAGE, EXPORTS = "probe", "salvage", "export"
# Folders of the workers that compute packs for the run's own, by number; of torchrun's processes, by rank.
WORKERS, RANKS = "workers", "ranks"
# The folder of an isolation's children; the lines that children write who score, and those of ISOLATION.
ISOLATION, SCORES, ITEMS = "isolate", "scores.jsonl", "items.jsonl"
