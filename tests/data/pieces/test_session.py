"""Messages in HTML, as help desks keep them."""

from hivetune.data.pieces.session import without_markup


def test_text_with_signs_that_are_no_tags_stays() -> None:
    assert without_markup("if a < b and c > d, use <stdio.h>") == "if a < b and c > d, use <stdio.h>"
    assert without_markup("<p>a &lt; b</p><p>c</p>") == "a < b\nc"
