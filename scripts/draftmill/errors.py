"""The one exception for everything a user can mend."""


class DraftmillError(Exception):
    """One sentence: the file or key, what was found, what was expected, what to do."""
