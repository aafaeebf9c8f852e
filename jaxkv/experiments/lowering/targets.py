"""What a program is compiled for: this process's device, a CPU, or the chips of a TPU that need not be there.

libtpu compiles for a TPU on any machine. Weights, cache and batch are given as shapes, so that nothing is allocated and
no checkpoint is read. What one chip cannot hold is laid out over several of them, along one axis: heads, the width of
the MLP and the vocabulary. Sums over heads and over that width then end in a sum over chips.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxkv.cache import Intervention, KVCache, empty_cache
from jaxkv.checkpoints.fill import flat_paths, with_leaves
from jaxkv.decode import Arms
from jaxkv.errors import UserError
from jaxkv.experiments.lowering.record import ProgramFacts
from jaxkv.rollout import Layout, make_rows, start_rollout

# Memory of a chip in GiB as libtpu 0.0.42 lends it to a program, read off what it says of one that is too large
# (tests/test_targets.py). Data sheets have 16, 95 and 32 (cloud.google.com/tpu/docs, v5e, v5p and v6e).
CHIP_GIB = {"v5e": 15.75, "v5p": 95.74, "v6e": 31.25}
EXAMPLES = "tpu:v5e:2x2, tpu:v5p:2x2x1, tpu:v6e:2x2"
KNOWN = f"known: here, cpu, {EXAMPLES}"
MOST_CHIPS = 256

# What libtpu would otherwise ask Google's metadata server for, complain about, log in files or lock against a second
# process that compiles. None of it changes a program.
LIBTPU_SETTINGS = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_LOG_DIR": "disabled",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

AXIS = "chips"
WHOLE = PartitionSpec()  # on every chip
# Which axis of a parameter lies over the chips, by the end of its name; a parameter that none names, or whose axis does
# not divide, is on every chip.
RULES: tuple[tuple[str, PartitionSpec], ...] = (
    (r"(^|/)(embed|head)", PartitionSpec(AXIS, None)),  # [V,D]
    (r"attn/[qkv]", PartitionSpec(AXIS, None, None)),  # [N,H,D] or [K,H,D]
    (r"attn/[qkv]_bias", PartitionSpec(AXIS, None)),  # [N,H] or [K,H]
    (r"attn/o", PartitionSpec(None, AXIS, None)),  # [D,N,H]
    (r"mlp/(gate|up)", PartitionSpec(AXIS, None)),  # [F,D]
    (r"mlp/down", PartitionSpec(None, AXIS)),  # [D,F]
    (r"weight", WHOLE),  # of norms, [D] or [H]
)
CACHE_RULE = PartitionSpec(None, None, AXIS, None)  # [B,S,K,H]


@dataclasses.dataclass(frozen=True)
class Target:
    """What programs are compiled for.

    Attributes:
      text: as it was asked for, e.g. ``tpu:v5e:2x2``.
      platform: as JAX names it: cpu, gpu or tpu.
      chip: v5e, v5p or v6e; None if this is no TPU that is compiled for from afar.
      grid: chips along each axis of the topology; (1,) for a device of this process.
    """

    text: str
    platform: str
    chip: str | None = None
    grid: tuple[int, ...] = (1,)

    @property
    def count(self) -> int:
        """Devices that programs may be laid out over."""
        return math.prod(self.grid)

    @property
    def memory(self) -> int | None:
        """Bytes of memory that a program may use on one device; None if that is not known."""
        if self.chip is not None:
            return int(CHIP_GIB[self.chip] * 2**30)
        stats = self.devices()[0].memory_stats()
        return None if stats is None else stats.get("bytes_limit")

    def devices(self) -> tuple[jax.Device, ...]:
        """The devices, or descriptions of chips, which turn this process's persistent compilation cache off.

        Raises UserError if libtpu does not know them.
        """
        if self.chip is None:
            return tuple(jax.devices(None if self.text == "here" else self.text)[:1])
        # JAX can write programs of absent devices to its persistent cache, but not read them again, and warns of each.
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        return _find_chips(self)


def parse_target(text: str) -> Target:
    """What ``here``, ``cpu`` or ``tpu:CHIP:GRID`` stands for. Raises UserError, also where libtpu is not installed."""
    kind, *rest = text.strip().lower().split(":")
    if kind in ("here", "cpu") and not rest:
        return Target(kind, jax.default_backend() if kind == "here" else kind)
    if kind != "tpu" or len(rest) != 2:
        raise UserError(f"target '{text}' is not understood; {KNOWN}")
    chip, size = rest
    if chip not in CHIP_GIB:
        raise UserError(f"target '{text}': TPU '{chip}' is not known; known: {', '.join(CHIP_GIB)}, as in {EXAMPLES}")
    axes = 3 if chip == "v5p" else 2
    if not re.fullmatch(r"[1-9]\d{0,2}(x[1-9]\d{0,2})" + f"{{{axes - 1}}}", size):
        example = "2x2x1" if axes == 3 else "2x2"
        raise UserError(f"target '{text}': '{size}' is no grid of {axes} numbers; use tpu:{chip}:{example} or the like")
    target = Target(f"tpu:{chip}:{size}", "tpu", chip, tuple(map(int, size.split("x"))))
    if target.count > MOST_CHIPS:
        raise UserError(f"target '{text}' has {target.count} chips; use at most {MOST_CHIPS}")
    _check_libtpu()
    return target


def fitting_libtpu() -> str:
    """The requirement that installs the libtpu of this JAX, e.g. ``libtpu==0.0.42.*``, as JAX's own metadata has it."""
    for line in importlib.metadata.requires("jax") or ():
        requirement, _, marker = line.partition(";")
        if requirement.startswith("libtpu") and "tpu" in marker:
            return requirement.strip()
    return f"jax[tpu]=={jax.__version__}"


