"""The routed system is judged as it is shipped: the engine's losses on the served base are llama.cpp's own."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from serve.hive import make_home, write_adapter
from walk.experts.planted import config_of, domain, run_here

from hivetune.base.disk import MANIFEST, sha256_file
from hivetune.judge.experts.domains import ExpertRow
from hivetune.process.protocol import Passage
from hivetune.records import silent
from hivetune.release.base import base_gguf
from hivetune.release.gguf import write_gguf_adapter
from hivetune.release.quantize import SERVED_QUANT
from hivetune.serve.llama.backend import ServerSettings, open_backend
from hivetune.serve.llama.told import tell_passages
from hivetune.walk.experts import scores
from hivetune.walk.experts.routes import as_served
from hivetune.walk.experts.scores import scored_rows
from hivetune.walk.experts.survey import Survey
from hivetune.walk.prepare import prepare_data

pytestmark = pytest.mark.slow
# llama.cpp multiplies in 8 bits where the engine multiplies rounded weights in 32, and keeps keys in 16.
TOLERANCE_NATS = 0.05


def test_what_the_router_is_judged_by_is_what_llama_cpp_says(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "run_task", run_here)
    model = make_home()
    config = config_of(tmp_path, domain("coder", "formal", 12, cue="code"))
    snapshot = prepare_data(config, model)
    write_adapter(model, tmp_path / "adapter", 1)
    shared: Any = SimpleNamespace(model_sha256=sha256_file(model / MANIFEST))
    numbers = snapshot.rows("train")[:4]
    rows = tuple(ExpertRow(str(number), "train", str(number), (number,), {}, "") for number in numbers)
    found = Survey(config, cast(Any, shared), model, snapshot, rows, None, (), tmp_path / "found")
    base, said = as_served(found, silent)
    assert base is not None and said == f"the base in {SERVED_QUANT}, as it is served"
    adapters = {"shared": tmp_path / "adapter"}
    judged = scored_rows(found, adapters, rows, model=base)
    trained = scored_rows(found, adapters, rows)
    assert all(one.nats["shared"] != other.nats["shared"] for one, other in zip(judged, trained, strict=True))

    served = base_gguf(config.model, shared.model_sha256, SERVED_QUANT)
    gguf = write_gguf_adapter(model, tmp_path / "adapter", "m", tmp_path / "task", "a.gguf", lambda done, total: None)
    passages = [
        Passage(
            tuple(snapshot.tokens(number)), tuple(place for place, is_ in enumerate(snapshot.trained(number)) if is_)
        )
        for number in numbers
    ]
    with open_backend(served, ServerSettings(adapters=((gguf, 0.0),), context_tokens=256, threads=1)) as backend:
        for adapter, name in ((0, "shared"), (None, "base")):
            told, _ = tell_passages(backend, passages, slots=1, top=1, adapter=adapter)
            for unit, places in zip(judged, told, strict=True):
                nats = -math.fsum(place.logprob for place in places if place is not None)
                assert len(places) == unit.tokens
                assert nats / unit.tokens == pytest.approx(unit.nats[name] / unit.tokens, abs=TOLERANCE_NATS)
