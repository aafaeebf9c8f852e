"""Which kernel adds each sum of each arm, over what, in which dtype and blocks: what XLA compiles the programs to.

The programs are those of the study, compiled for a target from shapes alone: no weights, and for a TPU no TPU. What a
program says of a sum is read from its text (kernels.py), and the arms' sums are set beside each other (rows.py).

On this process's device two things more are done. The fenced programs of the attribution experiment are compiled too,
in which each class of operation has two forms: what they are compiled to predicts which arm aligning the class can
change. And the orders of summation of the products are recovered from their outputs (summation.py).
"""

import concurrent.futures
import dataclasses
import itertools
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
from msgspec import to_builtins

from jaxkv.config import ModelConfig, Precision
from jaxkv.decode import COMPILER_OPTIONS, Arms
from jaxkv.experiments.driver import Examination, Line
from jaxkv.experiments.lowering import targets
from jaxkv.experiments.lowering.kernels import find_kernels
from jaxkv.experiments.lowering.record import Recovery, Row
from jaxkv.experiments.lowering.report import FENCED, PAIRS
from jaxkv.experiments.lowering.rows import Sums, make_rows
from jaxkv.experiments.lowering.shapes import describe
from jaxkv.experiments.lowering.summation import Bench, Product
from jaxkv.experiments.lowering.targets import Program, Target
from jaxkv.experiments.lowering.trees import NoTreeError
from jaxkv.models.alignment import AT_ONCE, CLASSES, IN_TILES, Alignment
from jaxkv.models.families import get_preset
from jaxkv.options import Options
from jaxkv.provenance import describe_device, environment
from jaxkv.rollout import Layout, make_layout

WORKERS = 2
_LOCK = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is compiled.

    Attributes:
      config: architecture.
      precision: policy.
      target: for what.
      layout: shapes of the batch.
      aligned: whether both arms are one program over tiles, or each has its own.
      tile: rows of a tile, there and in the fenced programs.
      tree_seconds: no order of a sum is looked for after so long.
    """

    config: ModelConfig
    precision: Precision
    target: Target
    layout: Layout
    aligned: bool
    tile: int
    tree_seconds: float

    @property
    def here(self) -> bool:
        """Whether the target is this process's device."""
        return self.target.text == "here"


def read_asked(options: Options, precision: Precision) -> Asked:
    """What options ask for. Raises UserError on a target or lengths that cannot be had."""
    target = targets.parse_target(options.run.target)
    config, decoding, controls = get_preset(options.model.name or ""), options.decoding, options.controls
    aligned, tile = controls.regime == "aligned", controls.tile or (8 if target.platform == "cpu" else 16)
    prompts = [[0] * options.data.context] * decoding.batch_size
    layout = make_layout(prompts, decoding.max_new_tokens, decoding.bucket, config, tile if aligned else None)
    return Asked(config, precision, target, layout, aligned, tile, controls.tree_seconds)


def examine(options: Options, precision: Precision) -> Examination:
    """The map of a condition's programs. Raises UserError as `read_asked`, and if the target is too small."""
    asked = read_asked(options, precision)
    arms = make_arms(asked)
    placing = None if asked.here else targets.choose_placing(arms, asked.layout, asked.target)
    here = environment()["packages"]
    config = {
        "experiments": options.run.experiments,
        "model": asked.config.to_json() | {"name": options.model.name},
        "precision": asked.precision.to_json(),
        "target": asked.target.text,
        "regime": options.controls.regime,
        "device": describe_target(asked.target),
        "versions": {package: here[package] for package in ("jax", "jaxlib")},
        "variables": environment()["variables"],
        "compiler_options": COMPILER_OPTIONS,
        "layout": dataclasses.asdict(asked.layout) | {"tile": asked.tile},
    }
    return Examination(config, lambda: make_map(asked, arms, placing), "compiling the programs, a minute or more")


def describe_target(target: Target) -> dict[str, str]:
    """The device that is compiled for."""
    if target.text == "here":
        return describe_device()
    device = target.devices()[0]
    return {"platform": target.platform, "kind": device.device_kind}


def make_arms(asked: Asked) -> Arms:
    """The arms that are compiled."""
    tile = asked.tile if asked.aligned else None
    return Arms(asked.config, asked.precision, tile=tile, backend=asked.target.platform)


def list_programs(asked: Asked, arms: Arms, placing: targets.Placing | None) -> dict[str, Program]:
    """The programs by name: both arms', and here in the plain regime those of the attribution experiment."""
    found = targets.abstract_programs(arms, asked.layout, placing, tile=arms.tile)
    if asked.aligned:
        return {"recompute": found["recompute"]}
    programs = {name: found[name] for name in ("prefill", "decode", "recompute")}
    if asked.here:
        # A class is cut off from all others in them, so that a layer of each kind is enough.
        few = dataclasses.replace(asked.config, num_layers=len(asked.config.window_pattern))
        found = targets.abstract_programs(make_arms(dataclasses.replace(asked, config=few)), asked.layout)
        on = jax.ShapeDtypeStruct((len(CLASSES),), jnp.bool)
        align = Alignment(asked.tile, on)  # type: ignore[arg-type]
        for name in FENCED.values():
            plain = found[name.removeprefix("fenced ")]
            programs[name] = dataclasses.replace(plain, statics={**plain.statics, "alignment": align})
    return programs