def _check_libtpu() -> None:
    if importlib.util.find_spec("libtpu") is None and not os.path.isfile(os.environ.get("TPU_LIBRARY_PATH", "")):
        raise UserError(f"a TPU target needs libtpu, which is not installed: pip install '{fitting_libtpu()}'")


@functools.cache
def _find_chips(target: Target) -> tuple[jax.Device, ...]:
    for name, value in LIBTPU_SETTINGS.items():
        os.environ.setdefault(name, value)
    hosts = [2 if size % 2 == 0 else 1 for size in target.grid[:2]] + [1]
    name = target.text.removeprefix("tpu:")
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, chips_per_host_bounds=hosts)
    except (RuntimeError, ValueError) as error:
        told = str(error).partition("\n")[0]
        remedy = f"use another grid, or the libtpu of this JAX: pip install '{fitting_libtpu()}'"
        raise UserError(f"libtpu knows no {target.text} ({told}); {remedy}") from error
    return tuple(found.devices)


def fit_spec(spec: PartitionSpec, shape: Sequence[int], chips: int) -> PartitionSpec:
    """The spec if the axis it lays over the chips divides among them, else that of an array that is on every chip."""
    if any(name == AXIS and size % chips for name, size in zip(spec, shape, strict=False)):
        return WHOLE
    return spec


def parameter_spec(path: str, shape: Sequence[int], chips: int) -> PartitionSpec:
    """How a parameter [shape] lies over the chips. Raises ValueError if no rule names it."""
    for pattern, spec in RULES:
        if re.search(f"{pattern}$", path):
            return fit_spec(spec, shape, chips)
    raise ValueError(f"no rule says how {path} lies over chips")


