"""The verdict on samples of a model's plain arms, by what a study makes of their records."""

import numpy as np

from jaxkv.experiments.divergence.cause import Evidence, decide, falls, measure_distance, strays


def of_model(samples_by_precision, precision):
    """The verdict on a precision of a model that was run in these."""
    distances = {p: measure_distance(samples) for p, samples in samples_by_precision.items()}
    apart = {
        p: np.concatenate([s["teacher_forced"]["mean_abs"] for s in samples])
        for p, samples in samples_by_precision.items()
    }
    sizes = {p: float(found[found > 0].mean()) if found.any() else 0.0 for p, found in apart.items()}
    return decide(
        Evidence(
            differs=any(not all(s["teacher_forced"]["bit_equal"]) for s in samples_by_precision[precision]),
            aligned=True,  # the gate passes: it runs none of these programs
            distances=list(distances.values()),
            wide="fp32" in distances,
            falls=[falls(p, sizes[p], sizes["fp32"]) for p in sizes if p != "fp32" and "fp32" in sizes],
            full_gate=False,
            strays=any(strays(found, float(apart[p].max())) for p, found in distances.items()),
        )
    )