def make_map(asked: Asked, arms: Arms, placing: targets.Placing | None) -> Line:
    """Compiles the programs and gives the record."""
    begin = time.monotonic()
    programs = list_programs(asked, arms, placing)
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        compiled = dict(zip(programs, pool.map(_compile, programs.values()), strict=True))
    texts = {name: text for name, (_, text, _) in compiled.items()}
    sums = {name: find_kernels(text, name, asked.layout.slots) for name, text in texts.items()}
    facts = {
        name: targets.describe_program(made, text, asked.target, seconds)
        for name, (made, text, seconds) in compiled.items()
    }
    return {
        "experiment": "lowering",
        "key": ["lowering", asked.target.text, "aligned" if asked.aligned else "plain"],
        "target": asked.target.text,
        "regime": "aligned" if asked.aligned else "plain",
        "device": describe_target(asked.target),
        "environment": environment(),
        "compiler_options": dict(COMPILER_OPTIONS),
        "model": asked.config.to_json(),
        "precision": asked.precision.to_json(),
        "held": arms.describe_held(),
        "shapes": {name: getattr(asked.layout, name) for name in ("batch", "prompt", "prefill", "slots")},
        "tile": asked.tile,
        "programs": to_builtins(facts),
        "rows": to_builtins(list_rows(sums, asked.aligned)),
        "forms": to_builtins(list_forms(sums)),
        "recovered": to_builtins(recover_orders(asked, arms) if asked.here else []),
        "unplaced": [one.kernel.line for found in sums.values() for one in found if one.place is None],
        "seconds": round(time.monotonic() - begin, 1),
    }


def list_rows(sums: Sums, aligned: bool) -> list[Row]:
    """The rows of the arms' programs."""
    if aligned:
        return make_rows(sums, dict.fromkeys(PAIRS, ("recompute", "recompute")))
    return make_rows({name: sums[name] for name in ("prefill", "decode", "recompute")}, PAIRS)


def list_forms(sums: Sums) -> list[Row]:
    """The rows of the fenced programs: both forms of each class beside each other, for each arm."""
    forms = {arm: (f"{name}:{AT_ONCE}", f"{name}:{IN_TILES}") for arm, name in FENCED.items()}
    return make_rows({name: sums[name] for name in FENCED.values() if name in sums}, forms)


def recover_orders(asked: Asked, arms: Arms) -> list[Recovery]:
    """The orders of the products, first at one row and at all rows, product by product.

    Those for which there is no time are left out.
    """
    begin, layout = time.monotonic(), asked.layout
    found: dict[tuple[str, str, int], Recovery] = {}
    for counts in ((1, layout.slots), (asked.tile, layout.prefill)):
        lists = [list_products(asked.config, layout.batch, rows, layout.slots) for rows in counts]
        pairs = ((rows, one) for pair in itertools.zip_longest(*lists) for rows, one in zip(counts, pair, strict=True))
        for rows, one in pairs:
            if time.monotonic() - begin > asked.tree_seconds:
                return list(found.values())
            if one is not None:
                operation, weight, of = one
                key = operation, weight, rows
                found[key] = found.get(key) or _recover(operation, weight, rows, of, arms.held)
    return list(found.values())


def _recover(operation: str, weight: str, rows: int, of: Product, held: Precision) -> Recovery:
    bench = Bench(of, held)
    sums = find_kernels(bench.compiled.as_text() or "", "alone", 0)
    kernels = [one.kernel for one in sums]
    try:
        tree = bench.recover()
    except NoTreeError as error:
        return Recovery(operation, weight, rows, kernels, None, fault=str(error))
    shape = describe(tree.tree)
    return Recovery(
        operation, weight, rows, kernels, shape, tree.again, tree.rounding, tree.columns,
        reproduced={str(rule): equal for rule, equal in tree.reproduced.items()},
    )  # fmt: skip


def list_products(config: ModelConfig, batch: int, rows: int, slots: int) -> list[tuple[str, str, Product]]:
    """The products of a layer and the head for so many rows of each text: class, weight, shapes."""
    D, F, V = config.model_dim, config.mlp_dim, config.vocab_size
    N, K, H = config.num_query_heads, config.num_kv_heads, config.head_dim
    G, one = N // K, "btd,fd->btf"
    found = [
        ("qkv", "q", Product(one, (batch, rows, D), (N * H, D))),
        ("mlp", "down", Product(one, (batch, rows, F), (D, F))),
        ("scores", "q·k", Product("btkgh,bskh->bkgts", (batch, rows, K, G, H), (batch, slots, K, H))),
        ("attention", "weights·v", Product("bkgts,bskh->btkgh", (batch, K, G, rows, slots), (batch, slots, K, H))),
        ("output", "o", Product(one, (batch, rows, N * H), (D, N * H))),
        ("mlp", "gate", Product(one, (batch, rows, D), (F, D))),
        ("qkv", "k", Product(one, (batch, rows, D), (K * H, D))),
        ("head", "head", Product(one, (batch, rows, D), (V, D))),
    ]
    return [product for product in found if product[0] != "head" or rows == 1]


def _compile(program: Program) -> tuple[Any, str, float]:
    begin = time.monotonic()
    compiled = program.compile()
    text = compiled.as_text()
    if "/layer.0/" not in text:
        # It lay in the cache, from before programs had scopes, which are no part of its key.
        name = "jax_compilation_cache_include_metadata_in_key"
        with _LOCK:
            jax.config.update(name, True)
            try:
                jax.clear_caches()
                compiled = program.compile()
            finally:
                jax.config.update(name, False)
        text = compiled.as_text()
    return compiled, text, time.monotonic() - begin
