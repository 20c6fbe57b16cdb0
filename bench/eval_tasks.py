"""What a quantised mode is asked: tool calls whose tool and arguments are known, and questions with one right answer.

Everything is checked mechanically, by what was said and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.tokens import Call, ToolSpec

SYSTEM_TOOLS = "You are an assistant that answers every request by calling exactly one of the tools."
SYSTEM_QUESTIONS = "Answer with the answer alone: one word, number or string, and nothing else."


def _tool(name: str, description: str, **properties: str) -> ToolSpec:
    fields = {key: {"type": kind} for key, kind in properties.items()}
    return ToolSpec(name, description, {"type": "object", "properties": fields, "required": [*fields]})


TOOLS = (
    _tool("get_weather", "The weather in a city now.", city="string"),
    _tool(
        "convert_currency",
        "Convert money; currencies are ISO codes.",
        amount="number",
        source="string",
        target="string",
    ),
    _tool("set_timer", "Start a countdown.", minutes="integer"),
    _tool("read_file", "The contents of a file.", path="string"),
    _tool("translate", "Translate a text into a language.", text="string", language="string"),
    _tool("search_web", "Search the web.", query="string"),
)


# Worked examples that come before every task: without them a small model explains instead of answering.
TOOL_EXAMPLES = (
    ("What is the weather in Madrid?", Call("get_weather", {"city": "Madrid"}, "")),
    ("Convert 5 NOK to DKK.", Call("convert_currency", {"amount": 5, "source": "NOK", "target": "DKK"}, "")),
    ("Set a timer for 7 minutes.", Call("set_timer", {"minutes": 7}, "")),
    ("Read todo.md.", Call("read_file", {"path": "todo.md"}, "")),
    ("Translate 'good night' into Dutch.", Call("translate", {"text": "good night", "language": "Dutch"}, "")),
    ("Search the web for 'solar panels'.", Call("search_web", {"query": "solar panels"}, "")),
)
QUESTION_EXAMPLES = (
    ("What is 2 + 6?", "8"),
    ("Write 'dog' backwards.", "god"),
    ("The bill for table 3 is 42 euros. Which table?", "3"),
    ("What does Python print for print(min(7, 5))?", "5"),
)


@dataclass(frozen=True)
class ToolTask:
    """A request, the tool that serves it, and the arguments that it must be given."""

    key: str
    text: str
    tool: str
    arguments: Mapping[str, str | float]


@dataclass(frozen=True)
class Question:
    """A question and the pattern that a right answer matches from its start, whatever follows."""

    key: str
    text: str
    answer: str


def right_tool(task: ToolTask, call: Mapping[str, Any] | None) -> bool:
    return call is not None and call.get("name") == task.tool


def right_call(task: ToolTask, call: Mapping[str, Any] | None) -> bool:
    """Right tool, and every argument that is named equal to what it must be; case and outer spaces do not count."""
    if call is None or not right_tool(task, call):
        return False
    given = call.get("arguments")
    return isinstance(given, dict) and all(_same(given.get(name), value) for name, value in task.arguments.items())


def right_answer(question: Question, said: str) -> bool:
    """The first line holds the answer as a word of its own; quotes, code marks and case do not count."""
    plain = re.sub(r"[`'\"*]", "", said).strip().lower()
    pattern = re.compile(rf"(?<![\w.-])(?:{question.answer.lower()})(?![\w-]|\.\d)")
    first = plain.splitlines()[0] if plain else ""
    return pattern.search(first) is not None


def _same(given: Any, value: str | float) -> bool:
    if isinstance(value, str):
        return isinstance(given, str) and given.strip().lower() == value.lower()
    return isinstance(given, int | float) and not isinstance(given, bool) and float(given) == float(value)


def _weather() -> list[ToolTask]:
    asked = {
        "What is the weather in Lisbon?": "Lisbon",
        "Is it raining in Oslo right now?": "Oslo",
        "How warm is it in Nairobi?": "Nairobi",
        "Do I need an umbrella in Hamburg?": "Hamburg",
        "Tell me the temperature in Kyoto.": "Kyoto",
        "Weather report for Toronto, please.": "Toronto",
    }
    return [ToolTask(f"weather-{n}", text, "get_weather", {"city": c}) for n, (text, c) in enumerate(asked.items())]


def _currency() -> list[ToolTask]:
    asked = {
        "Convert 100 USD to EUR.": (100, "USD", "EUR"),
        "How much is 250 EUR in JPY?": (250, "EUR", "JPY"),
        "I have 40 GBP. What is that in USD?": (40, "GBP", "USD"),
        "Change 1500 JPY into CHF.": (1500, "JPY", "CHF"),
        "What are 75 CAD worth in EUR?": (75, "CAD", "EUR"),
        "Convert 12.5 EUR to SEK.": (12.5, "EUR", "SEK"),
    }
    return [
        ToolTask(f"currency-{n}", text, "convert_currency", {"amount": a, "source": s, "target": t})
        for n, (text, (a, s, t)) in enumerate(asked.items())
    ]


def _timers() -> list[ToolTask]:
    asked = {
        "Set a timer for 10 minutes.": 10,
        "Remind me in 25 minutes.": 25,
        "Start a countdown of 3 minutes for the eggs.": 3,
        "Wake me up in 90 minutes.": 90,
        "Timer, 45 minutes.": 45,
        "The bread needs 35 minutes; count them down.": 35,
    }
    return [ToolTask(f"timer-{n}", text, "set_timer", {"minutes": m}) for n, (text, m) in enumerate(asked.items())]


def _files() -> list[ToolTask]:
    asked = {
        "Show me the file notes.txt.": "notes.txt",
        "Read /etc/hosts.": "/etc/hosts",
        "What is in src/main.py?": "src/main.py",
        "Open config.yaml and show its contents.": "config.yaml",
        "Print the contents of docs/README.md.": "docs/README.md",
        "Please read data/users.csv.": "data/users.csv",
    }
    return [ToolTask(f"file-{n}", text, "read_file", {"path": p}) for n, (text, p) in enumerate(asked.items())]


def _translations() -> list[ToolTask]:
    asked = {
        "Translate 'good morning' into French.": ("good morning", "French"),
        "How do you say 'thank you' in Japanese?": ("thank you", "Japanese"),
        "Translate 'where is the station' into German.": ("where is the station", "German"),
        "Put 'the house is red' into Spanish.": ("the house is red", "Spanish"),
        "I need 'happy birthday' in Italian.": ("happy birthday", "Italian"),
        "Translate 'see you tomorrow' into Polish.": ("see you tomorrow", "Polish"),
    }
    return [
        ToolTask(f"translate-{n}", text, "translate", {"text": t, "language": language})
        for n, (text, (t, language)) in enumerate(asked.items())
    ]


def _searches() -> list[ToolTask]:
    asked = {
        "Search the web for 'paged attention'.": "paged attention",
        "Search for 'cheap flights to Rome'.": "cheap flights to Rome",
        "Look up 'history of the violin' on the web.": "history of the violin",
        "Google 'python asyncio tutorial'.": "python asyncio tutorial",
        "Find pages about 'electric bicycles'.": "electric bicycles",
        "Search the web for 'best ramen recipe'.": "best ramen recipe",
    }
    return [ToolTask(f"search-{n}", text, "search_web", {"query": q}) for n, (text, q) in enumerate(asked.items())]


def _questions() -> list[Question]:
    asked = {
        "arithmetic": {
            "What is 7 + 5?": "12",
            "What is 9 * 6?": "54",
            "What is 100 - 37?": "63",
            "What is 144 / 12?": "12",
            "What is 15 + 28?": "43",
            "What is 8 * 7?": "56",
            "What is 2 to the power of 5?": "32",
            "What is half of 90?": "45",
            "What is 3 + 4 * 2?": "11",
            "What is the remainder of 17 divided by 5?": "2|two",
        },
        "string": {
            "Write the word 'stone' in capital letters.": "STONE",
            "What is the first letter of 'river'?": "r",
            "What is the last letter of 'planet'?": "t",
            "Write 'cat' backwards.": "tac",
            "How many letters are in the word 'bread'?": "5|five",
            "What is the plural of 'child'?": "children",
            "Join 'sun' and 'flower' into one word.": "sunflower",
            "Which comes first in the alphabet, 'pear' or 'apple'?": "apple",
            "Replace the 'b' of 'bat' by 'c'.": "cat",
            "What is the third letter of 'garden'?": "r",
        },
        "extraction": {
            "The meeting is on Tuesday at 3 pm in room 204. Which room?": "(room )?204",
            "Anna is 31 and Ben is 27. How old is Ben?": "27",
            "Order 8841 ships from Rotterdam to Boston. To which city does it ship?": "boston",
            "Contact: jane.doe@example.com, phone 555-0199. What is the e-mail address?": r"jane\.doe@example\.com",
            "The red box weighs 4 kg, the blue box 9 kg. What does the blue box weigh?": "9( ?kg| kilograms)?",
            "Marie Curie was born in Warsaw in 1867. In which year was she born?": "1867",
            "The train leaves platform 6 at 14:45. At what time does it leave?": "14:45",
            'In {"id": 7, "name": "lamp"}, what is the name?': "lamp",
            "The server's address is 10.0.0.12 and its port 8080. What is the port?": "8080",
            "Paul gave the book to Lena. Who has the book now?": "lena",
        },
        "code": {
            "What does Python print for print(len('hello'))?": "5",
            "What does Python print for print(3 * 'ab')?": "ababab",
            "What does Python print for print(10 // 3)?": "3",
            "What does Python print for print([1, 2, 3][0])?": "1",
            "What does Python print for print(max(4, 9, 2))?": "9",
            "What does Python print for print('a' in 'cat')?": "true",
            "What does Python print for print(sum([1, 2, 3]))?": "6",
            "What does Python print for print('Hi'.lower())?": "hi",
            "What does Python print for print(2 ** 4)?": "16",
            "Which Python keyword defines a function?": "def",
        },
    }
    return [
        Question(f"{kind}-{n}", text, answer)
        for kind, entries in asked.items()
        for n, (text, answer) in enumerate(entries.items())
    ]


TOOL_TASKS = (*_weather(), *_currency(), *_timers(), *_files(), *_translations(), *_searches())
QUESTIONS = tuple(_questions())

# Context for judging every position: prose, a table, a dialogue and code.
TEXT = """The harbour at Veldt had two cranes, and only one of them worked. When the morning ferry came in, the old \
man who kept the ledger walked along the quay and counted crates: twelve of oranges, four of glass, one of letters \
that nobody would claim. He wrote each number twice, once for the port and once for himself, because a book that \
agrees with nobody is worth nothing. By noon the fog had gone, and the children came down from the school to watch \
the men unload. "How deep is it here?" asked the smallest. "Nine metres at low water," said the old man, "and \
thirteen when the tide is in." She looked at the water as if it might answer for itself.

| port | crates | tons |
|------|--------|------|
| Veldt | 17 | 3.4 |
| Marrow | 52 | 10.1 |
| Eastlight | 8 | 1.6 |
| total | 77 | 15.1 |

Question: which port received the most crates? Answer: Marrow received 52 crates, more than Veldt and Eastlight \
together.

def total(rows):
    \"\"\"Sum of the second column, skipping the header.\"\"\"
    result = 0
    for row in rows[1:]:
        name, crates, tons = row
        result += int(crates)
    return result


class Ledger:
    def __init__(self, port):
        self.port = port
        self.entries = []

    def add(self, crates, tons):
        if crates < 0 or tons < 0:
            raise ValueError("a crate cannot be negative")
        self.entries.append((crates, tons))

    def __len__(self):
        return len(self.entries)

In the evening the foreman asked for the sum. The old man read it aloud, and the foreman wrote it down, and then they \
both signed. It had been done this way for forty years, and in forty years there had been a single mistake, which \
was found the same night and corrected in red ink."""
