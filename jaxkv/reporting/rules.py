"""How every verdict comes about: one rule a statement, and the family's error held over the statements of a table.

A judge finds how strongly the records speak for a statement and against it, as two one-sided p-values; `decide` makes
verdicts of them, all statements of a table together. Trials are sequences, problems or runs, never single steps: what
one step of a text does the next may follow, and bits that differ come in whole programs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from jaxkv.reporting import statistics
from jaxkv.reporting.document import Block, Fold, Only, Paragraph, Table
from jaxkv.reporting.format import format_number

FAMILY = 0.05  # chance that any verdict of a table is wrong by chance alone
HOLDS, DOES_NOT_HOLD, CANNOT_TELL = "holds", "does not hold", "cannot tell"
ALMOST_ALL = 0.95
ZERO_PERCENT = 0.0005
ORDERS = 7.5
HALF = 0.5
DOUBLE = 2.0
CONTROL_KEPT = 0.8


class Evidence(msgspec.Struct, frozen=True):
    """One-sided p-values of what the records say; a counterexample to "all" or "never" has a p-value of 0.

    `supports` is the chance of records that speak for the statement this strongly if it did not hold, `refutes` of such
    that speak against it if it held. `sides` is 2 where both are tests, 1 where only a counterexample refutes.
    """

    supports: float = 1.0
    refutes: float = 1.0
    sides: int = 2

    @property
    def p(self) -> float:
        """Chance of a wrong verdict, whichever it would be."""
        return min(1.0, self.sides * min(self.supports, self.refutes))

    @property
    def verdict(self) -> str:
        """By itself, no other statement beside it."""
        return CANNOT_TELL if self.p > FAMILY else HOLDS if self.holds else DOES_NOT_HOLD

    @property
    def holds(self) -> bool:
        """Which side it is on, whatever its strength."""
        return self.supports < self.refutes


OPEN = Evidence()
Found = tuple[Evidence | None, Sequence[str]]  # and sentences; None where no record bears on the statement


def lies_above(estimate: statistics.Estimate | None, threshold: float = 0.0) -> Evidence:
    """Evidence that a figure is above a threshold; none without an estimate."""
    if estimate is None:
        return OPEN
    return Evidence(estimate.p_above(threshold), estimate.p_below(threshold))


def lies_below(estimate: statistics.Estimate | None, threshold: float = 0.0) -> Evidence:
    """Evidence that a figure is below a threshold."""
    found = lies_above(estimate, threshold)
    return Evidence(found.refutes, found.supports)


def hold_all(parts: Sequence[Evidence], one_refutes: bool = True) -> Evidence:
    """Evidence that every part holds: all must, and one of k refutes it where its p-value times k does (Bonferroni).

    Unless `one_refutes`, all of them have to.
    """
    if not parts:
        return OPEN
    least = min(part.refutes for part in parts)
    refutes = min(1.0, len(parts) * least) if one_refutes else max(part.refutes for part in parts)
    return Evidence(max(part.supports for part in parts), refutes, max(part.sides for part in parts))


class Rule(msgspec.Struct, frozen=True):
    """How a statement is judged: what is measured, where the line is and why, and what gives each of three answers."""

    name: str
    statement: str
    statistic: str
    threshold: str
    supports: str
    refutes: str
    leaves_open: str


def _read(text: str) -> tuple[Rule, ...]:
    """Rules of a text: each a paragraph, the fields of `Rule` with bars between them."""
    found = [[" ".join(part.split()) for part in one.split("|")] for one in text.split("\n\n")]
    return tuple(Rule(*parts) for parts in found)


# The statements of arXiv 2604.15409.
ILLUSION = _read("""
C1 | 100 % of FP16 generations diverge between cache on and off, greedy too
| sequences that part running free, in each FP16 condition; a sequence is one generation
| 95 %: a sample cannot show all, and one in twenty that agrees would pass unseen in few
| every sequence parts in every condition, and 95 % would give that by chance too rarely (exact)
| a sequence that ends by itself (EOS or stop string), the arms together
| all part, of too few; or those that do not were cut by length, and might yet

C2 | cache on is more accurate, in most conditions (FP16; 8 of 9 in the paper)
| problems that one arm alone gets right, added up over FP16 conditions: exact McNemar test for one condition, for
several the exact sign-flip test over problems, since conditions share them
| 0: no difference | the cached arm is ahead, and in more than half of the conditions
| the cached arm is behind | neither: few problems differ, or they differ both ways

C2b | the same in BF16 | as C2, over BF16 conditions | as C2 | as C2 | as C2 | as C2

C3a | in FP32 divergence falls by eight orders of magnitude
| log10 of mean KL in FP16 over mean KL in FP32, each FP16 condition with its FP32 one; KL is the metric that falls
fastest, quadratic in the error of the logits
| 7.5: what rounds to eight | every pair above | a pair below | an interval on both sides

