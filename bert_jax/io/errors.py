"""Conversion of library errors to one line of text."""


def first_line(error: BaseException, limit: int = 200) -> str:
    """Return the first line of the text of an error, without a final period, truncated to ``limit`` characters.

    Returns the name of the error type if the text is empty.
    """
    lines = str(getattr(error, "message", None) or error).strip().splitlines()
    return lines[0][:limit].rstrip(".") if lines else type(error).__name__


def one_line(error: BaseException, limit: int | None = None) -> str:
    """Return the text of an error on one line, with normalized white space, truncated to ``limit`` characters.

    Returns the name of the error type if the text is empty.
    """
    return " ".join(str(error).split())[:limit] or type(error).__name__
