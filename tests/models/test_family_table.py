"""Each family of the table is tried: on the fast path against a textbook model."""

from train.worker import models as engine_models

from hivetune.models.families import FAMILIES


def test_each_family_of_the_fast_path_is_compared_with_a_textbook_model() -> None:
    tried = {model_type for model_type, _ in engine_models.FAMILIES.values()}
    assert tried == set(FAMILIES)
