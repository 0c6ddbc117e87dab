"""The benchmark's own row: hivetune's model and optimizer on the given steps, one at a time."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from step.protocol import Clock, finish, forget_peak, peak_bytes, resident_bytes

BARE_BYTES = resident_bytes()  # Python with torch imported and nothing else

import json  # noqa: E402

from safetensors.torch import load_file  # noqa: E402

from hivetune.config import LoraConfig  # noqa: E402
from hivetune.run.choices import Choices  # noqa: E402
from hivetune.train.worker.model.adapter import initialise  # noqa: E402
from hivetune.train.worker.model.load import load_model  # noqa: E402
from hivetune.train.worker.model.protocol import Document  # noqa: E402
from hivetune.train.worker.session import AdamW  # noqa: E402
from hivetune.train.worker.settle import apply_choices, complete  # noqa: E402


def main() -> None:
    clock = Clock()
    job, options = clock.job, clock.job["options"]
    settled = complete(job["device"], options.get("dtype", "auto"), Choices())
    device, dtype = apply_choices(settled)
    sets = json.loads(Path(job["data"]).read_text())["sets"]
    lora = LoraConfig(**{**job["lora"], **options.get("lora", {})})
    model = load_model(
        Path(job["model"]),
        lora,
        method="lora",
        dtype=dtype,
        device=device,
        choices=Choices(**{"kernels": settled.kernels, "products": settled.products, **options["choices"]}),
    )
    initial = load_file(job["adapter"])
    for name in job["sets"]:
        clock.wait()
        if "lora" in options:
            initialise(model.adapter, 0)
        else:
            for parameter, view in model.adapter.items():
                view.copy_(initial[parameter])
        optimizer = AdamW(model.master_N, model.grad_N, weight_decay=0.0)
        clock.tell(ready=name, dtype=settled.dtype, bare_bytes=BARE_BYTES, path=model.path)
        for number, step in enumerate(sets[name]["steps"]):
            started = clock.wait()
            if number == 0:
                forget_peak()
            documents = [
                Document(row, torch.tensor(d["tokens"]), torch.tensor(d["trained"], dtype=torch.bool))
                for row, d in enumerate(step)
            ]
            trained = sum(sum(d["trained"][1:]) for d in step)
            model.grad_N.zero_()
            nll = model.backward(documents, 1 / trained)
            norm = torch.linalg.vector_norm(model.grad_N, dtype=torch.float64)
            optimizer.update(rate=job["rate"], number=number + 1)
            loss = nll.item() / trained
            finish()
            clock.tell(
                step=number,
                loss=loss,
                grad_norm=norm.item(),
                seconds=time.perf_counter() - started,
                peak_bytes=peak_bytes(),
            )


if __name__ == "__main__":
    main()
