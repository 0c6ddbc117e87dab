"""Files that are not UTF-8 are read where that is certain, and refused with the way to convert them where it is not."""

import codecs
import csv
import gzip
import io
import json
from pathlib import Path

import pytest
from data.conftest import chat
from hypothesis import given
from hypothesis import strategies as st

from hivetune.config import DataConfig
from hivetune.data.files.kinds import likely_encoding
from hivetune.data.files.unpack import as_utf8
from hivetune.data.prepare.prepare import check
from hivetune.data.prepare.report import Report
from hivetune.errors import DataRefused, UsageError

GERMAN = "Größe, Übermut und “Café”, schön"
WIDE = {"utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE, "utf-32-le": codecs.BOM_UTF32_LE}


def report_of(path: Path) -> Report:
    return check(DataConfig(path=str(path), near_duplicates=0))


def lines(*answers: str) -> str:
    return "".join(json.dumps(chat(f"Question {i}?", a), ensure_ascii=False) + "\n" for i, a in enumerate(answers))


def table() -> str:
    out = io.StringIO(newline="")
    csv.writer(out).writerows([["prompt", "completion"], ["Question?", GERMAN], ["Another?", "Das heißt: “ja”."]])
    return out.getvalue()


@pytest.mark.parametrize(
    ("encoding", "marked"),
    [("utf-16-le", True), ("utf-16-be", True), ("utf-32-le", True), ("utf-16-le", False), ("utf-16-be", False)],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".json", ".jsonl.gz"])
def test_wide_encodings(encoding: str, marked: bool, suffix: str, tmp_path: Path) -> None:
    text = {".csv": table(), ".json": "[" + ",".join(lines(GERMAN, "你好").splitlines()) + "]"}.get(suffix)
    data = (WIDE[encoding] if marked else b"") + (text or lines(GERMAN, "你好")).encode(encoding)
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(gzip.compress(data) if suffix.endswith(".gz") else data)
    if not marked:
        with pytest.raises(DataRefused, match=f"is not UTF-8; it seems to be {encoding}") as refused:
            report_of(path)
        assert f"data.encoding={encoding}" in refused.value.hint
        return
    report = report_of(path)
    assert (report.rows_in, report.usable) == (2, 2), report.document["problems"]
    assert report.document["encodings"] == {str(path): encoding}


# A text, the encoding that it is written in, and what the user calls it.
NAMED = [
    ("Привет, как дела", "cp1251", "cp1251"),
    *(("Où est la clé de la forêt", "cp1252", name) for name in ("Windows-1252", "ISO-8859-1", "Latin 1")),
    *(("a question", name, name.upper()) for name in ("utf-16", "utf-16-le", "utf-16-be")),  # they need no mark
]


@pytest.mark.parametrize(("text", "written", "named"), NAMED)
def test_the_user_names_the_encoding(text: str, written: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines(text).encode(written))
    report = check(DataConfig(path=str(path), encoding=named))
    assert (report.usable, report.document["rejected"], len(report.document["encodings"])) == (1, {}, 1)


@pytest.mark.parametrize("encoding", ["cp1521", "base64", "rot13", "idna"])
def test_a_codec_that_reads_no_texts_is_no_encoding(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(lines("a question"))
    with pytest.raises(UsageError, match=f"no encoding '{encoding}'"):
        check(DataConfig(path=str(path), encoding=encoding))


@pytest.mark.parametrize(
    ("text", "encoding"),
    [("très à côté", "cp1252"), ("mañana", "latin-1"), ("Cześć, łódź", "cp1250"), ("Привет, как дела", "cp1251"),
     ("Καλημέρα", "cp1253"), ("こんにちは", "shift-jis"), ("你好", "gb18030"), ("şoför", "cp1254")],
)  # fmt: skip
def test_what_could_be_several_texts_is_refused(text: str, encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines(text, "fine").encode(encoding))
    report = report_of(path)
    assert report.document["rejected"] == {"bad-characters": 1}
    assert report.usable == 1


def test_byte_order_marks_anywhere(tmp_path: Path) -> None:
    """Files that were joined have one in the middle; text that was pasted from a file may hold one."""
    path = tmp_path / "rows.jsonl"
    mark = codecs.BOM_UTF8
    pasted = json.dumps(chat("\ufeffHi", "Ho \ufeffthere")) + "\n"
    path.write_bytes(mark + lines("one").encode() + mark + lines("two").encode() + pasted.encode())
    clean = tmp_path / "clean.jsonl"
    report = check(DataConfig(path=str(path), near_duplicates=0), clean=clean)
    assert report.usable == 3
    assert report.document["changed"] == {"rewritten": 1}  # one mark stands in a text


@given(st.text(max_size=300), st.sampled_from(list(WIDE)), st.integers(1, 7))
def test_transcoding_gives_the_same_text_in_any_pieces(text: str, encoding: str, size: int) -> None:
    data = WIDE[encoding] + text.encode(encoding, "replace")
    blocks = (data[at : at + size] for at in range(0, len(data), size))
    read = b"".join(as_utf8(blocks, encoding))
    assert read.decode() == text.encode(encoding, "replace").decode(encoding).removeprefix("\ufeff")


SPOKEN = {
    "cp1252": "Vous êtes très près de la gare, et le café est à côté : c'est pour vous, même l'été.",
    "gb18030": "我们的仓库在哪里？它在波恩，你可以在那里取包裹。",
    "big5": "我們的倉庫在哪裡？它在波恩，你可以在那裡取包裹。",
    "cp932": "私たちの倉庫はどこにありますか。それはボンにあります、そこで受け取れます。",
    "euc_jp": "私たちの倉庫はどこにありますか。それはボンにあります、そこで受け取れます。",
    "cp949": "우리 창고는 어디에 있습니까? 본에 있으니 거기에서 소포를 받을 수 있습니다.",
    "cp1251": "Где находится наш склад? Он в Бонне, и посылку можно забрать там.",
    "koi8-r": "Где находится наш склад? Он в Бонне, и посылку можно забрать там.",
}


@pytest.mark.parametrize("encoding", SPOKEN)
@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_other_scripts_are_refused_and_read_by_name(tmp_path: Path, encoding: str, name: str) -> None:
    path, said = tmp_path / name, SPOKEN[encoding]
    rows = [{"prompt": f"{n}: {said}", "completion": f"{said} {n}"} for n in range(9)]
    text = "\n".join([",".join(rows[0]), *(",".join(f'"{v}"' for v in row.values()) for row in rows)])
    text = text if name.endswith("csv") else "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_bytes(text.encode(encoding))
    with pytest.raises(DataRefused, match="is not UTF-8; it seems to be"):
        report_of(path)
    report = check(DataConfig(path=str(path), encoding=encoding, near_duplicates=0))
    assert (report.usable, len(report.document["encodings"])) == (9, 1)


def test_a_few_broken_bytes_are_no_other_encoding(tmp_path: Path) -> None:
    assert likely_encoding(SPOKEN["gb18030"].encode() * 9 + b"\xff" * 30) is None
