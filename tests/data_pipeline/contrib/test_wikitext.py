"""Paragraphs of wikitext: what is kept, what is dropped, and broken markup."""

import random
import re
import time
from collections import Counter

import pytest

from data_pipeline.contrib.wikipedia.paragraphs import article_paragraphs

NAMESPACES = {"file": "6", "image": "6", "datei": "6", "category": "14", "portal": "100", "media": "-2"}
LEFT_OVER = re.compile(r"\[\[|\]\]|\{\{|\}\}|\{\||\|\}|'''|</?[A-Za-z][^<>]*>|[\x00-\x08]")


def render(text: str) -> list[str]:
    return article_paragraphs(text, NAMESPACES, Counter())


def line(text: str) -> str:
    """The only paragraph of ``text``."""
    (paragraph,) = render(text)
    return paragraph


@pytest.mark.parametrize(
    ("wikitext", "plain"),
    [
        # links
        ("an [[apple]]s and [[pear tree|pears]]", "an apples and pears"),
        ("[[Ham (son of Noah)|Ham]]ito-[[Shem|Sem]]itic", "Hamito-Semitic"),
        ("the [[Mercury (planet)|]] and [[:Category:Planets]]", "the Mercury and Category:Planets"),
        ("see [[Portal:Space|space]] and [[#Orbit]]", "see space and Orbit"),
        ("[[a|[b] c]] and [[x|[y]]]", "[b] c and [y]"),
        ("word [[wikt:word|word]], [[s:Text|text]][[de:Wort]].", "word word, text."),
        ("a [http://a.org label b] and [//a.org c][https://b.org/x?y=z].", "a label b and c."),
        ("a [[http://a.org label]] b", "a label b"),
        ("before [[File:A.jpg|thumb|a [[cat]] {{x|y}} [http://a b]]] after", "before after"),
        ("before [[Bild:A.jpg|mini|a cat]] [[Datei:B.png]] after[[Category:Cats| ]]", "before after"),
        ("listen to [[Media:A.ogg|this]]", "listen to this"),
        # quotes: italic, bold, apostrophes
        ("'''Bold''', ''italic'', '''''both''''' and l'eau", "Bold, italic, both and l'eau"),
        ("''Time'''s cover", "Time's cover"),
        ("angle ''θ''<sub>''i''</sub> and ''[[a|''b'']]''", "angle θi and b"),
        # references, comments, formulas, entities, nowiki
        ('one<ref name="a">{{cite|x}} [[y]]</ref>, two<ref name=a />.', "one, two."),
        ("a <!-- b [[c]] --> d<math>x_1 {{y}}</math> &amp; &lt;e&gt;&nbsp;f&#8211;g &notanentity;", None),
        ("<nowiki>[[a]] ''b'' {{c}} &amp; <i>d</i></nowiki> e", "[[a]] ''b'' {{c}} & <i>d</i> e"),
        (
            "H<sub>2</sub>O, x<sup>2</sup>, <small>small</small> <span style='a'>b</span><br />c",
            "H2O, x2, small b c",
        ),
        ("<nowiki>* a</nowiki> b", "* a b"),
        ("__NOTOC__text __INDEX__ end", "text end"),
        ("so\u00adft\u200b \u3000 wide", "soft wide"),
        ("-{zh-hans:计算机; zh-hant:電腦}- 和 -{A}-", "计算机 和 A"),
    ],
)
def test_inline(wikitext: str, plain: str | None) -> None:
    assert line(wikitext) == (plain or "a d & <e> f–g &notanentity;")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{convert|5|km|mi}}", "5 km"),
        ("{{convert|401056|km|0|abbr=on}}", "401,056 km"),
        ("{{convert|5|to|10|sqmi|km2}}", "5 to 10 sq mi"),
        ("{{Convert|6|ft|1|in|m}}", "6 ft 1 in"),
        ("{{convert|1|-|2.5|C}}", "1–2.5 °C"),
        ("{{lang|fr|texte}}", "texte"),
        ("{{lang-de|Wort}}", "German: Wort"),
        ("{{transl|ar|ALA|ilāh}}", "ilāh"),
        ("{{nihongo|sword taking|太刀取り|tachi-dori}}", "sword taking (太刀取り, tachi-dori)"),
        ("{{zh|c=中文|p=Zhōngwén}}", "Chinese: 中文; pinyin: Zhōngwén"),
        ("{{IPA|/a/}}", "/a/"),
        ("{{IPAc-en|pron|ˈ|æ|l|ɡ|ə}}", "pronounced /ˈælɡə/"),
        ("{{respell|AL|gə}}", "AL-gə"),
        ("{{as of|2015|6}}", "As of June 2015"),
        ("{{As of|2010|lc=y}}", "as of 2010"),
        ("{{birth date|1809|2|12}}", "February 12, 1809"),
        ("{{nowrap|1=a = {{frac|1|2}}}}", "a = 1/2"),
        ("{{nowrap|{{lc:A=B}}}}", "a=b"),
        ("{{val|6.24|e=18|u=J}}", "6.24×1018 J"),
        ("{{chem|NH|4|+}}", "NH4+"),
        ("{{formatnum:12345}}", "12,345"),
        ("{{uc:abc}}", "ABC"),
        ("{{ill|de|Titel|label}}", "label"),
        ("{{USS|Hornet|CV-12}}", "USS Hornet"),
        ("a{{snd}}b", "a – b"),
        ("[[a{{!}}b]]", "b"),
        ("{{{1|default}}}", "default"),
        ("{{sic|wrod}}", "wrod [sic]"),
        ("{{lang|fr|[[chat|chats]] ''noirs''}}", "chats noirs"),
    ],
)
def test_templates_with_prose(template: str, text: str) -> None:
    assert line(f"It is {template}, they say.") == f"It is {text}, they say."


