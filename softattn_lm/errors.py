"""The one exception class for a person's fault: it becomes one line on stderr and exit status 2."""


class UserError(ValueError):
    """Names the setting, what came, what is allowed and what to type. Anything else that is raised is our fault."""
