"""The doctor's second process: what it computes of the spec on stdin, as hashes in JSON."""

import json
import sys

from jaxkv.experiments.doctor.run import DoctorSpec, compute_hashes

if __name__ == "__main__":
    print(json.dumps(compute_hashes(DoctorSpec.from_json(json.load(sys.stdin)))))
