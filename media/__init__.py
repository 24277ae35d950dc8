"""From a media item in a request to checked content. Nothing here knows gRPC.

| module | subject |
|---|---|
| loader | `MediaLoader.load`: the one way in |
| item, mime | an item as requested, checked content; MIME types |
| sources/ | where content comes from: `data:`, `file:` and `https:` URIs |
| image, content | checking an image; what bytes are before they are decoded |
| config | the limits, and the sources that are allowed |
"""
