"""The former place of the items of requests (runtime.server.openai.responses.items), for one release."""

from runtime.server.openai.responses.items import input_items as input_items
from runtime.server.openai.responses.items import messages_of as messages_of
