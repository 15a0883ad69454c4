"""What a person reads when something is wrong: the exception class for their faults, and text that is safe to show."""


class UserError(ValueError):
    """Becomes one line on stderr and exit status 2. Names the setting, what came, what is allowed and what to type.

    Anything else that is raised is our fault.
    """


def visible(text: str) -> str:
    r"""Control characters spelled out, \x1b, all but line break and tab: no text of a corpus, a name or a model moves
    the cursor, changes colours or turns the direction of writing.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c in "\n\t" or c.isprintable() or (c.isspace() and ord(c) >= 160) else c.encode("unicode_escape").decode()
        for c in text
    )