C3b | in FP32 flips round to 0.0 %
| problems with a flip in FP32. A problem is a trial: after a first flip more may follow, and near-ties come together.
Flips per token are at most that share times the most flips that any problem has, in FP16 too, over the tokens of a
problem
| 0.05 % of tokens: what rounds to 0.0 %, where FP16 flips in more of the same problems | below (exact)
| flips per token above, of as many tokens as the problems are worth (Korn & Graubard)
| neither, or FP16 is not seen to flip in more, so that nothing is tested

C3c | in FP32 flips are exactly zero, in the problems asked | problems with a flip in FP32, as in C3b
| 0, of as many problems as would show one if FP32 flipped in as many as FP16 (low end of its interval)
| none is seen; of these problems alone, since no sample shows a zero of all | one flip
| none is seen, of too few problems, or FP16 does not flip either

C4 | GQA models diverge sharply at layer 1, Gemma evenly over layers
| share of the drift of the residual stream leaving the last layer that leaves layer 1, in 16 bits
| half: 'sharply' is more than all later layers add, 'evenly' less (the paper gives no measure)
| grouped models above and Gemma below; both kinds are needed
| a grouped model below, or a Gemma above | neither, or one kind is missing

C4b | grouped K/V heads are what makes it sharp
| that share, over the share with K/V heads repeated to one for each query head (equal mathematics), paired by problem
| 2: other shapes round otherwise by themselves, so that a difference alone says nothing of grouping; a cause of
sharpness has to double the share at least
| above in every grouped model | below in one | neither, or no repeated heads

C5a | the K/V state carries the divergence along
| free runs that parted and come back when a patch puts the cache-free values in, of those that every value brings
back: the residual stream at each current position, and K and V
| half: most of them | the stream brings back less than half, K and V more (exact)
| the stream brings back more, or K and V less | neither, or a control of the patches failed

C5b | the cache is the origin of the divergence
| problems with other bits at some step where both arms run through one program with the cache on (aligned), beside the
plain arms. A problem is a trial: a program's bits agree at all steps of a text, or hardly at any
| half of the plain share: the cache by itself makes most of it
| above, of problems and of steps, for every model and precision: arms of one shape part too
| below for one: without other shapes the cache does not suffice in these programs
| no aligned problem, or too few (a gate has two)

C6a | deterministic within a process
| runs in which an arm run again has other bits at some step. A run is a trial: its steps and problems come out of one
set of programs
| 5 % of runs: one in twenty that differs would pass unseen in few | none, of enough runs (59 or more)
| one step | no arm was run again, or in too few runs

C6b | deterministic between processes: one configuration run again gives the same direction
| other processes of one build with other tokens, which arm is ahead in each, and the doctor's operations compiled in
another process. A process is a trial: it chooses its kernels once for all problems
| 5 % of processes, as C6a | none has other tokens, of enough (59 or more), and no operation other bits
| the other arm is ahead in another run | too few processes, or tokens differ but not the direction

C6c | deterministic between builds: the direction is the same under other versions
| as C6b, of runs that differ in versions of packages or of the device's runtime alone; a build is a trial
| 5 % of builds | as C6b | as C6b | as C6b, or no other build was run
""")

_WORSE = "score, or KL, of the first change less the second's, paired by problem"
_SIDES = "0: no difference | every pair | every pair on the other side | neither, or a change with invalid samples"
_EQUAL = f"{_WORSE}: the pairs alone whose mean and variance are equal within 1 % | {_SIDES}"
_RIVALS = f"""every other method's, as much of both packed in no more bits and rows being written read alike
| {_WORSE}: KVarN's beside each method that qualifies; those that do not are named with the reason
| 0: no difference | better than every one | worse than one (its p-value times their number)
| neither; one with more bits that is no worse"""
SHEBEL = _read(f"""
E1a | sign changes are catastrophic (less than 50 % of control is left, and more without them)
| share of the clean run's score that a change of all K and V keeps that flips 10 % of signs, and that of its partner of
equal mean and variance without flips
| half: a catastrophe loses most | every one below and a partner above | one above | neither

E1b | at equal mean and variance, sign changes cost score | {_EQUAL}

E1c | at equal mean and variance, sign changes raise KL | {_EQUAL}

E2a | at equal mean square, a mean costs more score than spread | {_WORSE} | {_SIDES}

E2b | at equal mean square, a mean raises KL more than spread | {_WORSE} | {_SIDES}

E2c | at equal spread, a mean costs score | {_WORSE} | {_SIDES}

E2d | at equal spread, a mean raises KL | {_WORSE} | {_SIDES}

E3 | U(-1.5, 1.5) keeps 80 % of control | share of the clean run's score that is kept
| 80 %: the seed study's 85 % and 61 %, in its two tasks, lie on its two sides | above | below | neither

E4 | U(-1.5, 1.5), which flips signs, beats U(-1, 1), which flips none
| score of the first less the second's | 0: no difference | above | below | neither

