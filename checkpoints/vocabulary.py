"""The tokenizer of the shipped checkpoints: byte-level BPE with single digits, trained on arith problems."""

import tokenizers
from corpus import write_document
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from jaxkv.tasks import arith

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"  # ids 0, 1 and 2
MOST_IDS = 1024
SEED = 1  # of its problems; seed 0 makes the worked examples of few-shot prompts


def train_tokenizer(problems: int, most_ids: int = MOST_IDS) -> tokenizers.Tokenizer:
    """Trains the tokenizer; the same arguments give the same bytes. Rich text fills the vocabulary up to `most_ids`."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    # Digits are split off first, so the space before a number is a token of its own and no merge crosses a digit.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=most_ids,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made = arith.generate("train", problems, seed=SEED)
    texts = (write_document(made[start : start + 4]) for start in range(0, len(made), 4))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def wrap_tokenizer(tokenizer: tokenizers.Tokenizer, context: int) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers' plain class, which runs it as it stands."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
