"""A tokenizer without a model file: a token a byte, two special ones, a vocabulary of 1,000 like the fake worker's."""

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ostrya.text.formats import Stored
from ostrya.text.tokenizer import Tokenizer

END = 256
TURN = 257
VOCAB_SIZE = 1_000
TEMPLATE = "{% for m in messages %}<turn>{{ m.role }}: {{ m.content }}{% endfor %}<turn>"


def byte_tokenizer(*, template: str | None = TEMPLATE) -> Tokenizer:
    """Token ids 0..255 are bytes, 256 is <end> (end of sequence), 257 is <turn>."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    spelling = {character: byte for byte, character in enumerate(_in_byte_order(alphabet))}
    backend = Backend(models.BPE(vocab={**spelling, "<end>": END, "<turn>": TURN}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<end>", "<turn>")])
    return Tokenizer(
        Stored(
            backend=backend,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(END,),
            prefix_ids=(),
            chat_template=template,
            bos_token="",
            eos_token="<end>",
        )
    )


def _in_byte_order(alphabet: list[str]) -> list[str]:
    """GPT-2's spelling of bytes: Latin-1 printables are themselves, the other bytes in order from U+0100 on."""
    shifted = iter(sorted(character for character in alphabet if ord(character) >= 256))
    printable = {ord(character) for character in alphabet if ord(character) < 256}
    return [chr(byte) if byte in printable else next(shifted) for byte in range(256)]
