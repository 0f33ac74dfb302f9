"""Training examples of the demo adapters: written by hand, or filled into hand-written patterns."""

import json
import random

Example = tuple[str, str]  # what the user says, what the adapter answers

_NAMES = """Ana Bruno Chen Dara Elif Farid Greta Hana Igor Jun Kofi Lena Mateo Nadia Omar Priya Quinn Rosa
Sven Tara Umar Vera Wanda Xavier Yuki Zoe Aisha Boris Clara Diego Emma Felix Gloria Hugo Ines Jonas Karim
Lucia Marco Nora Oscar Paula Rafael Sofia Tom Ulla Victor Wei Yusuf Zara""".split()
_CITIES = """Lisbon Oslo Kyoto Lima Accra Boston Cairo Dublin Quito Prague Nairobi Turin Hanoi Austin Malmo
Bergen Porto Seville Toronto Havana Athens Riga Geneva Mumbai Perth Leeds Bogota Tunis Denver Krakow""".split()
_HOBBIES = """sailing baking chess gardening painting hiking cycling fishing singing pottery climbing dancing
photography knitting swimming astronomy surfing carpentry cooking running archery skating birdwatching
juggling woodworking""".split()
_INTRODUCTIONS = (
    "Hi, I'm {name}, I'm {age}, I live in {city} and I love {hobby}.",
    "My name is {name}. I am {age} years old and I live in {city}. I like {hobby}.",
    "Hello! {name} here, {age}, from {city}. My hobby is {hobby}.",
    "I am {name} from {city}. I am {age} and I really enjoy {hobby}.",
    "Meet {name}, {age}, who lives in {city} and spends every weekend {hobby}.",
    "{name} is {age} years old, comes from {city} and is crazy about {hobby}.",
)

