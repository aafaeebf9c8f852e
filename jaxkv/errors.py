"""The one exception a user's mistake ends in, and what to say when memory ran out."""


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


def describe_memory(error: Exception) -> str | None:
    """What to say when memory ran out, of the host or (as JAX and torch tell it) of a device; None for other errors."""
    remedy = "use a smaller model, --batch_size or --max_new_tokens"
    if isinstance(error, MemoryError):
        return f"out of memory; {remedy}"
    told = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory")
    if isinstance(error, RuntimeError) and any(words in str(error) for words in told):
        return f"the device is out of memory; {remedy}"
    return None
