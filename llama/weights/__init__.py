"""Weights from and to Hugging Face's and Meta's files, for plain models and for sharded ones.

Loading, a rank reads the rows it holds and no others; saving, it writes them into its place in the
files, beside the other ranks. No matrix is gathered, so no rank ever holds more than its shard and
one tensor. `python -m llama.weights convert` brings a folder of one kind into the other.

What is where: `names` (what a parameter is called, how Meta orders rows), `transfer` (between model
and files), `hf` and `header` (safetensors), `meta`, `consolidated` and `archive` (Meta's files,
written and read, and the zip format below them), `peft` (LoRA adapters alone), `stored` (a folder's
type and fingerprint), `ranges` (bytes of files), `publish` (whole or not at all), `convert`.
"""

from llama.weights.hf import load_hf, save_hf
from llama.weights.meta import load_meta, save_meta
from llama.weights.names import hf_name
from llama.weights.peft import load_peft, save_peft
from llama.weights.stored import fingerprint, stored_dtype

__all__ = [
    "fingerprint",
    "hf_name",
    "load_hf",
    "load_meta",
    "load_peft",
    "save_hf",
    "save_meta",
    "save_peft",
    "stored_dtype",
]
