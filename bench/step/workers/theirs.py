"""The peers' rows: TRL's SFTTrainer, or transformers' Trainer with PEFT, on the same steps, adapter and optimizer.

Runs in the peers' own environment. Nothing is patched: a callback waits for the clock before each step, and the order
of the rows is kept by a sequential sampler, which both trainers let a subclass choose.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from step.protocol import Clock, finish, forget_peak, peak_bytes, resident_bytes

BARE_BYTES = resident_bytes()

import gc  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import tempfile  # noqa: E402

from datasets import Dataset  # noqa: E402
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch.utils.data import SequentialSampler  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class Turns(TrainerCallback):
    """Waits for the clock at the beginning of each optimizer step, and tells what the step took."""

    def __init__(self, clock: Clock):
        self.clock, self.seconds, self.started, self.norm = clock, 0.0, 0.0, None

    def on_step_begin(self, args, state, control, **kwargs):
        self.started = self.clock.wait()
        if state.global_step == 0:
            forget_peak()

    def on_step_end(self, args, state, control, **kwargs):
        finish()
        self.seconds = time.perf_counter() - self.started

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.clock.tell(
                step=state.global_step - 1,
                loss=logs["loss"],
                grad_norm=logs.get("grad_norm"),
                seconds=self.seconds,
                peak_bytes=peak_bytes(),
            )


def in_order(trainer_class: type) -> type:
    """The trainer with rows in the order of the file."""

    class InOrder(trainer_class):
        def _get_train_sampler(self, train_dataset=None):
            return SequentialSampler(self.train_dataset if train_dataset is None else train_dataset)

    return InOrder


def main() -> None:
    clock = Clock()
    job, options = clock.job, clock.job["options"]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    sets = json.loads(Path(job["data"]).read_text())["sets"]
    for name in job["sets"]:
        clock.wait()
        trainer = make_trainer(job, options, sets[name])
        state = {key: value for key, value in load_file(job["adapter"]).items()}
        result = set_peft_model_state_dict(trainer.model, state)
        assert not result.unexpected_keys, result.unexpected_keys
        dtype = str(next(trainer.model.parameters()).dtype).removeprefix("torch.")
        mixed = "bfloat16 autocast" if trainer.args.bf16 else "no autocast"
        trainer.add_callback(Turns(clock))
        clock.tell(ready=name, dtype=f"{dtype}, {mixed}", bare_bytes=BARE_BYTES, path=options["trainer"])
        trainer.train()
        del trainer
        gc.collect()


def make_trainer(job, options, content):
    # SFTTrainer loads a model given by name in float32 unless told otherwise (create_model_from_path); so do we.
    base = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, options.get("dtype", "float32")))
    rows = Dataset.from_list(
        [
            {
                "input_ids": document["tokens"],
                "labels": [t if w else -100 for t, w in zip(document["tokens"], document["trained"], strict=True)],
            }
            for step in content["steps"]
            for document in step
        ]
    )
    batch = len(content["steps"][0])
    micro = min(content["micro"], batch)
    arguments = dict(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=batch // micro,
        max_steps=len(content["steps"]),
        learning_rate=job["rate"],
        lr_scheduler_type="constant",
        optim="adamw_torch",
        weight_decay=0.0,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=job["device"] == "cpu",
        seed=0,
        disable_tqdm=True,
        **options["arguments"],
    )
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    lora = LoraConfig(
        r=job["lora"]["r"],
        lora_alpha=job["lora"]["alpha"],
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        task_type="CAUSAL_LM",
    )
    if options["trainer"] == "trl":
        from trl import SFTConfig, SFTTrainer

        return in_order(SFTTrainer)(
            model=base,
            args=SFTConfig(**arguments),
            train_dataset=rows,
            processing_class=tokenizer,
            peft_config=lora,
        )
    return in_order(Trainer)(
        model=get_peft_model(base, lora),
        args=TrainingArguments(**arguments),
        train_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(tokenizer, padding=True, label_pad_token_id=-100),
    )


if __name__ == "__main__":
    main()
