"""A pure-PyTorch Llama 2: the model, its tokenizer and chat format, its weights, generation."""

from llama.config import LlamaConfig
from llama.model import Llama
from llama.tokenizer import Tokenizer

__all__ = ["Llama", "LlamaConfig", "Tokenizer"]
