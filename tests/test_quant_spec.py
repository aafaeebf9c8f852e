"""The text of --cache_quant."""

import pytest

from jaxkv.config import make_precision
from jaxkv.errors import UserError
from jaxkv.experiments.changes import make_changes
from jaxkv.interventions.quantizers import CacheQuant, SideQuant, Window, parse_cache_quant
from jaxkv.interventions.quantizers.floats import Float8
from jaxkv.interventions.quantizers.integers import Integer
from jaxkv.interventions.quantizers.kivi import Kivi
from jaxkv.interventions.quantizers.kvarn import KVarN
from jaxkv.interventions.quantizers.llama_cpp import LlamaCpp
from jaxkv.interventions.quantizers.masking import Mask
from jaxkv.interventions.quantizers.requantize import Requantize
from jaxkv.interventions.quantizers.spec import METHODS
from jaxkv.interventions.quantizers.turboquant import TurboQuant

# Text, and the text it comes back as (None: the same).
TEXTS = {
    "kvarn:k2v2": None,
    "kvarn:2": "kvarn:k2v2",
    "kvarn:k2v2,tile=128,floor=none": "kvarn:k2v2,floor=none",
    "kvarn:k4v2,passes=3,floor=-0.05,target=min,criterion=variance,keep=last,aux=fp16,rotate=off": None,
    "kvarn:k4v2,tile=64,first=32,recent=128": None,
    "kvarn:8,aux=fp16": "kvarn:k8v8",
    "kvarn:2,aux=e5m3": "kvarn:k2v2",
    "kvarn:k8v2": None,
    "kvarn:k8v8,aux=e5m3": None,
    "kvarn:k8v2,aux=fp16": "k=kvarn:8;v=kvarn:2,aux=fp16",
    "kvarn:k2v2,normalize=off": "kvarn:k2v2,passes=0",
    "kvarn:2,normalize=on,rotate=on,layers=all": "kvarn:k2v2",
    "kvarn:k2v2,layers=global": None,
    "k=kvarn:2,rotate=off;v=kvarn:2,layers=windowed": None,
    "kivi:k2v2,group=32,window=128": "kivi:k2v2",
    "kivi:k2v2,rotate=on": None,
    "quarot:2,rotate=off,first=16": None,
    "turboquant:3,unit=off,edges=0,values=codebook,rotate=off": None,
    "kivi:k2v4,group=64,window=64": None,
    "quarot:4": None,
    "quarot:k4v2": None,
    "quarot:k3v3": "quarot:3",
    "turboquant:4": None,
    "turboquant:k3v4,unit=off,edges=0": None,
    "llama:q4_0": None,
    "k=llama:q8_0;v=llama:q4_0": None,
    "fp8:e4m3,scale=token": None,
    "fp8:e5m2,scale=0.125": None,
    "fp8:e4m3,scale=1e-07": None,
    "int8": None,
    "int4,bound=half,first=4": None,
    "mask:8": None,
    "mask:8,of=bf16": None,
    "mask:8,of=fp16": None,
    "hf:4": None,
    "hf:2,group=32,every=100,axis=channel,anchor=end": None,
    "hf:4,first=4,recent=0": None,
    "none": None,
    "v=kivi:2,group=64 ; k = int8": "k=int8;v=kivi:2,group=64",
    "v=fp8:e5m2": "k=none;v=fp8:e5m2",
    "k=kvarn:4;v=kvarn:2": "kvarn:k4v2",
    "k=kvarn:4,tile=64;v=kvarn:2": None,
    "k=int8;v=int8": "int8",
    "k=none;v=none": "none",
}


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(text):
    spec = parse_cache_quant(text)
    assert str(spec) == (TEXTS[text] or text)
    assert parse_cache_quant(str(spec)) == spec


def test_what_is_read():
    both = lambda make, **windows: CacheQuant(SideQuant(make("k"), **windows), SideQuant(make("v"), **windows))  # noqa: E731
    assert parse_cache_quant("kvarn:k4v2,floor=none") == CacheQuant(
        SideQuant(KVarN("k", 4, floor=None)), SideQuant(KVarN("v", 2, floor=None))
    )
    assert parse_cache_quant("kivi:2,group=64,window=64") == both(lambda side: Kivi(side, 2, 64, 64))
    assert parse_cache_quant("turboquant:3,unit=off") == both(lambda side: TurboQuant(side, 3, unit=False))
    assert parse_cache_quant("llama:q5_1,recent=7") == both(lambda side: LlamaCpp(side, "q5_1"), recent=7)
    assert parse_cache_quant("fp8:e5m2,scale=token") == both(lambda side: Float8(side, "e5m2", None))
    assert parse_cache_quant("int4,bound=half") == both(lambda side: Integer(side, 4, "half"))
    assert parse_cache_quant("mask:9") == both(lambda side: Mask(side, 9))
    assert parse_cache_quant("hf:4,every=64") == both(lambda side: Requantize(side, 4, every=64))
    assert parse_cache_quant("none") == CacheQuant(SideQuant(None), SideQuant(None))


