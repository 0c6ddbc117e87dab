"""`hivetune synth` as a person meets it."""

import json
from pathlib import Path

from command import hivetune

PAGES = Path(__file__).parent.parent / "synth" / "pages"
PACK = 'category = "bees"\npages = ["combcopy(1)", "hivectl(1)"]\n'


def test_rows_and_report(tmp_path: Path) -> None:
    pack, out = tmp_path / "bees.toml", tmp_path / "rows.jsonl"
    pack.write_text(PACK)
    words = ["synth", str(pack), str(PAGES), "--out", str(out), "--rows", "30"]
    document = json.loads(hivetune(*words, "--json").stdout)
    assert (document["schema"], document["rows"], document["maker"]) == (1, 30, "templates")
    told = hivetune(*words).stdout
    assert "bees\t30" in told and "30 rows, all synthetic" in told
    checked = json.loads(hivetune("check", out, "--json").stdout)
    assert checked["rejected"] == {} and checked["rows_in"] == 30
    assert checked["categories"]["bees"]


def test_without_out_the_categories_are_listed() -> None:
    found = {one["category"]: one for one in json.loads(hivetune("synth", "--json").stdout)["categories"]}
    assert len(found) == 24 and found["python"]["pages"] > 50 and "policycoreutils" in found["selinux"]["install"]


def test_mistakes(tmp_path: Path) -> None:
    out = ("--out", tmp_path / "x.jsonl")
    refused = hivetune("synth", "sytemd", *out)
    assert refused.returncode == 2 and "did you mean 'systemd'?" in refused.stderr
    pack = tmp_path / "bees.toml"
    pack.write_text('category = "bees"\npages = ["nothing(1)"]\ninstall = "hives"')
    refused = hivetune("synth", pack, *out)
    assert refused.returncode == 3 and "install documentation: hives" in refused.stderr
    pack.write_text('category = "bees"\npages = ["ls"]')
    refused = hivetune("synth", pack, *out)
    assert refused.returncode == 2 and "name(section)" in refused.stderr
