"""Little stories with facts in them, and the questions that ask for the facts again.

This is the whole training text of the demo model (`scripts/models/train_demo.py`). Every story is
woven from a *cast*: each character has a home, a pet, a favourite food and a thing that was put
somewhere. The attributes are drawn at random, so nothing but the story itself can say where Mia hid
the lantern: a right answer is a look into the prompt, which is to say into the KV cache.

Questions are worded like the facts and answers repeat the fact up to the recalled words, because a
model of a million parameters learns to copy long before it learns to paraphrase.

Training and held-out stories never share a pair: see `is_held_out`. All randomness comes from the
`random.Random` passed in. Nothing here knows about tokens or models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

Split = Literal["train", "held_out"]
Role = Literal["system", "user", "assistant"]

# One pair in eight is kept for the held-out split.
HELD_OUT_MODULUS = 8

GIRLS = (
    "Ada Amy Anna Bea Clara Cora Dora Ella Emma Eva Fay Gia Hana Ida Ivy Jana June Kate Kira Lea "
    "Lena Lila Lucy Luna Maya Mia Mina Nina Nora Olga Pia Rita Rosa Ruth Sara Tara Tina Uma Vera "
    "Zoe"
).split()
BOYS = (
    "Abel Adam Aldo Ben Bruno Carl Dan Dino Eli Emil Finn Fred Gus Hans Hugo Ian Ivan Jack Jim "
    "Joel Kai Leo Liam Luca Max Milo Nico Noah Omar Otto Owen Paul Pete Ravi Rudy Sam Sven Theo "
    "Tim Tom"
).split()
NAMES = (*GIRLS, *BOYS)

# No thing begins with a vowel sound: "a" is always right.
THINGS = (
    "ball basket bell belt blanket book boot bottle bowl box brush bucket button candle clock coat "
    "coin comb crown cup cloak doll drum fan feather flag flute glove hat jar key kite ladder lamp "
    "lantern letter map mask mirror mug necklace net pan pearl pen pillow pot puppet purse ribbon "
    "ring rope ruby scarf shell shoe spoon sword torch towel vase wagon whistle wand"
).split()

# A place keeps its preposition, so "bridge" is always "under the bridge".
PLACES = (
    "in the attic,at the bakery,behind the barn,on the beach,under the bridge,in the cabin,"
    "in the castle,in the cave,in the cellar,behind the church,at the dock,at the farm,"
    "near the fence,in the forest,near the fountain,in the garden,by the gate,near the harbour,"
    "on the hill,in the hut,at the inn,on the island,by the lake,in the library,at the market,"
    "in the meadow,near the mill,under the oak,in the orchard,at the palace,by the pond,"
    "by the river,on the roof,at the school,by the sea,in the shed,behind the shop,"
    "behind the stable,under the stairs,by the stream,in the swamp,in the tent,in the tower,"
    "in the tunnel,in the valley,behind the wall,near the well,near the road"
).split(",")

PETS = (
    "badger beetle cat crab crow dog donkey duck fox frog goat goose hen lamb lizard mouse otter "
    "owl parrot pig pony rabbit snail turtle"
).split()
FOODS = (
    "apples beans berries bread butter cake carrots cheese cherries corn figs grapes honey jam "
    "melon noodles nuts pancakes pears peas pie plums rice soup"
).split()
COLOURS = "black blue brown golden grey green pink purple red silver white yellow".split()

# (past, infinitive): the fact uses the first, its question the second.
PLACING = (("hid", "hide"), ("left", "leave"), ("lost", "lose"), ("put", "put"), ("found", "find"))
GETTING = (("bought", "buy"), ("made", "make"), ("won", "win"), ("got", "get"))

TRAITS = "brave bright careful cheerful clever gentle happy kind little quiet shy young".split()
OPENINGS = (
    "Once upon a time there was a {trait} {child} named {name}.",
    "Once upon a time, a {trait} {child} named {name} had a great adventure.",
    "Long ago there was a {trait} {child} named {name}.",
    "There once was a {trait} {child} named {name}.",
    "This is a story about a {trait} {child} named {name}.",
)
MEETINGS = (
    "One day, {friend} came to visit {name}.",
    "On the road, {name} met a {trait} {child} named {friend}.",
    "Soon {name} met a {trait} {child} named {friend}.",
    "Then a {trait} {child} named {friend} came along.",
)
TIMES = "One day,|One morning,|That evening,|Later,|Then|After lunch,|Before dinner,".split("|")
SCENES = (
    "The sun was warm and the sky was clear.",
    "The wind was cold, but nobody was sad.",
    "It rained all night long.",
    "The birds sang in the trees.",
    "The stars were bright that night.",
    "Snow fell softly on the ground.",
    "The grass was wet and the air was fresh.",
    "It was the first day of spring.",
    "The clouds were big and soft.",
    "A little mist came up in the morning.",
    "The bees were busy among the flowers.",
    "Far away, a dog barked at the moon.",
    "The road was long and the shadows were cool.",
    "Nobody knew what would happen next.",
)
REMARKS = (
    '"What a lovely day!" said {name}.',
    '"I am so happy," said {name}.',
    '"I wonder what will happen next," said {name}.',
    '"Please be careful," said {name}.',
    "{name} smiled and sang a little song.",
    "{name} was tired and sat down for a while.",
    "{name} laughed and danced around.",
    "{name} felt very proud.",
    "{name} waved at everyone.",
    "{name} had never seen such a fine day.",
    '"Who is there?" asked {name}, but it was only the wind.',
    "{name} thought about it for a long time.",
    '"Good morning!" said {name} to the old baker.',
)
SHARED_REMARKS = (
    '"Will you help me?" asked {name}. "Of course I will," said {friend}.',
    '"Let us play a game," said {name}. "Yes, let us play!" said {friend}.',
    "{name} and {friend} ran as fast as they could.",
    "{name} told {friend} a funny secret.",
    "{friend} gave {name} a big hug.",
    "{name} and {friend} looked for treasure all day.",
    '"I have an idea," said {name}. "Tell me!" said {friend}.',
    "{name} and {friend} shared some bread and talked until it was late.",
    "{friend} did not know what to say, so {name} told a joke.",
)
ENDINGS = (
    "At the end of the day, everyone went home and slept well.",
    "It was the best day of the whole year.",
    "And from that day on, nobody was ever lonely again.",
    "At last the moon came up, and it was time to sleep.",
    "And so they all lived happily ever after.",
    "Everyone was glad, and that is the end of the story.",
)
SHARED_ENDINGS = (
    "From that day on, {name} and {friend} were the best of friends.",
    "In the end, {name} and {friend} went home together.",
)

SYSTEM_SENTENCES = (
    "You are a friendly storyteller.",
    "You tell little stories.",
    "You are a helpful assistant.",
    "Answer in one short sentence.",
    "Read the story and answer the question.",
    "Be kind and clear.",
    "Use simple words.",
)
STORY_REQUESTS = (
    "Tell me a story{about}.",
    "Please tell me a story{about}.",
    "Tell me a little story{about}.",
    "Write a story{about}.",
    "Write a short story{about}.",
    "Can you tell me a story{about}?",
    "I want to hear a story{about}.",
)
READING_REQUESTS = ("Read this story.", "Here is a story.", "Story:", "Please read the story.")
SMALL_TALK = (
    ("Hello", "Hello! Would you like to hear a story?"),
    ("Hello!", "Hello! Would you like to hear a story?"),
    ("Hi", "Hello! Would you like to hear a story?"),
    ("Hi there!", "Hello! Would you like to hear a story?"),
    ("Say hello.", "Hello! Would you like to hear a story?"),
    ("How are you?", "I am very well, thank you."),
    ("Who are you?", "I am a little storyteller."),
    ("What is your name?", "My name is Baton."),
    ("What can you do?", "I can tell stories and answer questions about them."),
    ("Thank you.", "You are welcome."),
    ("Thank you!", "You are welcome."),
    ("Good night.", "Good night, and sleep well."),
)


@dataclass(frozen=True)
class Character:
    """One person of a story and everything that can be asked about them."""

    name: str
    home: str
    pet: str
    food: str
    thing: str
    colour: str
    spot: str

    @property
    def child(self) -> str:
        return "girl" if self.name in GIRLS else "boy"

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """The combinations the split is made on."""
        return (
            (self.name, self.thing),
            (self.name, self.home),
            (self.name, self.spot),
            (self.thing, self.spot),
        )


@dataclass(frozen=True)
class Question:
    """A question with its one right answer.

    `recalled` is the part of `answer` that only the story can tell, and `word` its last word:
    "Mia hid the lantern under the bridge.", "under the bridge", "bridge".
    """

    text: str
    answer: str
    recalled: str

    @property
    def word(self) -> str:
        return self.recalled.split()[-1]


@dataclass(frozen=True)
class Fact:
    """A sentence of a story and the questions it answers."""

    sentence: str
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Story:
    """A text, the people in it and the facts it states, in the order of telling."""

    text: str
    cast: tuple[Character, ...]
    facts: tuple[Fact, ...]

    @property
    def questions(self) -> tuple[Question, ...]:
        return tuple(question for fact in self.facts for question in fact.questions)


@dataclass(frozen=True)
class Turn:
    """One message of a chat; `is_answer` where it had to be looked up in what came before."""

    role: Role
    content: str
    is_answer: bool = False


@dataclass(frozen=True)
class RecallCase:
    """One held-out question in both forms, and the word a right answer contains."""

    messages: tuple[Turn, ...]
    prompt: str
    word: str

    def is_answered_by(self, output: str) -> bool:
        """Whether the expected word is in the first sentence of `output`."""
        sentence = output.strip().split(".")[0]
        return self.word in sentence.replace("?", " ").replace(",", " ").split()


def is_held_out(first: str, second: str) -> bool:
    """Whether the pair belongs to the held-out split (a thing or a name, with a thing or place).

    Every pair of a held-out character is held out and no pair of a training character is. That is
    possible because membership is a congruence: names, things and places fall into eight classes,
    and a pair is held out when its classes are equal.
    """
    return _CLASSES[first] == _CLASSES[second]


def make_story(rng: Random, split: Split = "train") -> Story:
    """Tell one story of one to three people."""
    return make_stories(rng, 1, split)[0]


def make_stories(rng: Random, count: int, split: Split = "train") -> list[Story]:
    """Tell one to four stories in which no two people share a name or a thing."""
    sizes = [rng.choice((1, 2, 2, 3) if count == 1 else (1, 2)) for _ in range(count)]
    people = iter(make_cast(rng, sum(sizes), split))
    return [_tell(rng, [next(people) for _ in range(size)]) for size in sizes]


def make_notes(rng: Random, count: int, split: Split = "train") -> Story:
    """State two facts about each of `count` people, in any order and with nothing between.

    This is the shortest text that can be asked about; training begins with it.
    """
    cast = make_cast(rng, count, split)
    facts = [fact for person in cast for fact in rng.sample(facts_about(rng, person), 2)]
    rng.shuffle(facts)
    heading = rng.choice(("", "", "Notes:", "This is what we know."))
    text = " ".join((heading, *(fact.sentence for fact in facts))).strip()
    return Story(text, tuple(cast), tuple(facts))


def make_cast(rng: Random, size: int, split: Split) -> list[Character]:
    """Draw at most eight people, no two with the same name or thing."""
    people: list[Character] = []
    for _ in range(size):
        name = rng.choice([name for name in NAMES if all(name != p.name for p in people)])
        things = [thing for thing in THINGS if all(thing != p.thing for p in people)]
        thing = rng.choice(_in_split(split, things, name))
        home, spot = rng.sample(_in_split(split, PLACES, name, thing), 2)
        people.append(
            Character(
                name=name,
                home=home,
                pet=rng.choice(PETS),
                food=rng.choice(FOODS),
                thing=thing,
                colour=rng.choice(COLOURS),
                spot=spot,
            )
        )
    return people


def facts_about(rng: Random, person: Character) -> list[Fact]:
    """Everything there is to say about one person: three facts of theirs, three of their thing."""
    name, thing = person.name, person.thing
    got, get = rng.choice(GETTING)
    placed, place = rng.choice(PLACING)
    colour = rng.choice(("colour", "color"))
    return [
        _fact(f"{name} lived", person.home, f"Where did {name} live?"),
        _fact(f"{name} had a pet", person.pet, f"What pet did {name} have?"),
        _fact(f"{name} loved to eat", person.food, f"What did {name} love to eat?"),
        _fact(f"{name} {got} a", thing, f"What did {name} {get}?"),
        _fact(f"The {thing} was", person.colour, f"What {colour} was the {thing}?"),
        _fact(
            f"{name} {placed} the {thing}",
            person.spot,
            f"Where did {name} {place} the {thing}?",
        ),
    ]


def pick_questions(rng: Random, stories: Sequence[Story], count: int) -> list[Question]:
    """Draw up to `count` questions about any of the stories, at most one about each fact."""
    facts = [fact for story in stories for fact in story.facts]
    return [rng.choice(fact.questions) for fact in rng.sample(facts, min(count, len(facts)))]


def story_request(rng: Random, story: Story) -> str:
    """Ask for `story` by some of what it is about."""
    hero = story.cast[0]
    who = rng.choice(("", hero.name, hero.name, f"a {hero.child} named {hero.name}"))
    what = rng.choice(("", f"a {hero.thing}", f"a {hero.thing}"))
    about = " and ".join(part for part in (who, what) if part)
    return rng.choice(STORY_REQUESTS).format(about=f" about {about}" if about else "")


def chat_telling(rng: Random, story: Story, num_questions: int = 0) -> list[Turn]:
    """A chat in which the assistant tells `story` and may then be asked about it."""
    telling = [Turn("user", story_request(rng, story)), Turn("assistant", story.text)]
    questions = pick_questions(rng, [story], num_questions)
    return [*_system(rng), *telling, *_exchanges(questions)]


def chat_recall(rng: Random, stories: Sequence[Story], num_questions: int = 1) -> list[Turn]:
    """A chat whose first message holds the stories and a question; more questions follow."""
    text = join(stories)
    if rng.random() < 0.3:
        text = rng.choice(READING_REQUESTS) + rng.choice((" ", "\n")) + text
    first, *others = _exchanges(pick_questions(rng, stories, num_questions))
    opening = Turn("user", text + rng.choice((" ", "\n", "\n\n")) + first.content)
    return [*_system(rng), opening, *others]


def chat_small_talk(rng: Random) -> list[Turn]:
    """A greeting or a question about the assistant."""
    said, reply = rng.choice(SMALL_TALK)
    return [*_system(rng), Turn("user", said), Turn("assistant", reply)]


def completion_question(question: Question) -> str:
    """Ask in plain text: what comes after "Answer:" is left to the model."""
    return f"\nQuestion: {question.text}\nAnswer:"


def join(stories: Sequence[Story]) -> str:
    return "\n\n".join(story.text for story in stories)


def recall_cases(count: int, seed: int, num_stories: int = 1) -> Iterator[RecallCase]:
    """Held-out questions, each asked in chat form and in completion form."""
    rng = Random(seed)
    for _ in range(count):
        stories = make_stories(rng, num_stories, "held_out")
        (question,) = pick_questions(rng, stories, 1)
        yield RecallCase(
            messages=(Turn("user", f"{join(stories)}\n{question.text}"),),
            prompt=join(stories) + completion_question(question),
            word=question.word,
        )


def _in_split(split: Split, pool: Sequence[str], *partners: str) -> list[str]:
    held_out = split == "held_out"
    return [
        choice
        for choice in pool
        if all(is_held_out(choice, partner) == held_out for partner in partners)
    ]


def _fact(beginning: str, recalled: str, asked: str, asked_who: str = "") -> Fact:
    """A fact is its beginning and what has to be recalled; `asked_who` wants the first word."""
    sentence = f"{beginning} {recalled}."
    questions = [Question(asked, sentence, recalled)]
    if asked_who:
        answer = asked_who.replace("Who", beginning.split()[0]).replace("?", ".")
        questions.append(Question(asked_who, answer, beginning.split()[0]))
    return Fact(sentence, tuple(questions))


def _tell(rng: Random, cast: Sequence[Character]) -> Story:
    """Introduce everyone, then say where their things ended up, then end.

    Between the facts go sentences without any, so that the next fact is never at a fixed distance.
    """
    hero, *friends = cast
    sentences: list[str] = []
    facts: list[Fact] = []
    endings: list[Fact] = []

    def say(templates: Sequence[str], **who: str) -> None:
        sentences.append(rng.choice(templates).format(trait=rng.choice(TRAITS), **who))

    def state(fact: Fact) -> None:
        facts.append(fact)
        leads = TIMES if not fact.sentence.startswith("The ") else ()
        lead = rng.choice(leads) + " " if leads and rng.random() < 0.5 else ""
        sentences.append(lead + fact.sentence)
        if rng.random() < 0.3:
            say((*SCENES, *REMARKS), name=rng.choice(cast).name)

    for person in cast:
        if person is hero:
            say(OPENINGS, name=hero.name, child=hero.child)
        else:
            say(MEETINGS, name=hero.name, friend=person.name, child=person.child)
        *personal, getting, colour, placing = facts_about(rng, person)
        for fact in rng.sample(personal, rng.randint(1, 3)):
            state(fact)
        state(getting)
        if rng.random() < 0.6:
            state(colour)
        endings.append(placing)

    if friends:
        say(SHARED_REMARKS, name=hero.name, friend=rng.choice(friends).name)
    rng.shuffle(endings)
    for fact in endings:
        state(fact)
    if friends and rng.random() < 0.5:
        say(SHARED_ENDINGS, name=hero.name, friend=rng.choice(friends).name)
    else:
        say(ENDINGS)
    return Story(" ".join(sentences), tuple(cast), tuple(facts))


def _system(rng: Random) -> list[Turn]:
    """Now and then, a system message of a few sentences."""
    if rng.random() < 0.7:
        return []
    sentences = rng.sample(SYSTEM_SENTENCES, rng.randint(1, 3))
    return [Turn("system", " ".join(sentences))]


def _exchanges(questions: Sequence[Question]) -> list[Turn]:
    turns: list[Turn] = []
    for question in questions:
        turns.append(Turn("user", question.text))
        turns.append(Turn("assistant", _in_the_story(question.answer), is_answer=True))
    return turns


def _in_the_story(answer: str) -> str:
    """Begin a chat answer with words that never differ.

    A name at the very start of a message would be another token than the same name in the story.
    """
    is_about_thing = answer.startswith("The ")
    return "In the story, " + ("the " + answer[4:] if is_about_thing else answer)


_CLASSES = {
    word: index % HELD_OUT_MODULUS
    for pool in (NAMES, THINGS, PLACES)
    for index, word in enumerate(pool)
}
