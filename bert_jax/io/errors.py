"""An error of a library as one line of a message."""


def first_line(error: BaseException, limit: int = 200) -> str:
    """Return the first line of an error's text, cut to ``limit`` characters, without a final
    period; its type for an empty text."""
    lines = str(getattr(error, "message", None) or error).strip().splitlines()
    return lines[0][:limit].rstrip(".") if lines else type(error).__name__


def one_line(error: BaseException, limit: int | None = None) -> str:
    """Return the whole text of an error with every run of blanks as one space, cut to ``limit`` characters."""
    return " ".join(str(error).split())[:limit] or type(error).__name__
