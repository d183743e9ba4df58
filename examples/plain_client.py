"""A served CLIP image encoder without clip-deploy: plain tritonclient, plain torchvision-style preprocessing.

python plain_client.py 127.0.0.1:8001 cat.jpg
"""

import sys

import numpy as np
import tritonclient.grpc as triton
from PIL import Image

url, path, size = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 224
mean, std = (
    np.float32([0.48145466, 0.4578275, 0.40821073]),
    np.float32([0.26862954, 0.26130258, 0.27577711]),
)

# Resize(size, BICUBIC), CenterCrop(size), ToTensor(), Normalize(mean, std)
image = Image.open(path).convert("RGB")
short, long = sorted(image.size)
long = int(size * long / short)
image = image.resize((long, size) if image.width >= image.height else (size, long), Image.BICUBIC)
left, top = round((image.width - size) / 2), round((image.height - size) / 2)
image = image.crop((left, top, left + size, top + size))
pixels = ((np.asarray(image, np.float32) / 255 - mean) / std).transpose(2, 0, 1)[None]

# A model exported with --pixels uint8 normalises in its graph; this client, which normalises, is then refused.
tensor = triton.InferInput("pixel_values", list(pixels.shape), "FP32")
tensor.set_data_from_numpy(np.ascontiguousarray(pixels))
with triton.InferenceServerClient(url) as client:
    embedding = client.infer("clip_image_encoder", [tensor]).as_numpy("image_embeds")
print(
    f"image_embeds {embedding.shape}, length {np.linalg.norm(embedding):.4f}: {embedding[0, :4]} …"
)
