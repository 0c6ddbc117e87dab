"""The whole job of a peer: a JSONL file in, a finished adapter out, with TRL's own data handling, loop and validation.

Runs in the peers' own environment; everything is what TRL's documentation shows for prompt-completion data.
"""

import json
import sys
import time

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer


class Steps(TrainerCallback):
    """What the optimizer steps took, without validation and all else."""

    def __init__(self):
        self.seconds, self.started = 0.0, 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds += time.perf_counter() - self.started


def main() -> None:
    job = json.loads(sys.argv[1])
    rows = load_dataset("json", data_files=job["data"], split="train").train_test_split(job["validation"], seed=0)
    arguments = SFTConfig(
        output_dir=job["out"],
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=job["batch_size"] // 2,
        num_train_epochs=job["epochs"],
        learning_rate=job["rate"],
        eval_strategy="steps",
        eval_steps=job["validate_every"],
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **job["options"]["arguments"],
    )
    lora = LoraConfig(**job["lora"], target_modules="all-linear", task_type="CAUSAL_LM")
    dtype = getattr(torch, job["options"].get("dtype", "float32"))
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype),
        args=arguments,
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        peft_config=lora,
    )
    steps = Steps()
    trainer.add_callback(steps)
    trainer.train()
    trainer.evaluate()
    trainer.save_model(job["out"])
    print(json.dumps({"steps": trainer.state.global_step, "steps_s": steps.seconds}))


if __name__ == "__main__":
    main()
