"""Text of the templates that carry prose; all others are dropped.

The names come from the English Wikipedia; many exist in other languages too. A dump does not hold what
a template displays in a form that can be used without MediaWiki, so that each kind has a rule here. Units and
dates are written as they were given: ``{{convert|5|km|mi}}`` is "5 km".
"""

import re
from collections.abc import Callable

Values = dict[str, str]  # argument of a template by name; positional ones are "1", "2", ...

_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip
_UNITS = {
    "c": "°C", "f": "°F", "sqmi": "sq mi", "sqft": "sq ft", "sqkm": "km2", "cuft": "cu ft", "cumi": "cu mi",
    "acre": "acres", "usgal": "US gal", "impgal": "imp gal", "lbs": "lb", "nmi": "nautical miles", "ton": "tons",
    "tonne": "tonnes", "kn": "knots", "kmh": "km/h", "mile": "miles", "foot": "feet", "inch": "inches",
    "ozt": "troy ounces", "koilbbl/d": "thousand barrels per day", "e6km2": "million km2",
}  # fmt: skip
_RANGES = {
    "-": "–", "–": "–", "to": " to ", "and": " and ", "or": " or ", "by": " by ", "x": " × ", "*": " × ",
    "×": " × ",
    "+/-": " ± ", "±": " ± ", "to(-)": " to ", "to about": " to about ", "and(-)": " and ", ",": ", ",
    "xx": " × ",
}  # fmt: skip
_LANGUAGES = {
    "af": "Afrikaans", "ar": "Arabic", "az": "Azerbaijani", "be": "Belarusian", "bg": "Bulgarian", "bn": "Bengali",
    "ca": "Catalan", "cs": "Czech", "cy": "Welsh", "da": "Danish", "de": "German", "el": "Greek", "en": "English",
    "eo": "Esperanto", "es": "Spanish", "et": "Estonian", "eu": "Basque", "fa": "Persian", "fi": "Finnish",
    "fr": "French", "ga": "Irish", "gd": "Scottish Gaelic", "gl": "Galician", "grc": "Ancient Greek",
    "he": "Hebrew",
    "hi": "Hindi", "hr": "Croatian", "hu": "Hungarian", "hy": "Armenian", "id": "Indonesian", "is": "Icelandic",
    "it": "Italian", "ja": "Japanese", "ka": "Georgian", "kk": "Kazakh", "ko": "Korean", "la": "Latin",
    "lt": "Lithuanian", "lv": "Latvian", "mk": "Macedonian", "mn": "Mongolian", "mr": "Marathi", "ms": "Malay",
    "nl": "Dutch", "no": "Norwegian", "pa": "Punjabi", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian",
    "ru": "Russian", "rus": "Russian", "sa": "Sanskrit", "sk": "Slovak", "sl": "Slovene", "sq": "Albanian",
    "sr": "Serbian", "sv": "Swedish", "sw": "Swahili", "ta": "Tamil", "te": "Telugu", "th": "Thai", "tl": "Tagalog",
    "tr": "Turkish", "uk": "Ukrainian", "ur": "Urdu", "uz": "Uzbek", "vi": "Vietnamese", "yi": "Yiddish",
    "zh": "Chinese",
}  # fmt: skip
_CHINESE = {
    "c": "Chinese", "s": "simplified Chinese", "t": "traditional Chinese", "p": "pinyin", "w": "Wade–Giles",
    "j": "Jyutping", "l": "lit.",
}  # fmt: skip
_MUSIC = {"flat": "♭", "b": "♭", "sharp": "♯", "#": "♯", "natural": "♮", "doubleflat": "𝄫", "doublesharp": "𝄪"}
# Words of {{IPAc-en}} that are displayed before the sounds, and others that are not displayed.
_IPA_WORDS = {"pron": "pronounced ", "pronunciation": "pronunciation: ", "also": "also ", "or": "or "}
_IPA_SILENT = frozenset({"icon", "lang", "local", "uk", "us", "audio"})
_NUMBER = re.compile(r"[-+−]?\d+(?:\.\d+)?$")

# ------------------------------------------------------------------ helpers


