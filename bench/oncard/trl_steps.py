"""TRL's SFTTrainer with PEFT on rows of token ids: seconds and loss of each step, peak memory, as JSON. For card.py.

    python bench/oncard/trl_steps.py MODEL ADAPTER ROWS.json OUT.json --mode defaults|best --steps 12

defaults: what a user gets (fp32 on a CPU, recomputing every layer). best: bf16 weights and no recomputing, the fastest
exact settings of its documentation that run there. Same rows in the same order, same loss mask, same adapter to begin
with, AdamW, no clipping. Needs trl, datasets and accelerate beside hivetune's own environment.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from datasets import Dataset
from peft import PeftModel
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

BATCH = 8


class InOrder(SFTTrainer):
    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(self.train_dataset)


class Clock(TrainerCallback):
    def __init__(self):
        self.seconds, self.losses, self._started = [], [], 0.0

    def on_step_begin(self, arguments, state, control, **kwargs):
        _wait()
        self._started = time.perf_counter()

    def on_step_end(self, arguments, state, control, **kwargs):
        _wait()
        self.seconds.append(time.perf_counter() - self._started)

    def on_log(self, arguments, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.losses.append(logs["loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "adapter", "rows", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--mode", choices=("defaults", "best"), default="defaults")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--micro", type=int, default=2, help="rows a micro-batch; 8 in all")
    parser.add_argument("--packed", action="store_true", help="padding-free (needs flash attention)")
    arguments = parser.parse_args()
    started = time.perf_counter()
    best = arguments.mode == "best"
    cuda = torch.cuda.is_available()
    rows = json.loads(arguments.rows.read_text())["rows"][: BATCH * arguments.steps]
    base = AutoModelForCausalLM.from_pretrained(
        arguments.model, dtype=torch.bfloat16 if best or cuda else torch.float32
    )
    model = PeftModel.from_pretrained(base, arguments.adapter, is_trainable=True)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    settings = SFTConfig(
        output_dir=str(arguments.out.with_suffix(".trl")),
        per_device_train_batch_size=arguments.micro,
        gradient_accumulation_steps=BATCH // arguments.micro,
        max_steps=arguments.steps,
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        max_length=None,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=not cuda,
        completion_only_loss=True,
        padding_free=arguments.packed,
        **({"gradient_checkpointing": False, "bf16": True} if best else {} if cuda else {"bf16": False}),
    )
    clock = Clock()
    trainer = InOrder(
        model=model,
        args=settings,
        train_dataset=Dataset.from_list(
            [{"input_ids": row["tokens"], "completion_mask": row["trained"]} for row in rows]
        ),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    loaded = time.perf_counter()
    trainer.train()
    arguments.out.write_text(
        json.dumps(
            {
                "who": f"trl {arguments.mode} {arguments.micro} x {BATCH // arguments.micro}",
                "seconds": clock.seconds,
                "losses": clock.losses,
                "load_s": loaded - started,
                "peak_bytes": peak_bytes(),
                "versions": versions("trl", "peft", "transformers", "torch"),
            }
        )
    )


def peak_bytes() -> int:
    """The card's by torch's allocator; on a CPU the process's resident peak."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def versions(*names: str) -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in names}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
