"""The words of the site's search, for pages in English and in Chinese in one index.

Latin words are stemmed; a run of Chinese characters becomes its pairs of neighbors, so that a query needs no
dictionary to find a part of a longer word. Particles and question words are no words of a query.
"""

import re

from sphinx.search.en import SearchEnglish

QUESTIONS = "am any can could did do does from get have how i its me my one our should so than use using want we"
QUESTIONS += " many much need what when where which who why would you your"
PARTICLES = "为什么|什么|怎么样|怎么|怎样|如何|哪些|哪个|可以|能否|是否|多少|我的|一个"
PARTICLES += "|的|了|吗|呢|我|要|在|和|与|把"
_SPLIT = re.compile(r"[\u3400-\u9fff]+|[^\W\u3400-\u9fff]+")


def words(text: str) -> list[str]:
    """Return the Latin words of ``text``, and the pairs of neighboring Chinese characters."""
    found = []
    for run in _SPLIT.findall(text):
        if "\u3400" <= run[0] <= "\u9fff":
            parts = [part for part in re.split(PARTICLES, run) if part]
            found += [part[i : i + 2] for part in parts for i in range(max(1, len(part) - 1))]
        else:
            found.append(run)
    return found


class EnglishAndChinese(SearchEnglish):
    """English words and Chinese pairs of characters."""

    lang = "en-zh"
    language_name = "English"  # the name of its stemmer in JavaScript
    stopwords = SearchEnglish.stopwords | set(QUESTIONS.split())
    # The same as ``words``, in the browser.
    js_splitter_code = f"""
var splitQuery = (query) =>
  (query.match(/[\\u3400-\\u9fff]+|(?:(?![\\u3400-\\u9fff])[\\p{{L}}\\p{{N}}_])+/gu) || []).flatMap((run) => {{
    if (run[0] < "\\u3400" || run[0] > "\\u9fff") return [run];
    const parts = run.split(/{PARTICLES}/).filter((part) => part);
    return parts.flatMap((part) =>
      part.length === 1 ? [part] : Array.from({{ length: part.length - 1 }}, (_, i) => part.slice(i, i + 2)));
  }});
"""

    def split(self, input: str) -> list[str]:
        """Return the words of a page, as ``words`` does."""
        return words(input)