def _positional(values: Values, start: int = 1) -> list[str]:
    """Return the nonempty positional arguments from ``start`` on."""
    count = next(i for i in range(start, len(values) + start + 1) if str(i) not in values)
    return [value for i in range(start, count) if (value := values[str(i)])]


def _argument(name: str) -> Callable[[Values], str]:
    return lambda values: values.get(name, "")


def _constant(text: str) -> Callable[[Values], str]:
    return lambda values: text


def _between(before: str, after: str) -> Callable[[Values], str]:
    return lambda values: f"{before}{values.get('1', '')}{after}"


def _joined(separator: str) -> Callable[[Values], str]:
    return lambda values: separator.join(_positional(values))


def _grouped(number: str) -> str:
    """Return a number with commas between groups of three digits, as templates display it."""
    if not _NUMBER.match(number):
        return number
    whole, point, fraction = number.partition(".")
    sign, digits = (whole[0], whole[1:]) if whole[0] in "-+−" else ("", whole)
    grouped = f"{int(digits):,}" if len(digits) < 40 and not digits.startswith("0") else digits
    return sign + grouped + point + fraction


# ------------------------------------------------------------------ numbers and dates


def _convert(values: Values) -> str:
    """Return the quantities that ``{{convert}}`` was given, without the converted ones."""
    words = [values[str(i)] for i in range(1, 12) if str(i) in values]
    out = ""
    place = 0
    while place < len(words):
        out += _grouped(words[place])
        following = words[place + 1] if place + 1 < len(words) else ""
        if following in _RANGES and place + 2 < len(words):
            out += _RANGES[following]
            place += 2
            continue
        unit = _UNITS.get(following.lower(), following)
        out += f" {unit}" if unit else ""
        # A further quantity and its unit: {{convert|5|ft|10|in|m}}. The target unit is a word, not a number.
        is_pair = place + 3 < len(words) and _NUMBER.match(words[place + 2]) and not _NUMBER.match(words[place + 3])
        if not is_pair or words[place + 3] in ("", "abbr"):
            break
        out += " "
        place += 2
    return out


def _value(values: Values) -> str:
    """Return the number in a ``{{val}}`` template with its power of ten and its unit."""
    exponent, unit = values.get("e", ""), values.get("u", "") or values.get("ul", "")
    parts = [_grouped(values.get("1", "")), f"×10{exponent}" if exponent else "", f" {unit}" if unit else ""]
    return "".join(parts)


def _fraction(values: Values) -> str:
    numbers = _positional(values)
    if len(numbers) < 2:
        return f"1/{numbers[0]}" if numbers else ""
    return f"{numbers[0]} {numbers[1]}/{numbers[2]}" if len(numbers) > 2 else f"{numbers[0]}/{numbers[1]}"


def _as_of(values: Values) -> str:
    if values.get("alt"):
        return values["alt"]
    word = "Since" if values.get("since") else "As of"
    word = word.lower() if values.get("lc") else word
    return " ".join([word, _date_text(values, values.get("df") != "US")])


def _date_text(values: Values, day_first: bool) -> str:
    """Return the date in the arguments 1 (year), 2 (month) and 3 (day)."""
    year, month, day = (values.get(name, "") for name in "123")
    if month.isdecimal() and 1 <= int(month[:9]) <= 12:
        month = _MONTHS[int(month) - 1]
    day = day.removeprefix("0")
    if not month:
        return year
    if not day:
        return f"{month} {year}"
    return f"{day} {month} {year}" if day_first else f"{month} {day}, {year}"


def _date(values: Values) -> str:
    return _date_text(values, values.get("df", "").startswith("y"))


# ------------------------------------------------------------------ languages


def _ipa_english(values: Values) -> str:
    sounds: list[str] = []
    word = ""
    for sound in _positional(values):
        if not sounds and sound.lower() in _IPA_WORDS:
            word = _IPA_WORDS[sound.lower()]
        elif sounds or sound.lower() not in _IPA_SILENT:
            sounds.append(" " if sound == "_" else sound)
    return f"{word}/{''.join(sounds)}/" if sounds else ""


def _respelling(values: Values) -> str:
    return "-".join(_positional(values)).replace("-_-", " ")


def _nihongo(values: Values) -> str:
    english, *others = (values.get(name, "") for name in "1234")
    inside = ", ".join(filter(None, others))
    return f"{english} ({inside})" if english and inside else english or inside