def test_methods_learn_the_caches_dtype_and_keep_their_name():
    (_, change) = make_changes([], ["k=int8;v=mask:9,first=2"], precision=make_precision("bf16"))
    assert change.name == "k=int8;v=mask:9,first=2"
    assert change.describe(64)["v"]["bits"] == 9
    known = change.what.stored_as(make_precision("bf16").cache)
    assert known == CacheQuant(change.what.k, SideQuant(Mask("v", 9, "bf16"), first=2))
    with pytest.raises(UserError, match=r"^--cache_quant=mask:17: the cache holds fp16, which has 16 bits"):
        make_changes([], ["mask:17"], precision=make_precision("fp16"))


def test_settings_are_checked_where_no_text_is_read():
    with pytest.raises(UserError, match="-1 layers exact"):
        TurboQuant("k", 2, edges=-1)
    with pytest.raises(UserError, match="0 to 1000 passes, not -1"):
        KVarN("k", passes=-1)


def test_windows_are_the_methods_unless_asked_for():
    assert parse_cache_quant("kvarn:2").k.window == Window(first=128, block=128)
    assert parse_cache_quant("kvarn:2,tile=64,first=32").v.window == Window(first=32, block=64)
    assert parse_cache_quant("kivi:2").v.window == Window(recent=128)
    assert parse_cache_quant("hf:4,every=64").k.window == Window(block=64, from_prompt=True)
    asked = parse_cache_quant("k=kivi:2;v=int8,recent=128,first=4")
    assert (asked.k.window, asked.v.window) == (Window(block=128), Window(first=4, recent=128))
    assert parse_cache_quant("none").k.window == Window()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kvarm:2", "unknown method 'kvarm' (did you mean 'kvarn'?)"),
        ("", "unknown method ''"),
        ("kvarn", "needs its bits after a colon"),
        ("kvarn:", "needs its bits after a colon"),
        ("llama", "needs a format"),
        ("kvarn:5", "no 5-bit codes; known: 2, 3, 4, 8"),
        ("kvarn:two", "'two' in kvarn:two should be bits"),
        ("kvarn:k2", "such as 4 or k4v2"),
        ("k=kvarn:k2v2", "should be bits, such as 4."),
        ("int8:8", "nothing follows int8"),
        ("none,first=2", "nothing follows none"),
        ("kvarn:2,flor=1", "no option 'flor=1' (did you mean 'floor'?); it has tile, passes"),
        ("kvarn:2,tile", "no option 'tile' (did you mean 'tile'?)"),
        ("kvarn:2,tile=8,tile=8", "tile twice"),
        ("kvarn:2,normalize=off,passes=3", "passes or normalize twice"),
        ("kvarn:2,normalize=no", "normalize=no should be on or off"),
        ("kvarn:2,layers=local", "layers=local should be global or windowed"),
        ("kvarn:2,tile=x", "tile=x should be a whole number"),
        ("kvarn:2,floor=low", "floor=low should be a number or none"),
        ("kvarn:2,aux=fp32", "aux=fp32 should be e5m3 or e4m3 or fp16"),
        ("kvarn:2,first=-1", "first=-1 should be a whole number from 0"),
        ("kvarn:2,first=99999999999999999999", "9 should be a whole number from 0 to 2147483647"),
        ("hf:4,every=3000000000", "every=3000000000 should be a whole number from 0 to 2147483647"),
        ("int8,recent=2147483648", "recent=2147483648 should be a whole number from 0 to 2147483647"),
        ("turboquant:2,edges=-1", "edges=-1 should be a whole number from 0"),
        ("kvarn:2,passes=-1", "passes=-1 should be a whole number from 0"),
        ("kvarn:" + 5000 * "4", "should be bits, such as 4"),
        ("kvarn:2,tile=" + 5000 * "4", "should be a whole number from 0"),
        ("kvarn:2,passes=100000", "KVarN makes 0 to 1000 passes, not 100000"),
        ("kvarn:2,floor=nan", "a floor of nan under KVarN's log scales is no finite number below their ceiling of 10"),
        ("kvarn:2,floor=20", "a floor of 20"),
        ("kvarn:2,floor=10", "a floor of 10"),
        ("kvarn:2,floor=-inf", "or floor=none for no bounds"),
        ("kivi:2,group=48", "window=144"),
        ("llama:q6_0", "did you mean 'q8_0'?"),
        ("fp8:e4m2", "no 8-bit float 'e4m2'"),
        ("fp8:e4m3,scale=nan", "static scale of nan"),
        ("fp8:e4m3,scale=0", "static scale of 0 holds nothing"),
        ("fp8:e4m3,scale=-1", "static scale of -1 holds nothing"),
        ("fp8:e4m3,scale=1e300", "static scale of 1e+300 holds nothing in fp32, where e4m3 takes 1.2e-38 to 7.6e+35"),
        ("fp8:e5m2,scale=7e35", "where e5m2 takes 1.2e-38 to 5.9e+33"),
        ("fp8:e4m3,scale=1e-300", "or scale=token"),
        ("fp8:e4m3,scale=row", "scale=row should be a number or token"),
        ("mask:17,of=fp16", "fp16 has 16 bits"),
        ("mask:33", "fp32 has 32 bits"),
        ("mask:0", "keep 1 to 32"),
        ("hf:4,every=0", "pack nothing"),
        ("hf:4,recent=16", "hf packs the whole prompt at once, its newest tokens too, so recent=16 would keep none"),
        ("k=int8,recent=4;v=hf:4,first=2,recent=1", "so recent=1 would keep none of them; drop recent"),
        ("k=int8;k=int8", "each once"),
        ("k=int8;int4", "each once"),
        ("k=int8;v=", "unknown method ''"),
    ],
)
def test_what_is_refused(text, words):
    with pytest.raises(UserError) as caught:
        parse_cache_quant(text)
    message = str(caught.value)
    assert words in message, message
    assert message.startswith(f"--cache_quant={text}".rstrip())
    assert "\n" not in message
    for name in METHODS:  # the grammar names every method and option
        assert name in message
    for option in ("floor", "window", "edges", "anchor", "scale=token", "bound", "recent=N"):
        assert option in message


