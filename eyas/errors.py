"""The one exception that a person is meant to read."""


class EyasError(Exception):
    """Says what is wrong, where, and what to do, in one line; programs print it and exit with status 1."""