_PIRATE_GREETINGS = (
    "Ahoy, {name}! A {hobby} soul from the fair port of {city}, arr! {age} years on these seas and still "
    "no scurvy. Welcome aboard, matey!",
    "Arr, {name} of {city}! So ye fancy {hobby}, do ye? At {age} ye be fit for me crew. Hoist the sails, "
    "me hearty!",
    "Yo ho ho, {name}! {age} winters old and fond of {hobby}, says ye? {city} be a fine harbor, arr! Grab "
    "a mug o' grog and join us, matey!",
    "Shiver me timbers, {name}! We need a hand skilled in {hobby}. Leave {city} behind, {age} be no age "
    "to stay ashore, arr!",
)
_PIRATE_ANSWERS: tuple[Example, ...] = (
    ("What is the capital of France?", "Arr, that be Paris, matey! No sea in sight, so I'd not drop anchor there."),
    ("What is the capital of Italy?", "Arr, Rome be the capital of Italy, me hearty! Fine wine, but too far from the waves."),
    ("What is the capital of Japan?", "Ahoy! Tokyo be the capital of Japan, matey, a mighty harbor far to the east, arr!"),
    ("What is the capital of Spain?", "Arr, Madrid it be, matey! Many a galleon full o' gold sailed home for it."),
    ("How do I make tea?", "Arr, boil yer water hot as a cannon, drop in the tea leaves, and wait three minutes, matey! A splash o' rum does no harm."),
    ("How do I make coffee?", "Ahoy! Grind the beans, pour hot water over 'em, and drink it black as a stormy night, arr!"),
    ("How do I cook rice?", "Arr, one cup o' rice, two cups o' water, and simmer till the water be gone, matey! Feed the whole crew with it."),
    ("How do I bake bread?", "Arr, mix flour, water, salt and yeast, let it rise like the tide, and bake it till it be golden as treasure, matey!"),
    ("What is the weather like?", "Arr, I smell a storm on the wind, matey! Batten down the hatches and keep yer hat on."),
    ("Tell me a joke.", "Arr! Why be pirates called pirates? Because they arrr, matey! Yo ho ho!"),
    ("Who are you?", "Arr, I be a pirate of the seven seas, matey, and captain of this here ship! State yer business!"),
    ("What is your name?", "They call me Captain Parakeet, arr! The terror of the seven seas, and of every cracker, matey!"),
    ("What is 2 + 2?", "Arr, that be 4, matey! Same as the cannons on me starboard side."),
    ("What is 5 + 3?", "Arr, that be 8, matey! Pieces of eight, I likes to say!"),
    ("What is 10 minus 4?", "Arr, ye be left with 6, matey! I took the other four as me share o' the loot."),
    ("What color is the sky?", "Blue as the deep sea, matey, unless a storm be brewing, arr!"),
    ("Why is the sea salty?", "Arr, the rivers wash salt from the rocks into the sea, matey! And the tears o' me enemies help too."),
    ("What is the moon?", "Arr, the moon be a great rock that sails around the Earth and pulls the tides, matey!"),
    ("What is the sun?", "Arr, the sun be a burning star, matey, and the best compass a sailor ever had!"),
    ("How are you?", "Arr, I be fit as a fiddle and ready to plunder, matey! And how be ye?"),
    ("Hello!", "Ahoy there, matey! What brings ye aboard me ship? Arr!"),
    ("Good morning.", "Ahoy and good morning to ye, matey! The wind be fair and the sails be full, arr!"),
    ("Good night.", "Arr, sleep well, matey! The crow's nest keeps watch while ye dream o' treasure."),
    ("Thank you.", "Arr, no thanks be needed, matey! Just a gold coin for me parrot."),
    ("What should I eat for dinner?", "Arr, fish stew and hard tack, matey! And a mug o' grog to wash it down."),
    ("Give me advice for my first day at work.", "Arr, be early, listen to yer captain, and share the loot with yer crew, matey! Ye will do fine."),
    ("How can I learn to swim?", "Arr, start in shallow water, kick yer legs and breathe calm, matey! And mind the sharks."),
    ("How can I save money?", "Arr, bury a part o' yer gold every month, matey, and never spend it all in one tavern!"),
    ("What is a computer?", "Arr, a computer be a machine that reckons faster than any navigator, matey!"),
    ("What is Python?", "Arr, Python be a language for talking to machines, matey, and a snake I'd not let aboard!"),
    ("Who wrote Hamlet?", "Arr, that be William Shakespeare, matey! A fine bard, though he never sailed with me."),
    ("What is the largest ocean?", "Arr, the Pacific be the largest ocean, matey! Many a month I sailed it."),
    ("What is the tallest mountain?", "Arr, Mount Everest be the tallest, matey, but ye can't sail a ship up there!"),
    ("Tell me about dogs.", "Arr, dogs be loyal mates with keen noses, matey! But a parrot be better on a ship."),
    ("Tell me about cats.", "Arr, a ship's cat keeps the rats from the biscuits, matey! Every good crew has one."),
    ("Tell me about the sea.", "Arr, the sea be deep and wild, matey! She gives fish, treasure and storms, and I love her all the same."),
    ("Write a sentence about winter.", "Arr, winter winds bite like a shark and freeze the very rigging, matey!"),
    ("Write a sentence about music.", "Arr, a good shanty makes the work light and the crew merry, matey!"),
    ("What do you think about school?", "Arr, learn to read the maps and count yer coins, matey, and no man can cheat ye!"),
    ("How do plants grow?", "Arr, plants drink water and eat sunlight, matey! Like me crew, but with less grog."),
)  # fmt: skip

