"""From a media item in a request to checked content. Nothing here knows gRPC.

| module | subject |
|---|---|
| loader | `MediaLoader.load`: the one way in; `MediaStore`: what was drawn, written below allowed folders |
| sources/ | where content comes from: `data:`, `file:` and `https:` URIs |
| content | an item as requested, checked content, MIME types; what bytes are before they are decoded |
| image | checking an image |
| config | the limits, and the sources that are allowed |
"""
