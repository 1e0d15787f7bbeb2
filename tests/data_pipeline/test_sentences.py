"""The sentence splitter: English as ever, and the marks of other scripts."""

import unicodedata

import pytest

from data_pipeline.text.sentences import is_lower_case, split_sentences


@pytest.mark.parametrize(
    "sentences",
    [
        ["Hello there.", "How are you?", "Fine!"],
        ["Dr. Smith met Mr. J. R. Jones at 5 p.m. on Monday.", "They talked."],
        ["It cost 3.50 dollars, i.e. too much.", "He left ... and came back.", "So did I.", "Really."],
        ['"Stop!" he cried.', '"Why?"', "“No idea.”", "(It was late.)", "Then rain."],
        ["Das ist z.B. ein Satz.", "Übrigens: noch einer."],
        ["Он пришёл в 5 ч. утра, т.е. рано.", "«Кто там?»", "Никто не ответил…", "Тихо."],
        ["see e.g. fig. 3 and no. 7 below."],
        ["今天天气很好。", "你好吗？", "他说：“好！”", "「走吧。」", "完"],
        ["no end of sentence"],
    ],
)
def test_sentence_splitting(sentences: list[str]) -> None:
    is_chinese = sentences[0][0] == "今"
    assert split_sentences(("" if is_chinese else " ").join(sentences)) == sentences


def test_sentence_splitting_loses_nothing_but_blanks() -> None:
    assert split_sentences("  ") == []
    assert split_sentences(" A b.  C d! ") == ["A b.", "C d!"]
    assert split_sentences("Wait...What? Yes.") == ["Wait...What?", "Yes."]


@pytest.mark.parametrize(
    "sentences",
    [
        ["मैं घर गया।", "तुम कहाँ हो?", "वह आया॥"],
        ["আমি যাই।", "তুমি এসো।"],
        ["میں گیا۔", "تم آئے۔", "کیوں؟"],
        ["هل ذهبت؟", "نعم."],
        ["ሰላም ነው።", "ደህና ነህ፧", "አዎ።"],
        ["Նա գնաց։", "Հետո եկավ։"],
        ["သူသွားသည်။", "သူလာသည်။"],
        ["គាត់ទៅ។", "គាត់មក៕", "ល្អ។"],
        ["བོད་སྐད།", "ཡིན།"],
        ["ฉันไปตลาด", "เขาอยู่บ้าน"],
        ["ຂ້ອຍໄປ", "ລາວຢູ່"],
        ["הוא הלך.", "היא נשארה?", "כן!"],
        ["ის წავიდა.", "ის დარჩა."],
        ["Πού πας;", "Στην Αθήνα."],
        ["ᠮᠣᠩᠭᠣᠯ᠃", "ᠬᠡᠯᠡ᠃"],
        ["\U00011003\U00011047", "\U00011005\U00011048"],
    ],
)
def test_every_script_ends_its_sentences(sentences: list[str]) -> None:
    assert split_sentences(" ".join(sentences)) == sentences
    for sentence in sentences:
        assert split_sentences(sentence) == [sentence]


def test_marks_that_belong_together_end_one_sentence() -> None:
    assert split_sentences("བོད་སྐད། །ཡིན། །") == ["བོད་སྐད། །", "ཡིན། །"]
    assert split_sentences("वह आया ॥ १ ॥ वह गया ॥ २ ॥") == ["वह आया ॥ १ ॥", "वह गया ॥ २ ॥"]
    assert split_sentences("ต่าง ๆ ได้ในปี 2020 มี") == ["ต่าง ๆ ได้ในปี 2020 มี"]
    # Thai and Greek words in a text of another language.
    for text in ("The town of สวน นงนุช is here", "A candle (Greek: Τρικήριον; Slavonic: Троіца) burns"):
        assert split_sentences(text) == [text]


@pytest.mark.parametrize(
    "sentences",
    [
        ["he left.", "she stayed!", "why? nobody knows."],
        ["dr. smith met mr. j. r. jones at 5 p.m. on monday.", "they talked.", "so did i.", "it was late."],
        ["он ушёл.", "т.е. рано.", "она осталась."],
    ],
)
def test_text_without_capitals(sentences: list[str]) -> None:
    parts = [part for sentence in sentences for part in sentence.replace("? ", "?|").split("|")]
    text = " ".join(sentences)
    assert split_sentences(text, lower_case=True) == parts
    assert len(split_sentences(text)) < len(parts)  # cased text has capitals after its ends
    assert is_lower_case(text * 10, 200)
    assert not is_lower_case((text.capitalize() + " ") * 10, 200)


def test_which_text_has_no_capitals() -> None:
    assert is_lower_case("a " * 600 + "B", 200)
    assert not is_lower_case("a " * 200 + "B " * 5)
    assert not is_lower_case("123 456 \u0905\u0906 \u4e2d\u6587")  # scripts without case
    assert not is_lower_case("few letters", 200)


def test_hostile_text_takes_linear_time() -> None:
    for text in ("." * 300_000, ". " + " " * 300_000 + "%", "! " * 100_000, "\u0964 " * 100_000):
        assert "".join(split_sentences(text)).replace(" ", "") == text.replace(" ", "")


def test_marks_are_terminal_punctuation() -> None:
    from data_pipeline.text.sentences import _MARKS, _MARKS_BEYOND_BMP

    kinds = {unicodedata.category(char) for char in _MARKS + _MARKS_BEYOND_BMP.pattern if char not in "-[]"}
    assert kinds <= {"Po", "Lm", "Cn", "So"}