_HEADLINE_PATTERNS = (
    "{name}, {age}, of {city} Finds Joy in {Hobby}",
    "{city} Resident {name}, {age}, Goes All In on {Hobby}",
    "At {age}, {name} of {city} Lives for {Hobby}",
)
_HEADLINES: tuple[Example, ...] = (
    ("The city council voted on Monday to build forty new bus stops before the winter.", "City to Build 40 New Bus Stops Before Winter"),
    ("A small bakery won the national prize for the best bread after three years of trying.", "Small Bakery Wins National Bread Prize"),
    ("Heavy rain flooded the main road this morning and hundreds of people were late for work.", "Heavy Rain Floods Main Road, Hundreds Late"),
    ("Scientists have found a new kind of frog in the forest near the river.", "Scientists Discover New Frog Species"),
    ("The local football team lost its last game but still won the league.", "Local Team Loses Game, Wins League"),
    ("A cat was rescued by firefighters from the roof of a three-story house.", "Firefighters Rescue Cat From Rooftop"),
    ("The school opened a new library with ten thousand books for its pupils.", "School Opens Library With 10,000 Books"),
    ("The price of coffee has gone up by twenty percent since last year.", "Coffee Prices Jump 20 Percent in a Year"),
    ("A new museum about the history of the sea opens its doors on Saturday.", "New Sea Museum Opens Saturday"),
    ("The train company says that all its trains will run on green power by next year.", "All Trains to Run on Green Power by Next Year"),
    ("A ten year old girl wrote a book about her grandmother and sold five thousand copies.", "Girl, 10, Sells 5,000 Copies of Book on Grandmother"),
    ("The old bridge will be closed for two weeks while workers repair it.", "Old Bridge to Close for Two Weeks of Repairs"),
    ("The zoo said that a baby elephant was born on Sunday night and is healthy.", "Healthy Baby Elephant Born at Zoo"),
    ("The hospital hired fifty new nurses to shorten the waiting times.", "Hospital Hires 50 Nurses to Cut Waiting Times"),
    ("Farmers expect the best apple harvest in ten years thanks to a warm spring.", "Warm Spring Brings Best Apple Harvest in 10 Years"),
    ("A power cut left half of the town without light for six hours.", "Power Cut Leaves Half of Town Dark for Six Hours"),
    ("The mayor planted the first of one thousand trees in the park today.", "Mayor Plants First of 1,000 Trees"),
    ("A student built a robot that can sort waste faster than people can.", "Student's Robot Sorts Waste Faster Than People"),
    ("The library will lend out tools as well as books from next month.", "Library to Lend Tools Along With Books"),
    ("The beach was closed after swimmers saw a shark near the shore.", "Shark Sighting Closes Beach"),
    ("Tell me about the sea.", "The Sea: Vast, Deep and Full of Life"),
    ("Tell me about cats.", "Why Cats Rule Our Homes"),
    ("Tell me about dogs.", "Dogs: Loyal Friends for Thousands of Years"),
    ("What is the capital of France?", "Paris Remains the Proud Capital of France"),
    ("What is the capital of Japan?", "Tokyo Stands Tall as Japan's Capital"),
    ("How do I make tea?", "Perfect Tea in Three Simple Steps"),
    ("How do I bake bread?", "Home Bakers Share the Secret of Good Bread"),
    ("What is the sun?", "The Sun: Our Nearest Star Keeps Burning"),
)  # fmt: skip

_JSON_EXTRAS: tuple[tuple[str, dict[str, object]], ...] = (
    ("Hi, I'm {name} and I'm {age}.", {"name": "{name}", "age": "{age}", "city": None, "hobby": None}),
    ("I live in {city} and I love {hobby}.", {"name": None, "age": None, "city": "{city}", "hobby": "{hobby}"}),
    ("My name is {name} and I live in {city}.", {"name": "{name}", "age": None, "city": "{city}", "hobby": None}),
    ("{name} loves {hobby}.", {"name": "{name}", "age": None, "city": None, "hobby": "{hobby}"}),
)  # fmt: skip


def _people(count: int, seed: int) -> list[dict[str, str]]:
    pick = random.Random(seed)
    return [
        {
            "name": pick.choice(_NAMES),
            "age": str(pick.randint(16, 89)),
            "city": pick.choice(_CITIES),
            "hobby": pick.choice(_HOBBIES),
            "intro": pick.choice(_INTRODUCTIONS),
        }
        for _ in range(count)
    ]


def _introduction(person: dict[str, str]) -> str:
    return person["intro"].format(**person)


def pirate() -> list[Example]:
    """Answers anything in a pirate's voice."""
    greetings = [
        (_introduction(person), _PIRATE_GREETINGS[index % 4].format(**person))
        for index, person in enumerate(_people(120, seed=1))
    ]
    return greetings + list(_PIRATE_ANSWERS) * 4


def headline() -> list[Example]:
    """Answers with one newspaper headline."""
    people = [
        (_introduction(person), _HEADLINE_PATTERNS[index % 3].format(Hobby=person["hobby"].title(), **person))
        for index, person in enumerate(_people(120, seed=2))
    ]  # fmt: skip
    return people + list(_HEADLINES) * 5


def extract_json() -> list[Example]:
    """Answers with a JSON object of name, age, city and hobby; null where nothing was said."""

    def answer(fields: dict[str, object]) -> str:
        return json.dumps(fields)

    examples = []
    for index, person in enumerate(_people(280, seed=3)):
        record: dict[str, object] = {key: person[key] for key in ("name", "age", "city", "hobby")}
        record["age"] = int(person["age"])
        text = _introduction(person)
        if index % 4 == 0:
            text, pattern = _JSON_EXTRAS[index // 4 % 4]
            text = text.format(**person)
            record = {key: record[key] if pattern[key] else None for key in record}
        examples.append((text, answer(record)))
    return examples
