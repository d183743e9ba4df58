"""What a person gives (a photograph, a sentence) → what an encoder reads (pixels, token ids); never torch.

Below ``export`` and ``client`` on purpose: the exporter holds these functions against open_clip's own before it writes
a manifest, and the client then uses the very same ones.
"""