def _chinese(values: Values) -> str:
    parts = [f"{label}: {values[key]}" for key, label in _CHINESE.items() if values.get(key)]
    return "; ".join(parts) or values.get("1", "")


def _transliteration(values: Values) -> str:
    return values.get("3") or values.get("2") or values.get("1", "")


def _language(code: str, values: Values) -> str:
    """Return the text of ``{{lang-CODE|text}}``, with the language before it as MediaWiki displays it."""
    text = values.get("1", "")
    name = _LANGUAGES.get(code, "")
    return f"{name}: {text}" if name and text else text


# ------------------------------------------------------------------ passages and names


def _passage(values: Values) -> str:
    text = values.get("text") or values.get("quote") or values.get("1", "")
    return f"\n\n{text}\n\n"


def _ship(values: Values) -> str:
    prefix, name = values.get("1", ""), values.get("2", "")
    return f"{prefix} {name}".strip()


def _ship_class(values: Values) -> str:
    return f"{values.get('1', '')}-class {values.get('2', '')}".strip()


def _other_language(values: Values) -> str:
    """Return the label of a link to an article that exists in another language only."""
    words = _positional(values)
    if not words or values.get("lt"):
        return values.get("lt", "")
    # {{ill|de|Title|Label}} is an older order of the arguments.
    return words[-1] if words[0] in _LANGUAGES and len(words) > 1 else words[0]


def _sic(values: Values) -> str:
    words = "".join(_positional(values))
    return words if words and values.get("hide") else f"{words} [sic]".strip()


def _money(sign: str) -> Callable[[Values], str]:
    return lambda values: f"{sign}{values.get('1', '')}"


def _verse(values: Values) -> str:
    return " ".join(_positional(values)[:2])


_RULES: dict[str, Callable[[Values], str]] = {}


def _register(names: str, rule: Callable[[Values], str]) -> None:
    _RULES.update(dict.fromkeys((name.strip() for name in names.split(",")), rule))


_register(
    "nowrap, nobr, nobreak, nobold, noitalic, avoid wrap, small, smaller, large, larger, big, huge, resize, "
    "center, em, strong, abbr, tooltip, mono, code, tt, samp, kbd, keypress, key press, var, mvar, math, "
    "bigmath, sub, sup, sc, sc1, smallcaps, small caps, aut, unicode, ipa, ipaslink, ipalink, ipa link, not a "
    "typo, notatypo, typo, visible anchor, vanchor, clarify span, citation needed span, cn span, overline, "
    "underline, strikethrough, hebrew, nq, nastaliq, script/arabic, script/hebrew, script/nastaliq, flag, "
    "flagcountry, flagu, flaglink, spelled number, oldstyledate, railgauge, track gauge",
    _argument("1"),
)
_register(
    "lang, script, rtl-lang, wikt-lang, color, font color, fontcolor, background color, native name, native phrase",
    lambda values: values.get("2") or values.get("1", ""),
)
_register("transl, transliteration, translit", _transliteration)
_register("convert, cvt", _convert)
_register("val", _value)
_register("height", lambda values: " ".join(f"{values[n]} {n}" for n in ("ft", "in", "m", "cm") if values.get(n)))
_register("e", _between("×10", ""))
_register("frac, fraction, sfrac", _fraction)
_register("number, num, nts", lambda values: _grouped(values.get("1", "")))
_register("as of, asof", _as_of)
_register(
    "start date, end date, start date and age, birth date, birth date and age, dob, death date, date, bd", _date
)
_register("ipac-en", _ipa_english)
_register("respell, pronunciation respelling key", _respelling)
_register("nihongo, nihongo2, nihongo3, nihongo krt", _nihongo)
_register("zh, zh-t, zh-s, zh-c, zh-cp", _chinese)
_register(
    "quote, blockquote, cquote, bquote, quotation, centered pull quote, poemquote, poem quote, long quote", _passage
)
_register("ship", _ship)
_register("sclass, sclass-, sclass2, sclass2-", _ship_class)
_register("ill, interlanguage link, interlanguage link multi, link-interwiki, illm", _other_language)
_register("sic", _sic)
_register("bibleverse, bibleref, bibleref2, bibleverse-nb", _verse)
_register("linktext, chem, chem2, gaps", _joined(""))
_register("circa, c., ca", lambda values: f"c. {values.get('1', '')}".strip())
_register("floruit, fl.", lambda values: f"fl. {_joined('–')(values)}".strip())
_register("reign, r.", lambda values: f"r. {_joined('–')(values)}".strip())
_register("us$, usd", _money("US$"))
_register("gbp, £, pound sterling", _money("£"))
_register("euro, eur, €", _money("€"))
_register("inr, indian rupee, ₹", _money("₹"))
_register("a$, aud", _money("A$"))
_register("c$, cad", _money("C$"))
_register("¥, jpy", _money("¥"))
_register("angbr, angle bracket, angle brackets", _between("⟨", "⟩"))
_register("bracket, brackets", _between("[", "]"))
_register('", quote inline', _between('"', '"'))
_register("music", lambda values: _MUSIC.get(values.get("1", ""), values.get("1", "")))
for _name in (
    "USS", "HMS", "HMAS", "HMCS", "HMNZS", "RMS", "SS", "MV", "MS", "MY", "RV", "USCGC", "USNS", "SMS", "INS",
):  # fmt: skip
    _register(_name.lower(), lambda values, prefix=_name: f"{prefix} {values.get('1', '')}")  # type: ignore[misc]
