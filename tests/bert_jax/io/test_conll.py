"""CoNLL-U: words are neither ranges nor empty nodes; damaged files are refused in one line."""

import gzip

import pytest

from bert_jax.io.conll import conll_sentences, read_treebank

TEXT = """# newdoc id = a
# text = don't go
1-2\tdon't\t_\t_\t_\t_\t_\t_\t_\t_
1\tdo\tdo\tAUX\tVB\t_\t3\taux\t3:aux\t_
2\tn't\tnot\tPART\tRB\t_\t3\tadvmod:neg\t_\t_
2.1\tghost\t_\tX\t_\t_\t_\t_\t3:dep\t_
3\tgo\tgo\tVERB\tVB\t_\t0\troot\t_\t_

# newdoc id = b
1\tnew york\tnew york\tPROPN\tNNP\t_\t0\troot\t_\tSpaceAfter=No
"""


@pytest.mark.parametrize("name", ["a.conllu", "a.conllu.gz"])
def test_a_treebank(tmp_path, name):
    path = tmp_path / name
    content = TEXT.replace("\n", "\r\n").encode() if name.endswith("u") else TEXT.encode()
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    first, second = read_treebank(path)
    assert first == (("do", "n't", "go"), ("AUX", "PART", "VERB"), (2, 2, -1), ("aux", "advmod:neg", "root"))
    assert second == (("new york",), ("PROPN",), (-1,), ("root",))


def test_documents_and_lines():
    lines = list(enumerate(TEXT.splitlines(), 1))
    assert [(one.line, one.document, len(one.rows)) for one in conll_sentences(lines, is_conllu=True)] == [
        (4, 1, 3), (10, 2, 1),
    ]  # fmt: skip
    plain = [(1, "# O"), (2, "a  B-x")]
    (one,) = conll_sentences(plain, is_conllu=False)
    assert one.rows == [(1, ["#", "O"]), (2, ["a", "B-x"])]


def test_what_is_no_treebank(tmp_path):
    def refused(content, message, name="x.conllu"):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message) as error:
            list(read_treebank(path))
        assert "\n" not in str(error.value) and str(path) in str(error.value)

    refused(b"1\ta\tb\n", r":1: 3 column\(s\), but a word of CoNLL-U has 10")
    refused(b"1\ta\ta\tX\tX\t_\t" + b"7" * 5000 + b"\tx\t_\t_\n", r":1: head '7+' is not allowed")
    refused(b"He sat there.\n", r":1: 3 column\(s\), but a word of CoNLL-U has 10")
    allowed = "use 0, or the id of another word, up to 3"
    refused(TEXT.replace("\t3\taux", "\t9\taux").encode(), f":4: head '9' is not allowed; {allowed}")
    refused(TEXT.replace("\t3\taux", "\t1\taux").encode(), ":4: head '1' is not allowed")
    refused(TEXT.replace("\t3\taux", "\t_\taux").encode(), ":4: head '_' is not allowed")
    refused(
        TEXT.replace("\n\n# newdoc id = b", "").encode(),
        ":8: id '1', but word 4 of a sentence has the id 4; write a blank",
    )
    refused(TEXT.replace("3\tgo", "x\tgo").encode(), ":7: id 'x', but word 3")
    refused(b"# only a comment\n\n", "no sentences")
    refused(TEXT.encode("utf-16"), "not valid UTF-8")
    refused(gzip.compress(TEXT.encode())[:-9], "damaged", "x.conllu.gz")
    refused(TEXT.encode(), "damaged", "y.conllu.gz")
    with pytest.raises(ValueError, match="no such file; give a CoNLL-U file"):
        list(read_treebank(tmp_path / "missing.conllu"))
