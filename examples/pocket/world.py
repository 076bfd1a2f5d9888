"""The small invented world the pocket model memorises: places, their attributes, and people.

Every name is made up for this project. The tables know nothing about wordings, splits or tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ATTRIBUTES", "PEOPLE", "PLACES", "Person", "Place", "world_names"]

ATTRIBUTES = ("capital", "river", "ruler", "dish")


@dataclass(frozen=True)
class Place:
    """One invented land; the attribute values are unique across the world."""

    name: str
    capital: str
    river: str
    ruler: str
    dish: str

    def value(self, attribute: str) -> str:
        """The value of one of `ATTRIBUTES`."""
        if attribute not in ATTRIBUTES:
            raise KeyError(attribute)
        value: str = getattr(self, attribute)
        return value


@dataclass(frozen=True)
class Person:
    """One invented inhabitant."""

    name: str
    job: str
    home: str


_ROWS = """
Ostrel    Belmar     Sarn      Queen Ilva     plum soup
Velmora   Tarquin    Undrel    King Dorn      honey bread
Karsk     Hollin     Mirrow    Queen Sabeth   smoked trout
Quillan   Fennick    Tolva     King Osric     onion pie
Drumvale  Asterby    Nym       Queen Marl     pepper stew
Ithary    Corvane    Wendle    King Balto     apple cake
Zembla    Pellgate   Orrin     Queen Yara     fish dumplings
Norwick   Lumbra     Isken     King Thane     walnut rice
Pavonia   Greyhook   Lethe     Queen Odile    lemon eel
Skarra    Winterly   Bruma     King Ulf       goat cheese
Tamsin    Jorvale    Cael      Queen Petra    carrot soup
Umberly   Rookham    Dwindle   King Jasko     mushroom pie
Brenholm  Saltmere   Ember     Queen Liss     barley bread
Gallowen  Marrick    Frond     King Perrin    duck stew
Hesper    Tindale    Glint     Queen Wenna    cherry cake
Jundara   Oxlade     Harrow    King Moro      bean dumplings
Lorrimer  Pinefall   Jasper    Queen Vesna    saffron rice
Mezzoro   Quarrystone Kelp     King Hadrin    pickled eel
Nimbria   Redwater   Lull      Queen Tova     sheep cheese
Oakhurst  Silverton  Moss      King Grell     pumpkin soup
Perrault  Thornby    Nettle    Queen Ansa     cabbage pie
Rosmund   Upwell     Otter     King Fabian    rye bread
Sundral   Vinegate   Pebble    Queen Zilla    rabbit stew
Thessen   Westbarrow Quill     King Eskil     ginger cake
Varnoth   Yarrowby   Ripple    Queen Dagny    potato dumplings
Wolmark   Zinnia     Swale     King Lorcan    coconut rice
Yelden    Arkhold    Thistle   Queen Maud     grilled squid
Zorana    Brightsea  Umber     King Cosmo     cow cheese
Abrandel  Cinderford Vortle    Queen Rhea     garlic soup
Belisar   Dunmarsh   Willet    King Wystan    cheddar pie
Corrigan  Elmstead   Yarl      Queen Nessa    corn bread
Dovrine   Frosthall  Zephy     King Anselm    turnip stew
"""

_PEOPLE_ROWS = """
Arlo Finch      baker      Ostrel
Bettina Crow    doctor     Karsk
Cyrus Vale      painter    Zembla
Delia Marsh     pilot      Hesper
Edmund Pike     farmer     Quillan
Freya Stone     teacher    Skarra
Gideon Lark     sailor     Velmora
Hettie Brook    judge      Norwick
Ivor Flint      miner      Thessen
Juno Ash        dancer     Tamsin
Kasper Reed     cook       Yelden
Lottie Hawk     smith      Umberly
Magnus Thorn    writer     Ithary
Nella Frost     nurse      Pavonia
Oscar Wren      potter     Gallowen
Pippa Dale      singer     Zorana
"""


def _places() -> tuple[Place, ...]:
    rows = (line.split() for line in _ROWS.strip().splitlines())
    return tuple(Place(r[0], r[1], r[2], f"{r[3]} {r[4]}", f"{r[5]} {r[6]}") for r in rows)


def _people() -> tuple[Person, ...]:
    rows = (line.split() for line in _PEOPLE_ROWS.strip().splitlines())
    return tuple(Person(f"{r[0]} {r[1]}", r[2], r[3]) for r in rows)


PLACES: tuple[Place, ...] = _places()
PEOPLE: tuple[Person, ...] = _people()


def world_names() -> frozenset[str]:
    """Every single-word proper name of the world, so that generated names can avoid them."""
    words: set[str] = set()
    for place in PLACES:
        words.update((place.name, place.capital, place.river, place.ruler.split()[1]))
    for person in PEOPLE:
        words.update(person.name.split())
    return frozenset(words)
