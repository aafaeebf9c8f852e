"""Quantizers as statements on methods take them: what a name asks for, and when two caches may be compared."""

import re

KVARN = "kvarn"
PUBLISHED = ("tile", "first", "recent", "aux")  # options that leave KVarN what it is
BITS_CLOSE = 0.25  # bits an element of the whole cache that count as no more
CODES = re.compile(r"(?P<name>[a-z]+)(?::k(?P<k>\d+)v(?P=k)|:(?P<bits>\d+)|(?P<own>\d+))(?:,(?P<options>[^;]*))?")


def read_codes(quantizer: str) -> tuple[str, int, list[str]] | None:
    """Method, bits of a code and names of options; None where sides differ or the format has no such bits."""
    found = CODES.fullmatch(quantizer)
    if found is None:
        return None
    options = [option.partition("=")[0] for option in (found["options"] or "").split(",") if option]
    return found["name"], int(found["k"] or found["bits"] or found["own"]), options


def is_published_kvarn(quantizer: str) -> bool:
    """Whether a name asks for KVarN as its authors have it, whatever its tile, windows and auxiliaries."""
    codes = read_codes(quantizer)
    return codes is not None and codes[0] == KVARN and set(codes[2]) <= set(PUBLISHED)


def weigh_bits(more: float, worse: float, surely: bool) -> tuple[str, bool]:
    """Why a rival's bits keep the pair from deciding, empty if they do not; and whether it leaves a statement open.

    `more` are bits an element of its whole cache above KVarN's; `worse` is how much worse it is, `surely` whether its
    interval tells so.
    """
    if more < -BITS_CLOSE and worse > 0:
        return "is worse with fewer bits, so it does not count", False
    if more > BITS_CLOSE and not surely:
        return "has more bits, so it decides nothing", True
    return "", True
