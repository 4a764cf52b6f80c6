"""A source: prompts from rows of {"name": …}."""

from eyas import hookimpl
from eyas.plugins import Conversation, Skip, Source
from eyas.records import Message


class Hello(Source):
    """Greetings: each row has a `name`, and the prompt greets it."""

    name = "hello"

    def parse(self, row):
        if not row["name"]:
            return Skip("nobody to greet")
        return Conversation([Message(role="user", content=f"Hello, I am {row['name']}. Who are you?")])


@hookimpl
def register_sources(register):
    register(Hello)
