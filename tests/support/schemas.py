"""JSON schemas of resources that are not Kubernetes' own, and have no schema to be validated with offline."""


def strictly(required: list[str], **properties: object) -> dict[str, object]:
    """The schema of an object with these properties and no others."""
    return {"type": "object", "additionalProperties": False, "required": required, "properties": properties}
