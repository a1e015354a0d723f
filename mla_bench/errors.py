"""The one error class for what the user can put right."""


class MlaBenchError(Exception):
    """Bad input, or a surrounding that does not allow the request.

    The message is one line: what was wrong, and what would work. The command line prints it
    without a traceback and exits with 2.
    """