E5a | at equal mean square, an error of a token's scale costs more score than one of each channel (KVarN, arXiv
2606.03458) | {_WORSE} | {_SIDES}

E5b | at equal mean square, an error of a token's scale raises KL more than one of each channel (KVarN, arXiv
2606.03458) | {_WORSE} | {_SIDES}

E6a | KVarN's cache of at most 3 bits an element scores above {_RIVALS}

E6b | KVarN's cache of at most 3 bits an element has a KL below {_RIVALS}
""")

_EACH = """above for every quantizer | below for one (its p-value times their number)
| neither; a quantizer with invalid samples"""
KVARN = _read(f"""
K1a | errors accumulate under decoding: the attention output errs more where they feed back, through earlier steps and
through a step's earlier layers, than where they do not
| relative error of the attention output at decoded positions, decode less static, by problem | 0 | {_EACH}

K1b | what accumulates grows with the tokens decoded
| that difference in the later half of the text less the earlier half, and the same in quadrature
| 0, in both measures | {_EACH}

K2 | KVarN accumulates least at 2 bits (at comparable windows and bits; by the difference and in quadrature)
| that difference of each other 2-bit method less KVarN's, and the same in quadrature; those that do not qualify are
named with the reason
| 0, in both measures | above for every method | below for one (its p-value times their number)
| neither, or one that has more bits and accumulates less

K3a | repairing the scales of the worst 5 % of tokens takes away error, and more than of the other 95 %
| share of the static error that a repair takes away | 0, and the other repair's | {_EACH}

K3b | wrong token scales make up at least 50 % of the squared static error: as much is gone with all repaired (what part
of the accumulated error they cause, this does not say)
| share of the squared static error that repairing all tokens takes away | half: a reason accounts for most | {_EACH}
""")
RULES: Mapping[str, Rule] = {rule.name: rule for rule in (*ILLUSION, *SHEBEL, *KVARN)}


def decide(found: Mapping[str, Found], words: tuple[str, str], untested: str = CANNOT_TELL) -> list[dict[str, Any]]:
    """Gives statements their verdicts, all of a table together, by Holm's method.

    `found` is what there is on each by name, `words` what one is called that the records support, and one that they
    refute. In order: `id`, `claim`, `verdict`, `p` (adjusted; None where `untested`) and `figure` (sentences).
    """
    tested = {name: evidence for name, (evidence, _) in found.items() if evidence is not None}
    adjusted = statistics.holm({name: evidence.p for name, evidence in tested.items()})
    judged = []
    for name, (evidence, figure) in sorted(found.items()):
        verdict, lines = untested, list(figure)
        if evidence is not None:
            side = words[0] if evidence.holds else words[1]
            verdict = side if adjusted[name] <= FAMILY else CANNOT_TELL
            if verdict == CANNOT_TELL and evidence.p <= FAMILY:
                lines.append(
                    f"by itself it would be '{side}' (p = {format_number(evidence.p)}); of the {len(tested)} "
                    f"statements tested here one as clear may come out by chance (Holm: p = "
                    f"{format_number(adjusted[name])})"
                )
        claim = {"id": name, "claim": RULES[name].statement, "verdict": verdict, "p": adjusted.get(name)}
        judged.append(claim | {"figure": lines})
    return judged


def say_family(claims: Sequence[Mapping[str, Any]]) -> str:
    """How many statements were looked at and tested, and what holds over all of them."""
    tested = sum(claim["p"] is not None for claim in claims)
    return (
        f"{len(claims)} statements are looked at, and the records bear on {tested}. A verdict stands where the chance "
        f"that any of this table is wrong by the draw of its trials is at most {100 * FAMILY:.0f} % (Holm over the "
        f"{tested}; other tables, and the lines of single runs below, are judged for themselves)."
    )


def write_rules(names: Sequence[str]) -> list[Block]:
    """The rules of these statements, as a table behind a line that opens it; nothing for none."""
    head = ["statement", "statistic", "threshold, and why", "holds", "does not hold", "cannot tell"]
    rows = [[f"{one}: {said}", *how] for one, said, *how in (msgspec.structs.astuple(RULES[name]) for name in names)]
    text = (
        "A test alone is at 5 %, the level of the interval beside it; over the statements of the table that records "
        "bear on, Holm's method holds the 5 % together, whether or not they share problems. A statement on all "
        "conditions needs all, and one of k refutes it where its p-value times k does."
    )
    if not rows:
        return []
    return [Only("page", [Fold("How each verdict is reached", [Paragraph(text), Table(head, rows)])])]


def write_verdicts(claims: Sequence[Mapping[str, Any]]) -> list[Block]:
    """Statements of a run with their verdicts and figures, and how they are reached; nothing for none."""
    rows = [[f"{c['id']}: {c['claim']}", c["verdict"], tuple(c["figure"])] for c in claims]
    table = Table(["statement", "verdict", "figure"], rows, kind="claims", terminal=(0, 1))
    return [table, *write_rules([claim["id"] for claim in claims])] if rows else []
