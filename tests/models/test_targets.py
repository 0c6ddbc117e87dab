"""`lora.target_modules` means what it means in PEFT, for whoever asks."""

from types import SimpleNamespace

import pytest

from hivetune.errors import UsageError
from hivetune.models.architecture import match_targets, peft_targets

pytestmark = pytest.mark.slow

PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
NAMES = [f"model.layers.{layer}.{name}" for layer in range(12) for name in PROJECTIONS] + ["lm_head"]
WANTED = [
    ["q_proj"],
    ["self_attn.q_proj", "down_proj"],
    ["layers.1.self_attn.q_proj"],
    ["model.layers.11.mlp.up_proj"],
    r".*_proj",
    r".*\.[qk]_proj",
    r"model\.layers\.[0-3]\..*(up|down)_proj",
]


@pytest.mark.parametrize("wanted", WANTED, ids=str)
def test_names_and_patterns_choose_what_peft_chooses(wanted: str | list[str]) -> None:
    tuners_utils = pytest.importorskip("peft.tuners.tuners_utils")
    config = SimpleNamespace(target_modules=wanted, target_parameters=None)
    theirs = [name for name in NAMES if tuners_utils.check_target_module_exists(config, name)]
    chosen = match_targets(NAMES, wanted, head="lm_head")
    assert chosen == theirs and chosen
    config.target_modules = peft_targets(chosen, wanted)
    assert [name for name in NAMES if tuners_utils.check_target_module_exists(config, name)] == chosen


@pytest.mark.parametrize("wanted", ["all-linear", "All-Linear"])
def test_all_linear_leaves_the_output_embedding_out_and_is_written_as_names(wanted: str) -> None:
    chosen = match_targets(NAMES, wanted, head="lm_head")
    assert chosen == NAMES[:-1]
    assert peft_targets(chosen, wanted) == ["down_proj", "k_proj", "o_proj", "q_proj", "up_proj"]


def test_a_single_plain_name_is_a_list_of_it() -> None:
    assert match_targets(NAMES, "q_proj", head=None) == match_targets(NAMES, ["q_proj"], head=None)
    assert peft_targets([], "q_proj") == ["q_proj"]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (["q_proj", "query_key_value"], "no linear module matches 'query_key_value'"),
        ("query_key_value", "no linear module matches 'query_key_value'"),
        (r"[qk]_proj", r"no linear module matches '\[qk\]_proj'"),  # a pattern covers the whole name, as in PEFT
        ("[qk", "is not a regular expression"),
        ([], "the list is empty"),
        (["lm_head"], "lm_head is the output embedding"),
        (r"lm_head|.*\.q_proj", "lm_head is the output embedding"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_names_that_exist(wanted: str | list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        match_targets(NAMES, wanted, head="lm_head")
    assert caught.value.hint and "all-linear" in caught.value.hint
