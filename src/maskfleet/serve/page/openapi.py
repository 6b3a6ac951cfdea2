"""The API in OpenAPI 3.1, for programs, and as a short page for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from maskfleet import __version__
from maskfleet.serve.app import JSON, MAX_BODY_BYTES
from maskfleet.serve.detection import IMAGE_TYPES, MAX_IMAGES, MAX_REQUEST_MPX

_WHOLE, _NUMBER, _TEXT = {"type": "integer"}, {"type": "number"}, {"type": "string"}
_BASE64 = {"type": "string", "description": "A JPEG, PNG, WebP, BMP, GIF or TIFF file in base64."}
_BYTES = {"type": "string", "format": "binary"}


def _object(properties: dict[str, Any], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _list_of(items: dict[str, Any], **limits: int) -> dict[str, Any]:
    return {"type": "array", "items": items, **limits}


def _named(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


_SCHEMAS: dict[str, Any] = {
    "Error": _object({"error": _TEXT, "remedy": _TEXT}),
    "Mask": _object({"size": _list_of(_WHOLE, minItems=2, maxItems=2), "counts": _TEXT})
    | {"description": "COCO's compressed run lengths; size is height and width."},
    "Detection": _object(
        {
            "category_id": _WHOLE,
            "category_name": _TEXT,
            "score": _NUMBER | {"minimum": 0, "maximum": 1},
            "bbox": _list_of(_NUMBER, minItems=4, maxItems=4) | {"description": "x, y, width, height in pixels."},
            "segmentation": _named("Mask"),
        },
        optional=("segmentation",),
    )
    | {"additionalProperties": True},
    "Detections": _object({"height": _WHOLE, "width": _WHOLE, "detections": _list_of(_named("Detection"))}),
    "Model": _object(
        {
            "source": _TEXT,
            "device": _TEXT,
            "version": _TEXT,
            "classes": _list_of(_object({"id": _WHOLE, "name": _TEXT, "color": _TEXT})),
            "has_masks": {"type": "boolean"},
            "default_score": _NUMBER,
            "limits": _object({"bytes": _WHOLE, "megapixels": _NUMBER, "images": _WHOLE}),
            "images": {"anyOf": [_object({"name": _TEXT, "count": _WHOLE}), {"type": "null"}]},
        }
    ),
    "Images": _object(
        {
            "total": _WHOLE,
            "images": _list_of(_object({"id": _WHOLE, "file_name": _TEXT, "width": _WHOLE, "height": _WHOLE})),
        }
    ),
    "Ping": _object({"status": _TEXT, "model": _TEXT}),
}


def _answer(what: str, kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": what, "content": {kind: {"schema": schema}}}


def _operation(
    summary: str, answer: dict[str, Any], *, parameters: tuple[dict[str, Any], ...] = (), body: Any = None
) -> dict[str, Any]:
    errors = _answer("The request cannot be answered: what is wrong, and what to do.", JSON, _named("Error"))
    operation: dict[str, Any] = {"summary": summary, "responses": {"200": answer, "4XX": errors, "503": errors}}
    if parameters:
        operation["parameters"] = list(parameters)
    if body is not None:
        operation["requestBody"] = body
    return operation


def _parameter(name: str, schema: dict[str, Any], what: str, *, required: bool = False) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": required, "schema": schema, "description": what}


_ID = _parameter("id", _WHOLE, "Id of an image of the validation set.", required=True)
_SCORE = _parameter("score", {"type": "number", "minimum": 0, "maximum": 1}, "Objects must score above this.")


def _image_body(*, batch: bool) -> dict[str, Any]:
    score = {"score": _SCORE["schema"]}
    one = _object({"image": _BASE64, **score}, optional=("score",))
    several = _list_of(_BASE64, minItems=1, maxItems=MAX_IMAGES)
    forms = [one, _object({"images": several, **score}, optional=("score",)), several] if batch else [one]
    encoded = {kind: {"schema": _BYTES} for kind in IMAGE_TYPES}
    return {"required": True, "content": {**encoded, JSON: {"schema": {"anyOf": forms}}}}


def description() -> dict[str, Any]:
    """The OpenAPI document."""
    found = {"anyOf": [_named("Detections"), _list_of(_named("Detections"))]}
    detect = _operation(
        "The objects in an image, or in each image of a list.",
        _answer("Objects by descending score; a list if images was a list.", JSON, found),
        parameters=(_SCORE,),
        body=_image_body(batch=True),
    )
    detected = _answer("Objects by descending score.", JSON, _named("Detections"))
    drawn, picture = _answer("A PNG.", "image/png", _BYTES), _answer("A small JPEG.", "image/jpeg", _BYTES)
    shown = {"description": "A JPEG or PNG.", "content": {kind: {"schema": _BYTES} for kind in IMAGE_TYPES[:2]}}
    some = (_parameter("start", _WHOLE, "Number of the first one, from 0."), _parameter("count", _WHOLE, "How many."))
    draw = _operation("The image with boxes and masks.", drawn, parameters=(_SCORE,), body=_image_body(batch=False))
    paths = {
        "/detect": {"post": detect},
        "/draw": {"post": draw},
        "/model": {"get": _operation("The model, its classes and the limits.", _answer("", JSON, _named("Model")))},
        "/images": {
            "get": _operation("Images of the validation set.", _answer("", JSON, _named("Images")), parameters=some)
        },
        "/image": {"get": _operation("One of them.", shown, parameters=(_ID,))},
        "/thumbnail": {"get": _operation("One of them, small.", picture, parameters=(_ID,))},
        "/detect-image": {"post": _operation("The objects in one of them.", detected, parameters=(_ID, _SCORE))},
        "/ping": {"get": _operation("Whether the model answers.", _answer("It does.", JSON, _named("Ping")))},
        "/invocations": {"post": detect | {"summary": "The same as /detect, under SageMaker's name."}},
        "/openapi.json": {"get": _operation("This description.", _answer("", JSON, {"type": "object"}))},
    }
    limits = f"At most {MAX_BODY_BYTES // 10**6} MB and {MAX_REQUEST_MPX:g} million pixels in one request."
    info = {"title": "maskfleet serve", "version": __version__, "description": limits}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": _SCHEMAS}}


def description_page() -> str:
    """The same for people."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "static"), autoescape=True, undefined=StrictUndefined
    )
    operations = [
        {"method": method.upper(), "path": path, "parameters": [], **operation}
        for path, methods in description()["paths"].items()
        for method, operation in methods.items()
    ]
    return environment.get_template("api.html.jinja").render(operations=operations, info=description()["info"])
