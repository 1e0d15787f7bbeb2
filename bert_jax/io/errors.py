"""Errors of libraries as one line of text."""


def first_line(error: BaseException, limit: int = 200) -> str:
    """Return the first line of an error's text, at most ``limit`` characters, without a final period; the name of
    its type if the text is empty."""
    lines = str(getattr(error, "message", None) or error).strip().splitlines()
    return lines[0][:limit].rstrip(".") if lines else type(error).__name__


def one_line(error: BaseException, limit: int | None = None) -> str:
    """Return the text of an error on one line (white space becomes single spaces), at most ``limit`` characters."""
    return " ".join(str(error).split())[:limit] or type(error).__name__
