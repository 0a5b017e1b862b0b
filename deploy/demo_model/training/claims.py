"""What questions of yes or no say about a shape, and whether it holds. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.demo_model.training.data import COLOUR_NAMES, SHAPES, Turn

UNKNOWN_SHAPES = (
    "square", "star", "hexagon", "pentagon", "octagon", "oval", "ellipse", "diamond", "heart", "cross",
    "arrow", "crescent", "cube", "sphere", "cone", "cylinder", "pyramid", "spiral", "ring", "line", "dot",
    "zigzag", "wave", "curve", "lozenge", "nonagon", "decagon", "polygon", "quadrilateral", "tetrahedron",
    "donut", "dome", "helix", "teardrop", "knot", "grid", "loop", "cuboid", "pentagram", "arc", "swirl",
    "rosette", "quatrefoil", "chevron", "pentacle", "hexagram", "undecagon", "tridecagon", "icosagon",
    "hexahedron", "octahedron", "dodecahedron", "polyhedron", "cuboctahedron", "ellipsoid", "spheroid",
    "hemisphere", "ovoid", "capsule", "stadium", "disc", "disk", "semioval", "sector", "segment",
    "quadrant", "parabola", "hyperbola", "sinusoid", "cycloid", "cardioid", "nautilus", "vortex", "whorl",
    "coil", "squiggle", "scribble", "doodle", "stripe", "bar", "beam", "block", "brick", "slab", "tile",
    "plus", "minus", "asterisk", "slash", "bracket", "checkmark", "tick", "hash", "pound sign", "comma",
    "bullet", "blob", "splash", "drop", "droplet", "bubble", "cloud", "lightning bolt", "flame", "leaf",
    "petal", "flower", "shamrock", "crown", "shield", "badge", "ribbon", "banner", "pennant", "bell",
    "horseshoe", "hourglass", "keyhole", "barbell", "ladder", "lattice", "mesh", "web", "fan", "shell",
    "cog", "gear", "wheel", "hoop", "halo", "band", "bracelet", "lens", "almond", "tear", "bulb", "obelisk",
    "pillar", "column", "arch", "vault", "tower", "staircase", "step", "notch", "spike", "thorn", "fang",
    "hook", "anchor", "boomerang", "propeller", "snowflake", "sunburst", "asteroid", "galaxy", "moon",
    "sun", "planet", "letter", "number", "digit", "face", "smiley", "hand", "foot", "eye", "mouth",
    "person", "man", "woman", "child", "tree", "house", "logo", "map", "text", "word", "shadow",
    "ring doughnut", "plus sign", "trapezium", "polka dot", "gingham", "tartan", "houndstooth", "paisley",
    "herringbone", "checkerboard", "argyle", "question mark", "exclamation mark", "hashtag", "ampersand",
    "smiley face", "thumbs up", "letter b", "percent sign", "cloud shape", "flower shape", "clover",
    "butterfly shape", "puzzle piece", "speech bubble", "icosahedron", "frustum", "hyperboloid",
    "moebius strip", "lemniscate", "sine wave", "astroid", "squircle", "octothorpe", "tilde", "arrowhead",
    "treble clef", "ankh", "yin yang", "swoosh", "tessellation", "fractal", "koch snowflake",
    "sierpinski carpet", "minus sign", "check mark", "exclamation point", "at sign", "dollar sign",
    "infinity symbol", "peace sign", "pixel skull", "pitchfork", "triforce", "pokeball", "plaid",
    "letter x", "trefoil", "cinquefoil", "saltire", "celtic knot", "triskelion", "thistle emblem", "ogee",
    "vesica", "mandorla", "cartouche", "fesse", "annulet", "mullet", "greek key", "fretwork", "arabesque",
    "volute", "labyrinth", "gibbous moon", "rhomboid", "truncated cone", "ogham stroke", "rune", "pilcrow",
    "asterism", "keystone", "lancet", "scallop", "crenellation", "tracery", "kidney", "quarter moon",
    "swag", "palmette", "wave scroll", "corner flag", "euro symbol", "barcode", "crest", "egg shape",
    "infinity sign", "pinstripe", "key outline", "reuleaux", "play button", "lens flare", "mandala",
    "cloud outline", "semicolon", "crosshair", "half moon", "wavy line", "ripple", "doughnut shape",
    "fish outline", "shark fin", "paw print", "footprint", "handprint", "sheriff star", "pie slice",
    "bass clef", "fermata", "sharp sign", "flat sign", "natural sign", "quarter rest", "eighth note",
    "half note", "whole rest", "coda sign", "segno", "repeat sign", "mordent", "slur", "trill sign",
    "accent mark", "musical staff", "bar line", "curly brace", "caret", "equals sign", "pause symbol",
    "wheelchair symbol", "sankofa", "basketweave", "starburst", "sine curve", "euro sign", "maple leaf",
    "anchor symbol", "music note", "gear wheel", "bell curve", "donut shape", "nephroid", "honeycomb",
    "basket weave", "hash sign", "starfish outline", "koch curve", "harp", "triskele", "double spiral",
    "egg", "club", "spade", "dagger", "mitre", "crozier", "chalice", "key", "wishbone", "cross hatch",
    "funnel", "gauge", "sparkline", "bar chart", "hockey stick", "harvey ball", "venn diagram", "swimlane",
    "flowchart arrow", "carat", "bitcoin sign", "cross mark", "pill", "map pin", "padlock", "cogwheel",
    "hamburger menu", "power symbol", "wifi symbol", "recycling symbol", "om symbol", "lotus mandala",
    "batik motif",
)  # fmt: skip
UNKNOWN_COLOURS = (
    "orange", "purple", "pink", "white", "violet", "magenta", "beige", "lavender", "lilac", "peach",
    "ivory", "cream", "khaki", "tan", "amber", "bronze", "copper", "coral", "salmon", "ruby", "scarlet",
    "burgundy", "plum", "mauve", "fuchsia", "rose", "apricot", "mustard", "lemon", "lime", "mint",
    "emerald", "jade", "aqua", "cyan", "azure", "sapphire", "cobalt", "ultramarine", "charcoal", "ebony",
    "chestnut", "chocolate", "hazel", "rust", "sand", "pearl", "platinum", "golden", "silvery", "rainbow",
    "transparent", "auburn", "russet", "sienna", "bisque", "linen", "snow", "ecru", "fawn", "buff", "camel",
    "caramel", "cinnamon", "coffee", "mocha", "cocoa", "walnut", "espresso", "tawny", "brick", "blood",
    "cherry", "raspberry", "claret", "wine", "merlot", "garnet", "cerise", "blush", "flamingo", "bubblegum",
    "shrimp", "tangerine", "pumpkin", "carrot", "papaya", "melon", "honey", "saffron", "canary", "banana",
    "butter", "corn", "flax", "straw", "wheat", "citron", "pistachio", "pea", "moss", "fern", "sage",
    "forest", "pine", "avocado", "kelly", "shamrock", "malachite", "seafoam", "aquamarine", "glaucous",
    "denim", "steel", "slate", "sky", "ice", "royal", "midnight", "prussian", "lapis", "iris", "orchid",
    "grape", "eggplant", "aubergine", "thistle", "wisteria", "amethyst", "pewter", "lead", "smoke", "ash",
    "graphite", "onyx", "jet", "raven", "obsidian", "alabaster", "porcelain", "bone", "eggshell", "nickel",
    "brass", "titanium", "neon", "pastel", "colorless", "multicolored", "striped", "spotted", "dotted",
    "checkered", "plaid", "metallic", "magnolia", "duck egg", "oatmeal", "dusty pink", "hot pink",
    "champagne", "buttermilk", "biscuit", "fudge", "mushroom", "stone", "putty", "heather", "cranberry",
    "terracotta", "satsuma", "cornflower", "periwinkle", "airforce", "bluebell", "vermilion", "chartreuse",
    "cerulean", "burnt sienna", "celadon", "amaranth", "heliotrope", "gamboge", "puce", "oxblood",
    "viridian", "carnelian", "mulberry", "gunmetal", "british racing", "nardo", "alpine white", "seashell",
    "papayawhip", "rebeccapurple", "coquelicot", "tourmaline", "smalt", "isabelline", "falu",
    "caput mortuum", "fulvous", "eburnean", "verdigris", "sangria", "neon pink", "slime", "volt", "buckeye",
    "electric purple", "mango", "topaz", "chrome", "off white", "camo", "pumpkin spice", "strawberry",
    "madder", "woad", "cinnabar", "orpiment", "realgar", "murrey", "damson", "quince", "port wine",
    "primrose", "lovat", "alizarin", "rose madder", "raw umber", "tyrian purple", "feldgrau", "bistre",
    "sanguine", "porphyry", "cornelian", "heliodor", "hyacinth", "foxglove", "delphinium", "gentian",
    "larkspur", "porridge", "kipper", "marmalade", "vellum", "parchment", "crushed strawberry", "acai",
    "guava", "cashew", "passion fruit", "coconut", "pitanga", "jabuticaba", "cappuccino", "mahogany",
    "jacaranda", "hibiscus", "bougainvillea", "citrine", "opal", "agate", "pearl white", "candy apple",
    "bordeaux", "nude", "stonewash", "military", "petroleum", "watermelon", "persimmon", "petrol",
    "anthracite", "oyster white", "wattle", "eucalyptus", "banksia", "spinifex", "saltbush", "galah pink",
    "cane toad", "paperbark", "lagoon", "sandstone", "rosella", "boronia", "waratah", "bottlebrush", "port",
    "turmeric", "burnt orange", "butterscotch", "cordovan", "sunburst", "oyster", "rosewood", "cantaloupe",
    "rhubarb", "molasses", "paprika", "cayenne", "sweet potato", "collard", "okra", "rose quartz",
    "powder puff", "raisin", "marigold", "goldenrod", "vanilla", "buttercream", "eggnog", "peony", "dahlia",
    "petunia", "tomato", "absinthe", "dijon", "camembert", "mirabelle", "lobster", "prune", "greige",
    "maple", "carmine", "old rose", "daffodil", "lapis lazuli", "rowanberry", "loganberry", "porter",
    "bog cotton", "sloe", "gorse", "hawthorn", "clotted cream", "donkey", "bay", "palomino", "roan",
    "trout", "seaweed", "bottle glass", "loden", "candyfloss", "whiskey", "treacle", "toffee", "limestone",
    "chalk", "cardinal", "tweed", "pandan", "ube", "taro", "kaya", "matcha", "hojicha", "gula melaka",
    "latte", "dragonfruit", "lychee pink", "rambutan", "mangosteen", "pomelo", "calamansi", "kumquat",
    "frangipani", "jasmine", "lotus pink", "peranakan pink", "peridot", "aventurine", "moonstone", "carbon",
    "nardo grey", "baby pink", "millennial pink", "prawn", "spearmint",
)  # fmt: skip
UNKNOWN_SHAPES_HELD_OUT = (
    "trapezoid", "parallelogram", "dodecagon", "kite", "rhombus", "heptagon", "semicircle", "prism", "torus",
    "wedge",
)  # fmt: skip
UNKNOWN_COLOURS_HELD_OUT = (
    "turquoise", "maroon", "indigo", "crimson", "gold", "silver", "navy", "olive", "ochre", "taupe",
)  # fmt: skip
STRANGE_RATIO = 0.45  # of the unknown shapes and colors in training: words that nothing has
THING_RATIO = 0.2  # of them: things of everyday life

Fact = tuple[str, str]  # shape and colour


@dataclass(frozen=True)
class Claim:
    """What a question of yes or no says about a shape, in the forms that wordings need.

    `about`: "shape", "colour" or "both".
    """

    about: str
    shape: str
    colour: str

    def holds(self, fact: Fact) -> bool:
        """Whether a shape is as claimed."""
        is_shape, is_colour = self.shape == fact[0], self.colour == fact[1]
        return {"shape": is_shape, "colour": is_colour, "both": is_shape and is_colour}[self.about]

    def named(self, fact: Fact) -> str:
        """What an answer names of a shape: "circle", "red" or "red circle"."""
        shape, colour = fact
        return {"shape": shape, "colour": colour, "both": f"{colour} {shape}"}[self.about]

    def fact(self, fact: Fact) -> str:
        """The beginning of an answer about one shape."""
        return f"It is {'' if self.about == 'colour' else 'a '}{self.named(fact)}"

    def facts(self, facts: Sequence[Fact]) -> str:
        """The beginning of an answer about several."""
        kind = "colors" if self.about == "colour" else "shapes"
        return f"The {kind} are {listed([self.named(fact) for fact in facts])}"

    def slots(self, rng: random.Random) -> dict[str, str]:
        """How wordings name it."""
        thing = rng.choice(("shape", "shape", "object", "thing"))
        noun = thing if self.about == "colour" else self.shape
        bare = noun if self.about == "shape" else f"{self.colour} {noun}"
        predicate = self.colour if self.about == "colour" else with_article(bare)
        return {"x": with_article(bare), "xs": f"{bare}s", "bare": bare, "p": predicate, "the": f"the {bare}",
                "shape": self.shape, "colour": self.colour, "a_shape": with_article(self.shape)}  # fmt: skip


def with_article(name: str) -> str:
    """ "a circle", "an oval"."""
    return f"{'an' if name[0] in 'aeio' else 'a'} {name}"


def listed(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def decided(question: str, fact: str, word: str) -> Turn:
    """The fact, then what follows from it."""
    return Turn(question, f"{fact}, so {word}.", key=f" {word}.")


def yes_or_no(is_true: bool) -> str:
    """The word."""
    return "yes" if is_true else "no"


def draw_claim(rng: random.Random, facts: Sequence[Fact], about: str = "", true_ratio: float = 0.5) -> Claim:
    """A claim that one of the facts makes true with the probability `true_ratio`, else none of them."""
    about = about or rng.choice(("shape", "shape", "colour", "colour", "both"))
    shape, colour = rng.choice(facts)
    wanted = rng.random() < true_ratio
    if wanted:
        return Claim(about, shape, colour)
    others = [
        claim
        for claim in (
            Claim(about, other_shape, other_colour) for other_shape in SHAPES for other_colour in COLOUR_NAMES
        )
        if not any(claim.holds(fact) for fact in facts)
    ]
    near = [claim for claim in others if (claim.shape == shape) != (claim.colour == colour)]
    return (
        rng.choice(near if near and rng.random() < 0.7 else others) if others else Claim(about, shape, colour)
    )


def draw_unknown_claim(
    rng: random.Random,
    facts: Sequence[Fact],
    shapes: Sequence[str] = UNKNOWN_SHAPES,
    colours: Sequence[str] = UNKNOWN_COLOURS,
) -> Claim:
    """A claim with a shape or a color that no image has, so it never holds. "square" is left out where an
    image has a rectangle, which may be one."""
    about = rng.choice(("shape", "shape", "colour", "colour", "both"))
    shape, colour = rng.choice(SHAPES), rng.choice(COLOUR_NAMES)
    if about == "shape" or (about == "both" and rng.random() < 0.5):
        has_rectangle = any(fact[0] == "rectangle" for fact in facts)
        names = [name for name in shapes if name != "square" or not has_rectangle]
        return Claim(about, rng.choice(names), colour)
    return Claim(about, shape, rng.choice(colours))
