"""Types that llama.cpp's converter does not write come from the `llama-quantize` on the PATH.

No package that tests may install has that program, so one of 27 lines stands in (llama_quantize.py). It really writes
Q4_0 and Q5_0 by llama.cpp's own Python functions, which have no K-quants: q4_k_m and its like were not tried.
"""

import os
from pathlib import Path

import pytest
from programs import write_program
from serve.hive import make_home, write_adapter

from hivetune.errors import UsageError
from hivetune.llama.backend import ServerSettings, open_backend
from hivetune.models.gguf_header import read_header
from hivetune.release.export import Source, export

pytestmark = pytest.mark.slow


@pytest.fixture
def source(own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    source = Path(__file__).with_name("llama_quantize.py").read_text("utf-8")
    program = write_program(tmp_path / "bin" / "llama-quantize", source)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    made = Source(tmp_path / "adapter", make_home(), "mine")
    write_adapter(made.model, made.adapter, 1)
    return made


def test_a_file_of_four_bits_is_made_from_sixteen_and_served(source: Source, tmp_path: Path) -> None:
    exported = export(source, tmp_path / "export", "gguf", quant="Q4_0")
    assert sorted(path.name for path in exported.folder.iterdir()) == [
        "Modelfile",
        "README.md",
        "manifest.json",
        "mine-q4_0.gguf",
    ]
    shapes = read_header(exported.path).tensors
    weights = sum(a * b for a, b in (shape for shape in shapes.values() if len(shape) == 2))
    assert exported.path.stat().st_size < 0.8 * weights + 200_000, "4.5 bits a weight, and the vocabulary"
    with open_backend(exported.path, ServerSettings(context_tokens=256)) as backend:
        assert backend.complete([{"role": "user", "content": "hello"}], max_tokens=2).new_tokens
    with pytest.raises(UsageError, match="llama-quantize can't write q4_k_m: main: this llama-quantize does not know"):
        export(source, tmp_path / "export", "gguf", quant="q4_k_m")
    assert [path.name for path in (tmp_path / "export").iterdir() if path.name[0] != "."] == ["gguf-q4_0"]
