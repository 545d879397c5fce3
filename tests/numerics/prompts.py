"""Twenty prompts for the golden tokens: a few words to about 700 tokens; prose, chat, code, other scripts, numbers,
repetition."""

_STORY = (
    "The harbour town woke slowly that winter. Nets hung stiff with frost, and the first boats left only "
    "when the sun had cleared the breakwater. Marta counted them from her kitchen window, as her mother "
    "had, and wrote the number in a blue notebook beside the tide and the wind. Nobody had asked her to. "
)
_MANUAL = (
    "Section {n}. Before opening the valve, close the upstream gate, wait until the gauge reads below "
    "2.5 bar, and record the reading together with the time. If the reading does not fall within ten "
    "minutes, stop and call the operator on duty. "
)
_CODE = '''def merge(left, right):
    """Merges two sorted lists."""
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
'''
_RUST = """use std::collections::HashMap;

fn word_counts(text: &str) -> HashMap<String, usize> {
    let mut counts = HashMap::new();
    for word in text.split_whitespace() {
"""


def _chat(user: str, *, system: str = "You are a helpful AI assistant named SmolLM, trained by Hugging Face") -> str:
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"


PROMPTS = (
    "Hello",
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "Q: What is the largest planet in the solar system?\nA:",
    _chat("What is gravity? Answer in two sentences."),
    _chat("Write a haiku about autumn leaves."),
    _chat("List three uses of a paper clip.", system="You answer in numbered lists and nothing else."),
    _CODE,
    _RUST,
    "SELECT name, COUNT(*) AS orders FROM customers JOIN",
    "La Révolution française commença en 1789, lorsque le roi Louis XVI",
    "Résume en français : le chat dort sur le canapé pendant que la pluie tombe.",
    "日本の首都は東京です。中国の首都は",
    "😀 🚀 naïve café — “quoted” … Ελληνικά, русский, ٣٤٥:",
    "1, 1, 2, 3, 5, 8, 13, 21, 34,",
    "| year | revenue | cost |\n|---|---|---|\n| 2021 | 1,204.50 | 987.10 |\n| 2022 | 1,310.75 | 1,002.33 |\n| 2023 |",
    "la " * 60,
    _STORY * 4 + "One morning the number did not match, and",
    _chat("Summarise the text in one sentence: " + _STORY * 5),
    "".join(_MANUAL.format(n=n) for n in range(1, 13)) + "Section 13.",
)
