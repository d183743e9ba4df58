"""The design that this product replaces: the web process holds the model and runs one picture at a time.

    python benchmarks/old_design.py MODEL PORT

``POST /embed`` with a picture as body → its embedding; nothing else is answered meanwhile.
"""

from __future__ import annotations

import io
import sys

import open_clip
import torch
import uvicorn
from fastapi import FastAPI, Request
from PIL import Image

model, _, preprocess = open_clip.create_model_and_transforms(sys.argv[1])
model.eval()
app = FastAPI()


@app.post("/embed")
async def embed(request: Request) -> list[float]:
    picture = Image.open(io.BytesIO(await request.body())).convert("RGB")
    with torch.inference_mode():
        embedding = model.encode_image(preprocess(picture).unsqueeze(0))
    return torch.nn.functional.normalize(embedding, dim=-1)[0].tolist()


uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="error")
