"""One request inside the scheduler, and a row of a step. Plain state: the scheduler alone changes it."""

from array import array
from dataclasses import dataclass, field

from ostrya.engine.kv.pool import PageId
from ostrya.engine.kv.prefix import Chain
from ostrya.engine.processors import RowProcessors
from ostrya.engine.types import EngineRequest, TokenScore


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Tokens, and how far their keys and values are computed."""

    request: EngineRequest
    chain: Chain
    token_ids: "array[int]"
    """The prompt, then what was generated; only commit adds."""
    submitted_s: float
    pages: list[PageId] = field(default_factory=list)
    num_computed: int = 0
    """Tokens whose keys and values are in `pages` and committed."""
    num_registered_pages: int = 0
    """Leading pages that the prefix cache knows."""
    num_cached_tokens: int = 0
    """Prompt tokens reused at the first admission."""
    started_s: float | None = None
    """Launch of the first step that had it."""
    prefill_s: float = 0.0
    """From that to the first token; 0 until there is one."""
    processors: RowProcessors | None = None
    """None: it wants none."""
    prompt_scores: list[TokenScore] = field(default_factory=list)
    """Of the tokens after the prompt's first, as far as they are computed and wanted."""
    ended: bool = False
    """Finished or aborted: a commit of a step that still has it leaves it alone."""

    @property
    def num_prompt(self) -> int:
        return len(self.request.token_ids)

    @property
    def num_unscored(self) -> int:
        """Prompt tokens whose scores are wanted and not yet there: they cannot come from a cache."""
        if self.request.sampling.num_prompt_top is None:
            return 0
        return self.num_prompt - self.request.num_output_tokens - 1 - len(self.prompt_scores)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """1 = decoding (or the last prompt token alone is left); more = prefilling."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_uncomputed_prompt(self) -> int:
        return max(0, self.num_prompt - self.num_computed)


@dataclass(frozen=True, slots=True)
class Row:
    """The next `num_tokens` uncomputed tokens of a sequence, in one step."""

    sequence: Sequence
    num_tokens: int

    @property
    def wants_token(self) -> bool:
        """True when the row ends with the last known token, so that its logits choose the next."""
        return self.num_tokens == self.sequence.num_uncomputed