@pytest.mark.parametrize(
    ("text", "head_dim", "tokens", "words"),
    [
        ("kvarn:2", 96, None, "powers of two"),
        ("quarot:4", 80, None, "rotate=off"),
        ("kvarn:2", 64, 100, "does not fit a context of 100"),
        ("llama:q4_0", 80, None, "multiple of 32"),
        ("kivi:2,group=64", 96, None, "do not divide"),
        ("hf:4", 96, None, "do not divide"),
        ("kvarn:2,rotate=off", 100, None, "8 channels"),
        ("kvarn:k2v2,tile=1000", 64, 1024, "kvarn would pack nothing: 128 first and 0 recent tokens that stay exact"),
        ("kvarn:k2v2,first=1024", 64, 1024, "1024 first and 0 recent tokens that stay exact and the 128 that"),
        ("kvarn:k2v2", 64, 255, "exceed the context of 255; make first, recent, tile, window or every smaller"),
        ("kivi:k2v2,window=2048", 64, 1024, "0 first and 0 recent tokens that stay exact and the 2048"),
        ("k=int8;v=kivi:2,window=2048", 64, 1024, "0 first and 2048 recent tokens that stay exact and the 1 that"),
        ("int8,recent=5000", 64, 1024, "int8 would pack nothing: 0 first and 5000 recent tokens"),
        ("int8,first=2147483647,recent=2147483647", 64, 1024, "2147483647 recent"),
        ("hf:4,every=5000", 64, 1024, "hf would pack nothing after the prompt: 0 first and 0 recent"),
        ("hf:4,axis=channel,group=2000,every=8", 64, 1024, "a group of 2000 tokens does not fit a context of 1024"),
    ],
)
def test_heads_and_contexts_that_do_not_suit(text, head_dim, tokens, words):
    with pytest.raises(UserError) as caught:
        parse_cache_quant(text).check(head_dim, tokens)
    assert words in str(caught.value), caught.value


def test_layers_that_a_model_lacks_are_refused():
    quant = parse_cache_quant("k=int8,layers=windowed;v=int8")
    quant.check(64, 1024, (True, False))
    with pytest.raises(UserError, match="layers=windowed packs nothing: this model has no windowed layer"):
        quant.check(64, 1024, (False, False))
    parse_cache_quant("int8,layers=global").check(64, 1024, (False, False))
    with pytest.raises(UserError, match="has no global layer"):
        parse_cache_quant("int8,layers=global").check(64, 1024, (True, True))


def test_which_layers_are_packed():
    windowed = (True, False, True, False)
    packed = lambda text: [parse_cache_quant(text).k.packs(layer, windowed) for layer in range(4)]  # noqa: E731
    assert packed("int8") == [True] * 4
    assert packed("int8,layers=global") == [False, True, False, True]
    assert packed("int8,layers=windowed") == [True, False, True, False]
    assert packed("turboquant:3,edges=1,layers=global") == [False, True, False, False]
    assert packed("none") == [False] * 4


def test_the_last_token_of_a_context_may_fill_the_only_block():
    for text, tokens in (("kvarn:k2v2", 256), ("kivi:k2v2", 129), ("int8,first=3,recent=4", 8), ("hf:4", 128)):
        quant = parse_cache_quant(text)
        quant.check(64, tokens)
        for side in (quant.k, quant.v):
            assert side.window.packed(tokens)[1] > side.window.first
            assert side.window.from_prompt or side.window.packed(tokens - side.window.block)[1] == side.window.first
