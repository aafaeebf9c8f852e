"""For tests that change a run directory by hand, and want to be believed."""

import hashlib
import json

from jaxkv.records import fingerprint


def reseal(directory, known=None):
    """Has run.json fit its config and the first `known` bytes of samples.jsonl, those of all complete lines if None.

    A run that was killed knows of fewer lines than it has, at worst of none.
    """
    run = json.loads((directory / "run.json").read_text())
    lines = (directory / "samples.jsonl").read_bytes()
    kept = lines[: lines.rfind(b"\n") + 1 if known is None else known]
    run["samples"] = {"bytes": len(kept), "sha256": hashlib.sha256(kept).hexdigest()}
    run["fingerprint"] = fingerprint(run["config"])
    (directory / "run.json").write_text(json.dumps(run))