for _names, _text in (
    ("!", "|"), ("=", "&#61;"), ("'", "'"), ("' \"", "'\""), ("\" '", "\"'"), ('-"', '"'), ("'s", "'s"),
    ("'\"", "'\""),
    ("ndash, en dash, –", "–"), ("snd, snds, spaced ndash, spaced en dash, dash", " – "),
    ("mdash, em dash, emdash", "—"), ("mdashb, spaced mdash, spaced em dash", " — "),
    ("nbsp, spaces, space, hairsp, thinsp, thin space", " "),
    ("·, middot, dot, interpunct", " · "), ("•, bullet", " • "), ("pi", "π"), ("sharp", "♯"), ("flat", "♭"),
    ("shy, zwj, zwnj, zwsp, wbr, wj", ""), ("minus", "−"), ("times", "×"), ("okina, hamza", "ʻ"), ("ayin", "ʿ"),
    ("asterisk, *", "&#42;"), ("number sign", "#"), ("ellipsis, ...", "..."), ("colon", "&#58;"),
    ("degree, deg", "°"), ("carbon", "carbon"), ("hydrogen", "hydrogen"), ("oxygen", "oxygen"),
    ("nitrogen", "nitrogen"),
):  # fmt: skip
    _register(_names, _constant(_text))
_FUNCTIONS: dict[str, Callable[[str], str]] = {
    "formatnum": _grouped,
    "lc": str.lower,
    "uc": str.upper,
    "lcfirst": lambda text: text[:1].lower() + text[1:],
    "ucfirst": lambda text: text[:1].upper() + text[1:],
}
_LANG = re.compile(r"lang-([a-z-]+)$")
_IPA = re.compile(r"ipa-[a-z-]+$")


def expand(arguments: list[str]) -> str | None:
    """Return the text that a template contributes to prose, or None if it contributes none.

    ``arguments`` are the name of the template and its arguments, in which inner markup is resolved already.
    """
    name = " ".join(arguments[0].replace("_", " ").split()).lower().removeprefix("template:")
    function, colon, _ = name.partition(":")
    if colon and function in _FUNCTIONS:
        return _FUNCTIONS[function](arguments[0].partition(":")[2].strip())
    rule = _RULES.get(name)
    if rule is None:
        if language := _LANG.match(name):
            return _language(language[1], _values(arguments)) or None
        if _IPA.match(name):
            sounds = _values(arguments).get("1", "")
            return f"[{sounds}]" if sounds else None
        return None
    return rule(_values(arguments)) or None


def _values(arguments: list[str]) -> Values:
    values: Values = {}
    count = 0
    for argument in arguments[1:]:
        name, equals, value = argument.partition("=")
        if equals:
            values[name.strip().lower()] = value.strip()
        else:
            count += 1
            values[str(count)] = argument.strip()
    return values
