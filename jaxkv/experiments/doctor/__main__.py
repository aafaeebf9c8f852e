"""The doctor's second process: what it computes of the spec on stdin, as hashes in JSON."""

import json
import sys

import msgspec

from jaxkv.experiments.doctor.run import DoctorSpec, compute_hashes

if __name__ == "__main__":
    print(json.dumps(compute_hashes(msgspec.json.decode(sys.stdin.buffer.read(), type=DoctorSpec))))
