"""An index of pictures: found by likeness (vectors), by words (captions), or by both.

from clip_deploy.indexes import open_index
"""

from clip_deploy.indexes.engines import ENGINES, open_index
from clip_deploy.indexes.port import Hit, Index, IndexIdentity, IndexStats, Item

__all__ = ["ENGINES", "Hit", "Index", "IndexIdentity", "IndexStats", "Item", "open_index"]