@pytest.mark.parametrize(
    ("wikitext", "plain"),
    [
        ("Rome ({{audio|a.ogg}}) is", "Rome is"),
        ("Rome ({{audio|a.ogg}}, {{x}}; born 1 May) is", "Rome (born 1 May) is"),
        ("Rome (Greek: {{unknown|x}}, ''Romē'') is", "Rome (Romē) is"),
        ("Rome (12 km{{cn}}) and f() and (£)", "Rome (12 km) and f() and (£)"),
        ("Rome {{cn}} {{when}} , and {{x}} more{{dubious}}.", "Rome, and more."),
        ("（{{x}}）は", "は"),
        ("where <math>x</math> is", "where is"),
    ],
)
def test_holes_of_dropped_elements_close(wikitext: str, plain: str) -> None:
    assert line(wikitext) == plain


def test_blocks_other_than_paragraphs_are_dropped_and_counted() -> None:
    counts: Counter[str] = Counter()
    text = """{{Infobox
| name = [[x]]
| list = {{plainlist|
* a
}}
}}
'''First''' paragraph
goes on.<!-- comment
-->
<!-- a line of its own -->
Still the first.

== Heading ==
* list
** deeper
# number
: indented
; term
{| class="x"
! a || b
|-
| c
{| nested
|}
| d
|}
Second <ul><li>item</li></ul>

 preformatted
<gallery>
File:A.jpg|caption
</gallery>
<blockquote>
 A quotation
</blockquote> Third.
<poem>
 A line,
: another.
</poem>
{{quote|Said so.|Author}} Fourth.
<table><tr><td>cell</td></tr></table>
----
1 + 2 = 3
[[Category:X]]
[[fr:X]]
"""
    assert article_paragraphs(text, NAMESPACES, counts) == [
        "First paragraph goes on. Still the first.", "Second", "A quotation", "Third.", "A line, another.",
        "Said so.", "Fourth.",
    ]  # fmt: skip
    assert counts == {
        "templates without prose": 2, "templates replaced by their text": 1, "comments": 2, "headings": 1,
        "list lines": 6, "tables": 3, "preformatted lines": 1, "other elements": 1, "categories": 1,
        "links to other languages": 1, "paragraphs without a letter": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("wikitext", "paragraphs"),
    [
        ("a {{x|y=[[z]]\n\nb [[c|d]]", ["a", "b d"]),
        ("{{Infobox\n| a = b\n'''Bold''' text", ["Bold text"]),
        ("{|\n| a\n\n| b [[c]]\n== H ==\ntext [[d|e]].", ["text e."]),
        ("{|\n| {{x\n|}\ntext", ["text"]),
        ("a [[b, c [[d]] e", ["a b, c d e"]),
        ("a {{x|[[b}} c", ["a c"]),
        ("a ]] b }} c |} d", ["a b c d"]),
        ("a [[File:b.jpg|thumb|c\n\nd", ["a", "d"]),
        ("a<ref>b {{c\n== H ==\nd<ref>e</ref>", ["a", "d"]),
        ("a<ref name=x> b.<ref>c</ref> d", ["a b. d"]),
        ("a <!-- b\n\nc", ["a"]),
        ("a <math>b\nc", ["a c"]),
        ("a '''b ''c", ["a 'b c"]),
        ("a <b c < d > e </i", None),
        ("<poem>\na\n== H ==\n: b\nc", ["a", "c"]),
        ("", []),
    ],
)
def test_broken_markup_hides_little(wikitext: str, paragraphs: list[str] | None) -> None:
    found = render(wikitext)
    assert found == paragraphs if paragraphs is not None else not LEFT_OVER.search(" ".join(found))


TOKENS = [
    "{{", "}}", "[[", "]]", "{|", "|}", "|", "<ref>", "</ref>", "<ref/>", "a", "b c", "=", "==", "*", ":", "''",
    "'''",
    "</nowiki>", "<!--", "-->", "(", ")", "&amp;", "{{convert|", "{{lang|fr|", "File:", "[http://a ", "<poem>",
    "</poem>", "<table>", "</table>", "{", "}", "[", "]", "-{", "}-", "{{val|", "{{frac|", "{{quote|", "{{nihongo|",
    "{{!}}", "{{x}}", "<br>", "<", ">", "\x02", "\x06", "{{as_of|", "\n", "\n", " ",
]  # fmt: skip


def test_random_markup_leaves_nothing_over() -> None:
    rng = random.Random(0)
    kept = 0
    for _ in range(3000):
        text = "".join(rng.choice(TOKENS) for _ in range(rng.randrange(60)))
        for paragraph in render(text):
            kept += 1
            assert not LEFT_OVER.search(paragraph), (text, paragraph)
            assert paragraph == " ".join(paragraph.split())
    assert kept > 900


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "token", ["{{", "[[", "]]", "<ref>", "<math>", "<table>", "<!--", "(", "({{x}}", "[http:a", "{|\n"]
)
def test_time_is_proportional_to_the_length(token: str) -> None:
    def seconds(count: int) -> float:
        start = time.process_time()
        render(token * count + "}}]]|}")
        return time.process_time() - start

    seconds(1000)
    assert seconds(40_000) < 40 * max(seconds(4_000), 0.005)  # quadratic: 100 times
