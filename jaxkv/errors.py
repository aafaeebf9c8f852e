"""The one exception a user's mistake ends in."""


class UserError(Exception):
    """A fault in what the user gave, with the remedy, in one line.

    Entry points print it as ``error: <message>`` and exit with code 2; no traceback.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


def nearest(name: str, known: list[str]) -> str:
    """Returns `` (did you mean 'x'?)`` for the closest known name, or an empty string."""
    import difflib

    match = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f" (did you mean '{match[0]}'?)" if match else ""


def offline_example(model: str = "test-gemma2") -> str:
    """Options that run without a network or weights, for remedies."""
    return f"--model={model} --checkpoint=random:0 --task=arith --prompt=zero_shot"
