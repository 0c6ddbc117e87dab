"""Each family of the table is tried: on the fast path against a textbook model, as GGUF against transformers."""

import re

from engine import models as engine_models
from gguf_families import FAMILIES as EXPORTED

from hivetune.models.families import FAMILIES


def test_each_family_of_the_fast_path_is_compared_with_a_textbook_model() -> None:
    tried = {model_type for model_type, _ in engine_models.FAMILIES.values()}
    assert tried == {name for name, family in FAMILIES.items() if family.fast}


def test_each_family_that_is_exported_is_compared_with_transformers() -> None:
    tried = {architecture.lower().replace("text", "_text") for architecture, _, _ in EXPORTED.values()}
    tried = {re.sub(r"(?<=\d)moe$", "_moe", name) for name in tried}
    assert tried == {name for name, family in FAMILIES.items() if family.gguf}
