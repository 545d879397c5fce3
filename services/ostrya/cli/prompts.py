"""What `ostrya up --check` asks: long shared beginnings and unrelated tasks."""

_LIBRARY_RULES = (
    "The library opens at nine in the morning and closes at six in the evening, except on Sundays.",
    "Visitors may read every book in the hall, but only members may take books home.",
    "A member may keep four books for three weeks and may ask once for two more weeks.",
    "Old maps and letters are kept in the cellar and are shown on Thursdays by the archivist.",
    "Food stays outside; water in a closed bottle is allowed at the long tables near the windows.",
    "Children below the age of twelve are welcome when somebody older reads with them.",
    "Whoever finds a torn page gives the book to the desk, where it is mended without a fee.",
    "The quiet room is for people who work alone; groups use the three rooms on the second floor.",
    "A lost card is replaced on the same day, and the old one is closed at once.",
    "Gifts of books are gladly taken in April and October, when there is room on the shelves.",
)


def system_prompt(place: str) -> str:
    """About 600 tokens; two places share nothing but their first words."""
    numbered = "\n".join(f"{number}. {rule}" for number, rule in enumerate(_LIBRARY_RULES * 3, 1))
    return f"{place} answers visitors in one short sentence, by these rules.\n{numbered}"


LIBRARY = system_prompt("The town library")
MUSEUM = system_prompt("A museum of clocks")

TASKS = (
    "Name three rivers in Europe.",
    "Write one sentence about a lighthouse.",
    "What is the boiling point of water?",
    "List four colours.",
    "Explain what a magnet does.",
    "Give a short recipe for bread.",
    "Why do birds sing?",
    "Describe a winter morning.",
)
