"""The one loop of all experiments: what is missing is run, batches whole, each variant after the other."""

import pathlib
import weakref

import pytest

from jaxkv.experiments import experiment
from jaxkv.experiments.batches import Item, RunSpec
from jaxkv.experiments.driver import Runner, Took, run_missing
from jaxkv.experiments.experiment import EXPERIMENTS, NAMES

ITEMS = [Item(problem, (1,) * length, "") for problem, length in ((4, 3), (7, 3), (2, 5))]  # batches [4, 7] and [2]
EVERY = {(problem, variant) for problem in (4, 7, 2) for variant in ("a", "b")}


class Counting(Runner):
    """Notes what it is asked for. Its key is that of an experiment with a variant."""

    name = "attribution"

    def __init__(self, together=1):
        super().__init__(RunSpec(new_tokens=1, batch_size=2), {("a",): 1, ("b",): 2})
        self.together, self.calls = together, []

    def begin(self, batch, missing):
        self.calls.append(([item.problem for item in batch.items], missing))
        return batch.items

    def run(self, begun, variant):
        self.calls.append(variant)
        return [10 * variant + item.problem for item in begun]

    def tell_time(self, begun, ran, seconds):
        assert seconds >= 0
        return Took({"arm": 2.0}, {"arm": len(ran)}, {"cost": 5})

    def record(self, item, row, begun, variant, ran):
        assert begun[row] is item
        return {"found": ran[row]}


def found(runner, done):
    return [[record["found"] for record in records] for records, _ in run_missing(runner, ITEMS, frozenset(done))]


@pytest.mark.parametrize(
    ("together", "done", "wanted", "calls"),
    [
        (1, (), [[14, 17], [24, 27], [12], [22]], [([4, 7], [1, 2]), 1, 2, ([2], [1, 2]), 1, 2]),
        (1, EVERY - {(7, "b")}, [[27]], [([4, 7], [2]), 2]),  # with the whole batch
        (1, EVERY, [], []),
        (2, {(4, "a"), (7, "a")}, [[24, 27], [12], [22]], [([4, 7], [2]), ([2], [1, 2]), 2, 1, 2]),
    ],
)
def test_batches_are_begun_once_and_run_variant_by_variant(together, done, wanted, calls):
    runner = Counting(together)
    assert found(runner, done) == wanted
    assert runner.calls == calls


def test_what_is_done_is_let_go():
    """Logits and caches of one variant are gone before the next is run, a batch's before the next is begun."""

    class Kept(list):
        """A list that can be watched."""

    class Keeping(Counting):
        def __init__(self):
            super().__init__()
            self.made = {"begun": [], "ran": []}

        def _make(self, kind, values):
            assert not any(made() for made in self.made[kind])
            kept = Kept(values)
            self.made[kind].append(weakref.ref(kept))
            return kept

        def begin(self, batch, missing):
            return self._make("begun", super().begin(batch, missing))

        def run(self, begun, variant):
            return self._make("ran", super().run(begun, variant))

    runner = Keeping()
    assert len(found(runner, ())) == len(runner.made["ran"]) == 4
    assert len(runner.made["begun"]) == 2


def test_a_line_of_timing_says_of_what_it_is():
    timings = [timing for _, timing in run_missing(Counting(), ITEMS)]
    assert timings[1] == {
        "experiment": "attribution", "problems": [4, 7], "variant": "b", "seconds": {"arm": 2.0},
        "tokens": {"arm": 2}, "cost": 5,
    }  # fmt: skip
    assert [timing["variant"] for timing in timings] == ["a", "b"] * 2


def test_an_experiment_is_a_folder_and_a_line():
    folders = {path.parent.name for path in pathlib.Path(experiment.__file__).parent.glob("*/record.py")}
    assert folders == set(EXPERIMENTS)


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_of_an_experiment_are_found(name):
    one = EXPERIMENTS[name]
    assert one.record.__struct_config__.tag == name
    assert one.report.title
