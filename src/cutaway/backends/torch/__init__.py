"""The torch backend. Importing this package comes before torch itself does."""

import os

# oneDNN keeps a compiled kernel for each shape that it has seen, a thousand by default, in two caches. Batch sizes and contexts
# change all the time, so most are never used again: 120 MB after a few minutes of traffic, for no measurable speed.
for _cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, "32")
