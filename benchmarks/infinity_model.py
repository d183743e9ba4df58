"""ViT-B/32 with random weights as infinity-emb reads it: a folder in Hugging Face's layout; for peers.py, offline.

python infinity_model.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

folder = Path(sys.argv[1])
folder.mkdir(parents=True)
# infinity-emb embeds pictures here, so the vocabulary may be small: it only has to load.
words = [*map(chr, range(33, 127)), *(f"{chr(c)}</w>" for c in range(33, 127))]
vocabulary = {word: i for i, word in enumerate([*words, "<|startoftext|>", "<|endoftext|>"])}
(folder / "vocab.json").write_text(json.dumps(vocabulary))
(folder / "merges.txt").write_text("#version: 0.2\n")
tokenizer = CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
CLIPProcessor(CLIPImageProcessor(), tokenizer).save_pretrained(folder)
CLIPModel(CLIPConfig()).eval().save_pretrained(folder)
