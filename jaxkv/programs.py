"""Lets go of compiled programs before a process runs out of memory maps.

XLA gives each kernel that it compiles for a CPU three memory maps, and Linux allows a process some 65530 of them
(`vm.max_map_count`). Thirty quantizers on a model of six layers take 25000; beyond the limit LLVM aborts the process or
crashes it, as reported in jax-ml/jax issues 11923 and 27201.
"""

import pathlib

SHARE = 0.5  # of the limit: the next program of a deep model may take thousands


def count_maps() -> tuple[int, int] | None:
    """Memory maps of this process and how many it may have; None where the system does not say."""
    try:
        held = pathlib.Path("/proc/self/maps").read_bytes().count(b"\n")
        return held, int(pathlib.Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return None


def release_programs() -> bool:
    """Drops all compiled programs if their maps near the limit, and says whether it did.

    What is needed again is compiled again, or read from the compilation cache: the same program with the same bits.
    """
    maps = count_maps()
    if maps is None or maps[0] < SHARE * maps[1]:
        return False
    import jax

    jax.clear_caches()
    return True
