"""Wrongly decoded text is found; correct text of many languages, with quotes and in capitals, is left alone."""

import pytest

from hivetune.data.checks.rules import mojibake

UNDEFINED = (0x81, 0x8D, 0x8F, 0x90, 0x9D)  # in Windows-1252
SENTENCES = {
    "German": "Größe, Übermut, Straße: „Schöne Grüße“ – ÄÖÜ",
    "French": "Là où l'été s'achève, Noël approche : « à demain » – 5 € l'œuf…",
    "Spanish": "¿Mañana? ¡Sí, señor! El niño comió ñandú.",
    "Portuguese": "Não é a solução, São Paulo está à espera.",
    "Swedish": "Ångström åt smör på Öland.",
    "Polish": "Zażółć gęślą jaźń.",
    "Czech": "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "Turkish": "Pijamalı hasta yağız şoföre çabucak güvendi.",
    "Vietnamese": "Tiếng Việt có dấu, người ơi.",
    "Russian": "Привет, мир! Съешь же ещё этих мягких булок.",
    "Greek": "Καλημέρα κόσμε, τι κάνεις;",
    "Hebrew": "שלום עולם",
    "Arabic": "مرحبا بالعالم",
    "Chinese": "你好，世界。",
    "Japanese": "こんにちは世界",
    "emoji": "Well done 👋🏽 😀",
}
CORRECT = [
    *SENTENCES.values(),
    "NÃO É A SOLUÇÃO, SÃO PAULO",
    "Ærø, Ångström, ñandú, Čeština, İstanbul",
    "30 °C ± 2 µm² ½ ©®",
    "Ã is a letter, and so is â",
    # Capitals in front of quotes, dashes and dots, as headings and exclamations have them.
    "He called it the “GRAND CAFÉ” and left.",
    "Das Schild „MENÜ“ hing schief, daneben „CAFÉ“…",
    "Ela gritou: “IRMÔ, “AMANHÔ e “MAÇÔ.",
    "« ÉTÉ » et « CAFÉ »: l’ÎLE–D’YEU, DÉJÀ…",
    "“¡ESPAÑA”, dijo; «AÑO» y «MAÑANA»… ‘NIÑO’",
    "Skylten ”PÅ” och ”Å”, sedan ”BLÅ”…",
    "»SKØN DAG PÅ ÆRØ«, »FÅ«, »BLÅ«",
    "Il a dit «\u00a0DÉJÀ\u00a0» et «\u00a0ÇÀ ET LÀ\u00a0!\u00a0»",
    "Elle a murmuré «été…» puis “voilà…”",
    "Câ…” și “sâ”, “mâ…”",
    "the letters “Ä”, “Ö”, “Ü”, ‘Ñ’, ‘Ã’ and ‘Ø’",
    "3×… and 4×– are no letters",
]


def as_windows_1252(text: str) -> str:
    return "".join(bytes([b]).decode("cp1252") if b not in UNDEFINED else chr(b) for b in text.encode())


@pytest.mark.parametrize("text", CORRECT)
def test_correct_text_is_no_mojibake(text: str) -> None:
    assert mojibake(text) is None


@pytest.mark.parametrize("text", SENTENCES.values(), ids=SENTENCES)
def test_sentences_that_were_decoded_wrongly(text: str) -> None:
    assert mojibake(as_windows_1252(text)) is not None


@pytest.mark.parametrize("text", [*"éüß’“–…€ñ°你я👋àÄÜ«"])
def test_what_windows_1252_makes_of_utf_8(text: str) -> None:
    """Each alone, and inside a word."""
    assert mojibake(f"before {as_windows_1252(text)} after") is not None
    assert mojibake(f"wo{as_windows_1252(text)}rd") is not None
