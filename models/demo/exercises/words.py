"""The vocabulary of the demonstration model's small world."""

from dataclasses import dataclass
from types import MappingProxyType


def words(text: str) -> tuple[str, ...]:
    """Splits a text into words at spaces."""
    return tuple(text.split())


DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

MONTHS = words("January February March April May June July August September October November December")

PEOPLE = words(
    "Mia Tom Anna Ben Clara David Emma Felix Grace Hugo Ida Jack Kate Leo Lucy Max Nora Oscar Paul Rosa Sam Tina "
    "Victor Zoe"
)

FRUITS = words("apple banana cherry fig grape kiwi lemon lime mango melon olive orange peach pear plum berry")

THINGS = words(
    "basket bell boat book bottle brush button candle chair clock coin cup drum hat key kite ladder lamp map mirror "
    "ribbon ring rope shoe spoon table"
)

VERBS = words("sleeps sings waits runs plays jumps swims hides")


@dataclass(frozen=True, slots=True)
class AnimalFacts:
    """The sentences of every story about an animal."""

    place: str
    food: str
    trait: str


ANIMALS = MappingProxyType(
    {
        "bear": AnimalFacts("cave", "honey", "sleepy"),
        "cat": AnimalFacts("house", "milk", "proud"),
        "crow": AnimalFacts("tower", "seeds", "noisy"),
        "dog": AnimalFacts("farm", "bread", "loyal"),
        "duck": AnimalFacts("pond", "corn", "funny"),
        "fox": AnimalFacts("forest", "berries", "clever"),
        "frog": AnimalFacts("river", "flies", "green"),
        "goat": AnimalFacts("hill", "grass", "stubborn"),
        "horse": AnimalFacts("meadow", "apples", "fast"),
        "lion": AnimalFacts("desert", "meat", "brave"),
        "mouse": AnimalFacts("barn", "cheese", "shy"),
        "owl": AnimalFacts("wood", "nuts", "wise"),
        "rabbit": AnimalFacts("garden", "carrots", "quick"),
        "tiger": AnimalFacts("jungle", "fish", "strong"),
        "whale": AnimalFacts("sea", "shrimp", "huge"),
        "wolf": AnimalFacts("mountain", "soup", "lonely"),
    }
)

LISTED = tuple(sorted({*FRUITS, *THINGS, *ANIMALS}))
"""The words of the list tasks: repeat, reverse and sort."""


def with_article(noun: str) -> str:
    """Returns the noun after the right one of 'a' and 'an'."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