@dataclasses.dataclass(frozen=True)
class Placing:
    """How a model's arrays lie over devices: each along one axis over all of them, or whole on every one."""

    mesh: Mesh | AbstractMesh

    @property
    def chips(self) -> int:
        """Devices."""
        return self.mesh.size

    def place(self, tree: Any, spec: PartitionSpec = WHOLE) -> Any:
        """Shapes of a tree of arrays, each laid out so."""

        def one(leaf: Any) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(self.mesh, fit_spec(spec, leaf.shape, self.chips))
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(one, tree)

    def place_state(self, state: nnx.State) -> nnx.State:
        """Shapes of a model's weights, laid out by RULES."""
        leaves = {
            path: self.place(leaf.get_value(), parameter_spec(path, leaf.shape, self.chips))
            for path, leaf in flat_paths(state).items()
        }
        return with_leaves(state, leaves)

    def place_cache(self, cache: Any) -> Any:
        """Shapes of a cache: keys and values over kv heads, anything else on every device."""
        if not isinstance(cache, KVCache):
            return self.place(cache)
        k, v = self.place(cache.k, CACHE_RULE), self.place(cache.v, CACHE_RULE)
        return KVCache(k, v, self.place(cache.positions))


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of the arms with shapes for its arguments."""

    function: Any  # of decode.Arms, jitted, with its donated arguments and compiler options
    arguments: tuple[Any, ...]
    statics: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def compile(self) -> Any:
        """The compiled program. Raises UserError if a device has too little memory for it."""
        try:
            return self.function.lower(*self.arguments, **self.statics).compile()
        except jax.errors.JaxRuntimeError as error:
            told = str(error).partition("\n")[0]
            if "RESOURCE_EXHAUSTED" not in told:
                raise
            told = told.removeprefix("RESOURCE_EXHAUSTED: ").rstrip(".")
            raise UserError(f"{told}; use more chips, a smaller model or a shorter layout") from error


def abstract_programs(
    arms: Arms,
    layout: Layout,
    placing: Placing | None = None,
    change: Intervention | None = None,
    tile: int | None = None,
) -> dict[str, Program]:
    """The programs of both arms, with shapes laid out by `placing` (None: left to JAX) for arguments.

    Args:
      arms: of a model, for the platform of the devices.
      layout: shapes of the batch.
      placing: where arrays lie.
      change: what is done to the cache, if anything.
      tile: rows of a tile of `recompute` (None: all slots, as in the plain regime).

    Returns:
      `prefill`; `decode`, the steps of the cached arm; `recompute`, those of the uncached one; `audit`.
    """
    prompts = [[0] * layout.prompt] * layout.batch
    rows = jax.eval_shape(lambda: make_rows(prompts, [0] * layout.batch, 0, layout)[1])
    tokens = np.zeros((layout.batch, layout.slots), np.int32)
    run = jax.eval_shape(lambda rows: start_rollout(arms, tokens, rows, layout), rows)
    cache = jax.eval_shape(lambda rows: arms.make_cache(rows, layout, change), rows)
    logits = jax.ShapeDtypeStruct((layout.batch, arms.config.vocab_size), arms.precision.logits)
    prompt = jax.ShapeDtypeStruct((layout.batch, layout.prefill), jnp.int32)
    state, end, flag = arms.abstract_state, jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.bool)
    if placing is not None:
        state, cache = placing.place_state(state), placing.place_cache(cache)
        rows, run, logits, prompt, end, flag = map(placing.place, (rows, run, logits, prompt, end, flag))
    return {
        "prefill": Program(arms.prefill, (state, prompt, rows, cache)),
        "decode": Program(arms.cached_loop, (state, logits, run, rows, end, cache)),
        "recompute": Program(
            arms.tile_loop, (state, run, rows, end, cache, flag, flag), {"tile": tile or layout.slots}
        ),
        "audit": Program(arms.audit_pass, (state, run.tokens, rows.first, rows.limit)),
    }


def count_held(arms: Arms, layout: Layout, chips: int) -> int:
    """Bytes of weights and cache on each of so many chips, before a device pads them."""
    placing = Placing(AbstractMesh((chips,), (AXIS,)))
    cache = jax.eval_shape(lambda: empty_cache(arms.config, arms.precision, layout.batch, layout.slots))
    leaves = jax.tree.leaves((placing.place_state(arms.abstract_state), placing.place_cache(cache)))
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)


def choose_placing(arms: Arms, layout: Layout, target: Target, chips: int | None = None) -> Placing:
    """Lays a model over `chips` devices, or over the fewest, a power of two, that hold its weights and its cache.

    Temporaries come on top of them (ProgramFacts). Raises UserError if there are not so many devices, or if all of them
    cannot hold it.
    """
    devices, memory = target.devices(), target.memory
    most = len(devices)
    if chips is None:
        counts = [2**power for power in range(most.bit_length())]
        held = {count: count_held(arms, layout, count) for count in counts}
        fitting = [count for count in counts if memory is None or held[count] <= memory]
        if not fitting:
            raise UserError(
                f"{arms.config.name} in {arms.precision.name} needs {held[counts[-1]] / 2**30:.1f} GiB on each of "
                f"{counts[-1]} chips of {target.text}, which has {(memory or 0) / 2**30:.1f}; use a larger grid"
            )
        chips = fitting[0]
    if not 1 <= chips <= most:
        raise UserError(f"{target.text} has {most} chips, not {chips}; use a larger grid or fewer chips")
    return Placing(Mesh(np.asarray(devices[:chips]), (AXIS,), axis_types=(AxisType.Auto,)))


def describe_program(compiled: Any, text: str, target: Target, seconds: float) -> ProgramFacts:
    """Memory and work of a compiled program (jax.stages.Compiled), its text, and how long it took to compile."""
    used, costs = compiled.memory_analysis(), compiled.cost_analysis() or {}
    devices = {device for sharding in jax.tree.leaves(compiled.input_shardings) for device in sharding.device_set}
    facts = ProgramFacts(
        chips=len(devices),
        arguments=used.argument_size_in_bytes,
        outputs=used.output_size_in_bytes,
        aliased=used.alias_size_in_bytes,
        temporaries=used.temp_size_in_bytes,
        code=used.generated_code_size_in_bytes,
        flops=costs.get("flops"),
        accessed=costs.get("bytes accessed"),
        fits=None,
        seconds=round(seconds, 1),
        sha256=hashlib.sha256(text.encode()).hexdigest(),
    )
    memory = target.memory
    return facts if memory is None else msgspec.structs.replace(facts, fits=facts.needed <= memory)
