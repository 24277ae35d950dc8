"""The text tasks: lists of words, sums, numbers, the calendar, facts, stories, and questions about the model itself."""

import math
from random import Random

from models.demo.exercises.exercise import Exercise, Task
from models.demo.exercises.words import (
    ANIMALS,
    DAYS,
    FRUITS,
    LISTED,
    MONTHS,
    PEOPLE,
    THINGS,
    VERBS,
    with_article,
    words,
)

_SYLLABLES = words("ba bo di do fe ga gi ka ko la lu me mo na ni pa po ra ri sa so ta ti va ve wu za zo")
_LONGEST_LIST = 6
_LONGEST_REPEAT = 300
_LONGEST_TALE = 450
_COMMAS_SHARE = 0.1


def _listed(random: Random, fewest: int) -> list[str]:
    return random.sample(LISTED, random.randint(fewest, _LONGEST_LIST))


def _between(random: Random) -> str:
    """Returns the separator of listed words, in the prompt and in the answer."""
    return ", " if random.random() < _COMMAS_SHARE else " "


def _invented(random: Random) -> str:
    """Always three syllables, or 'kame' with the answer's first 'ka' could be read as a prompt of 'kameka'."""
    return "".join(random.choices(_SYLLABLES, k=3))


def _log_uniform(random: Random, low: int, high: int) -> int:
    return round(math.exp(random.uniform(math.log(low), math.log(high))))


def _repeated(words: str) -> Exercise:
    return Exercise(f"Repeat: {words}", words)


def repeat(random: Random) -> Exercise:
    """Repeats words in the same order."""
    return _repeated(_between(random).join(_listed(random, 1)))


def repeat_invented(random: Random) -> Exercise:
    """Repeats meaningless words."""
    return _repeated(" ".join(_invented(random) for _ in range(random.randint(1, _LONGEST_LIST))))


def repeat_long(random: Random) -> Exercise:
    """Repeats up to some hundred words: a long prompt with a long answer."""
    return _repeated(" ".join(random.choices(LISTED, k=_log_uniform(random, 7, _LONGEST_REPEAT))))


def reverse(random: Random) -> Exercise:
    """Reverses words."""
    words, between = _listed(random, 1), _between(random)
    return Exercise(f"Reverse: {between.join(words)}", between.join(reversed(words)))


def sort(random: Random) -> Exercise:
    """Sorts words; fruits more often than not."""
    words = random.sample(FRUITS, random.randint(2, 5)) if random.random() < 0.3 else _listed(random, 2)
    between = _between(random)
    return Exercise(f"Sort: {between.join(words)}", between.join(sorted(words)))


def add(random: Random) -> Exercise:
    """Adds two numbers of two digits.

    With one digit, and no mark between prompt and answer, '63 + 1' and its answer's '6' would be '63 + 16'.
    """
    first, second = random.randrange(10, 100), random.randrange(10, 100)
    return Exercise(f"Add: {first} + {second}", str(first + second))


def count(random: Random) -> Exercise:
    """Counts from one number to another: the prompt determines the length of the answer."""
    first = random.choice((1, random.randrange(100)))
    last = first + _log_uniform(random, 2, 100)
    return Exercise(f"Count from {first} to {last}.", " ".join(map(str, range(first, last + 1))))


def calendar(random: Random) -> Exercise:
    """Names the neighbour of a day or of a month."""
    kind, names = random.choice((("day", DAYS), ("month", MONTHS)))
    step, direction = random.choice(((1, "after"), (-1, "before")))
    index = random.randrange(len(names))
    return Exercise(f"What {kind} comes {direction} {names[index]}?", names[(index + step) % len(names)])


def lookup(random: Random) -> Exercise:
    """Finds the possession of one of several people."""
    people = random.sample(PEOPLE, random.randint(2, 8))
    things = random.sample(THINGS, len(people))
    facts = [f"{person} has a {thing}." for person, thing in zip(people, things, strict=True)]
    asked = random.randrange(len(people))
    return Exercise(f"{' '.join(facts)} What does {people[asked]} have?", f"a {things[asked]}")


def lookup_long(random: Random) -> Exercise:
    """Finds a possession that is mentioned once within a long text about something else."""
    person, thing = random.choice(PEOPLE), random.choice(THINGS)
    tale = [
        f"The {random.choice(tuple(ANIMALS))} {random.choice(VERBS)}."
        for _ in range(_log_uniform(random, 8, _LONGEST_TALE))
    ]
    tale.insert(random.randint(0, len(tale)), f"{person} has a {thing}.")
    return Exercise(f"{' '.join(tale)} What does {person} have?", f"a {thing}")


def story(random: Random) -> Exercise:
    """Tells a story of nine sentences that follow from the name and the animal only."""
    person, animal = random.choice(PEOPLE), random.choice(tuple(ANIMALS))
    request = random.choice(("Tell a story", "Tell a story", "Tell me a story"))
    return Exercise(f"{request} about {person} and {with_article(animal)}.", _story_of(person, animal))


def _story_of(person: str, animal: str) -> str:
    facts = ANIMALS[animal]
    return (
        f"{person} lived near the {facts.place}. One day {person} met {with_article(animal)}. "
        f"The {animal} was {facts.trait} and very hungry, so {person} gave it some {facts.food}. "
        f'"Thank you," said the {animal}. Then they played together until the sun went down. '
        f'"Come back soon," said {person}. After that day, {person} and the {animal} were good friends. '
        f"Every morning they shared some {facts.food} and walked to the {facts.place}. The end."
    )


def introduction(random: Random) -> Exercise:
    """Answers questions about the model."""
    question = random.choice(("What is your name?", "What is your name?", "Who are you?"))
    return Exercise(question, "My name is Baton.")


def greeting(random: Random) -> Exercise:
    """Welcomes the user."""
    hello = random.choice(("Hello", "Hi", "Good morning"))
    return Exercise(f"{hello}{random.choice(('', '!', '.', ', Baton!'))}", "Hello! What can I do for you?")


TEXT_TASKS = (
    Task("repeat", repeat, weight=5),
    Task("repeat invented words", repeat_invented, weight=4),
    Task("repeat long", repeat_long, weight=2),
    Task("reverse", reverse, weight=7),
    Task("sort", sort, weight=12),
    Task("add", add, weight=10),
    Task("count", count, weight=4),
    Task("calendar", calendar, weight=3, finite=True),
    Task("lookup", lookup, weight=8),
    Task("lookup long", lookup_long, weight=2),
    Task("story", story, weight=3),
    Task("introduction", introduction, weight=1, finite=True),
    Task("greeting", greeting, weight=1, finite=True),
)
