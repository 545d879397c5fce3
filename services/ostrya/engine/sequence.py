"""One request inside the scheduler, and a row of a step. Plain state: the scheduler alone changes it."""

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from ostrya.engine.kv.pool import PageId
from ostrya.engine.kv.prefix import Chain
from ostrya.engine.processors import RowProcessors
from ostrya.engine.types import EngineRequest, TokenScore


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Tokens, and how far their keys and values are computed by the steps launched so far."""

    request: EngineRequest
    chain: Chain
    token_ids: "array[int]"
    """The prompt, then what was generated; only commit adds."""
    num_prompt: int
    num_tokens: int
    """Once every launched step is committed; those beyond token_ids are on the device alone."""
    max_num_tokens: int
    """It ends with that many."""
    stop_token_ids: frozenset[int]
    """It ends with any of these."""
    rank: tuple[int, int]
    """(-priority, number of arrival): lower goes first, and is preempted last."""
    submitted_s: float
    needs_host: bool = False
    """Its next row cannot be planned before the host knows its last token."""
    pages: list[PageId] = field(default_factory=list)
    slot: int = -1
    """Of the row table while it runs."""
    row: int = -1
    """Of the last launched step that chose a token for it."""
    num_computed: int = 0
    """Tokens whose keys and values are in `pages`, or will be when the launched steps are done."""
    num_registered_pages: int = 0
    """Leading pages that the prefix cache knows."""
    register_at: int = 0
    """With so many tokens known and computed there is one more."""
    num_cached_tokens: int = 0
    """Prompt tokens reused at the first admission."""
    started_s: float | None = None
    """Launch of the first step that had it."""
    is_plain: bool = True
    """It wants neither processors nor log probabilities."""
    processors: RowProcessors | None = None
    """None: it wants none."""
    prompt_scores: list[TokenScore] = field(default_factory=list)
    """Of the tokens after the prompt's first, as far as they are computed and wanted."""
    ended: bool = False
    """Finished or aborted: a commit of a step that still has it leaves it alone."""

    @property
    def is_running(self) -> bool:
        """It has a place and pages."""
        return self.slot >= 0

    @property
    def num_unscored(self) -> int:
        """Prompt tokens whose scores are wanted and not yet there: they cannot come from a cache."""
        if self.request.sampling.num_prompt_top is None:
            return 0
        return self.num_prompt - self.request.num_output_tokens - 1 - len(self.prompt_scores)

    @property
    def num_usable_pages(self) -> int:
        """That a hit may cover: never the last token, as its logits are needed."""
        return 0 if self.num_unscored > 0 else self.chain.num_usable(self.token_ids)

    @property
    def num_generated(self) -> int:
        """Committed."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """1 = decoding (or the last prompt token alone is left); more = prefilling."""
        return self.num_tokens - self.num_computed

    @property
    def num_uncomputed_prompt(self) -> int:
        return max(0, self.num_prompt - self.num_computed)


class Row(NamedTuple):
    """Tokens [start, start + num_tokens) of a sequence, in one step."""

    sequence: Sequence
    start: int
    num_tokens: int
    wants_token: bool
    """The row ends with the sequence's last token, so that its logits choose the next."""
