"""What ends a turn: the one definition. The router takes these tokens out of a text, and the worker's command hands
them to the engine, which stops at them.

A model's files often name only where a *document* ends, as its base model had it, and leave the end of a turn to the
chat template. So three sources are united: what the files name, special tokens whose text is known to end a turn
whatever the model, and the special token that the template itself writes after an assistant's words.
"""

from ostrya.errors import OstryaError
from ostrya.text.chat import ChatTemplate, Message
from ostrya.text.formats import Stored

_MESSAGE_END = "<|end|>"
ENDS = frozenset(
    {
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<end_of_turn>", "<end_of_utterance>"),
        *("<EOT>", "[EOT]", "<|EOT|>", "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>", "[|endofturn|]", _MESSAGE_END),
        *("<|return|>", "<|call|>"),
        # Where a document ends, a turn does.
        *("</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    }
)
"""Texts of tokens that end a turn, where the token is special."""
_HARMONY = frozenset({"<|return|>", "<|call|>"})
"""With these a turn has several messages, and <|end|> ends only one of them."""

_MAX_CHARS = 1024
"""Of what surrounds a message: a template may write megabytes, and a model may have thousands of special tokens."""

_QUESTION, _ANSWER, _NEXT = "ostryaquestion", "ostryaanswer", "ostryanext"
_PROBE = (
    Message(role="user", content=_QUESTION),
    Message(role="assistant", content=_ANSWER),
    Message(role="user", content=_NEXT),
)


def ending_ids(stored: Stored) -> tuple[int, ...]:
    """Ids of the tokens after which a model has said what it had to say; those that its files name come first."""
    added = stored.backend.get_added_tokens_decoder()
    special = {token.content: token_id for token_id, token in added.items() if token.special}
    plain = {token.content: token_id for token_id, token in added.items() if token.content in ENDS}
    known = [token_id for text, token_id in special.items() if text in ENDS]
    written = _written_after_an_answer(stored, special | plain)
    ids = [*known, *([] if written is None else [written])]
    if special.keys() >= _HARMONY:
        ids = [token_id for token_id in ids if token_id != special.get(_MESSAGE_END)]
    return tuple(dict.fromkeys([*stored.eos_token_ids, *ids]))


def _written_after_an_answer(stored: Stored, tokens: dict[str, int]) -> int | None:
    """The token that the chat template puts right after an assistant's words, unless it opens the next turn."""
    if stored.chat_template is None:
        return None
    try:
        template = ChatTemplate(stored.chat_template, bos_token=stored.bos_token, eos_token=stored.eos_token)
        rendered = template.render(_PROBE)
    except OstryaError:
        return None  # whoever chats is told what is wrong with the template
    before = rendered.partition(_QUESTION)[0][-_MAX_CHARS:]
    after = rendered.partition(_ANSWER)[2][:_MAX_CHARS].lstrip()
    following = max((text for text in tokens if after.startswith(text)), key=len, default=None)
    opening = max((text for text in tokens if text in before), key=before.rfind, default=None)
    return None if following in (None, opening, stored.bos_token) else tokens[following]
