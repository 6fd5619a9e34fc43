"""Text generation: token ids, answers as text, and a chat, on a plain model or a sharded one.

`python -m llama.generate --model DIR` is the chat. What is where: `decode` (the loop that appends
tokens), `stream` (their text as they come), `conversation` (the history, and what of it fits),
`reply` (answers as text, and their settings), `chat` (the loop with a person), `together` (ranks
that wait for that person), `load` (a model from its folder).
"""

from llama.generate.chat import Terminal, converse
from llama.generate.conversation import Conversation
from llama.generate.decode import generate
from llama.generate.load import load
from llama.generate.reply import Replier, Settings, answer_all
from llama.generate.stream import TextStream

__all__ = [
    "Conversation",
    "Replier",
    "Settings",
    "Terminal",
    "TextStream",
    "answer_all",
    "converse",
    "generate",
    "load",
]
