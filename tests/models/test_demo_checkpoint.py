"""The demonstration checkpoint: its size, its formats, and its answers."""

from pathlib import Path
from random import Random

import pytest
import torch
from jinja2 import TemplateError
from PIL import Image, ImageDraw
from safetensors import safe_open
from transformers import AutoTokenizer, LlavaForConditionalGeneration

from models.demo.draw_examples import EXAMPLES, SCENES, example
from models.demo.evaluate import Examiner
from models.demo.exercises.exercise import IMAGE, Exercise, Task
from models.demo.exercises.generate_data import EOS, TASKS, chat_prompt, raw_prompt
from models.demo.exercises.scenes import draw, random_scene
from models.demo.exercises.text_tasks import story
from models.demo.packing import PATCHES, normalized, pixels_of

DEMO = Path(__file__).parents[2] / "models" / "demo"
LARGEST_BYTES = 8_000_000

STORY = (
    "Mia lived near the forest. One day Mia met a fox. The fox was clever and very hungry, so Mia gave it some "
    'berries. "Thank you," said the fox. Then they played together until the sun went down. "Come back soon," said '
    "Mia. After that day, Mia and the fox were good friends. Every morning they shared some berries and walked "
    "to the forest. The end."
)


def answer(examiner: Examiner, prompt: str, *pictures: Image.Image) -> str:
    """Greedy text of a prompt as it is, up to the token that ends it."""
    inputs = examiner.processor(text=prompt, images=list(pictures) or None, return_tensors="pt")
    ids = examiner.model.generate(**inputs, max_new_tokens=120)[0, inputs.input_ids.shape[1] :]
    text: str = examiner.processor.decode(ids)
    assert text.endswith(EOS)
    return text.removesuffix(EOS)


def test_the_folder_has_at_most_eight_megabytes() -> None:
    assert sum(file.stat().st_size for file in DEMO.rglob("*") if file.suffix != ".pyc") <= LARGEST_BYTES


def test_every_weight_is_stored_in_bfloat16() -> None:
    with safe_open(DEMO / "model.safetensors", framework="pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_weights_are_stored_under_names_that_every_supported_library_reads() -> None:
    with safe_open(DEMO / "model.safetensors", framework="pt") as weights:
        parts = {".".join(name.split(".")[:2]) for name in weights.keys()}  # noqa: SIM118
    assert parts == {
        "language_model.model",
        "language_model.lm_head",
        "vision_tower.vision_model",
        "multi_modal_projector.linear_1",
        "multi_modal_projector.linear_2",
    }


def test_the_file_has_exactly_the_weights_of_the_model() -> None:
    _, loading = LlavaForConditionalGeneration.from_pretrained(DEMO, output_loading_info=True)
    assert not any(loading.values())


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Sort: pear apple mango", "apple mango pear"),
        ("Repeat: pear apple", "pear apple"),
        ("Reverse: kite drum lamp", "lamp drum kite"),
        ("Add: 23 + 48", "71"),
        ("What day comes after Monday?", "Tuesday"),
        ("What month comes before March?", "February"),
        ("Mia has a kite. Tom has a drum. What does Mia have?", "a kite"),
        ("What is your name?", "My name is Baton."),
        ("Tell a story about Mia and a fox.", STORY),
    ],
)
def test_a_prompt_as_typed_is_answered_alone_and_in_a_chat(examiner: Examiner, prompt: str, expected: str) -> None:
    chat = examiner.processor.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)
    in_chat = next(examiner.answers([Exercise(prompt, expected)], lambda _: chat))
    assert (answer(examiner, prompt), in_chat) == (expected, expected + EOS)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_held_out_exercises_are_answered_exactly(examiner: Examiner, task: Task) -> None:
    random = Random(f"test/{task.name}")
    exercises = [task.for_evaluation(random) for _ in range(3)]
    assert list(examiner.answers(exercises, raw_prompt)) == [exercise.answer + EOS for exercise in exercises]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("circle-and-square.png", "a red circle and a blue square"),
        ("four-shapes.png", "a yellow star, a green triangle, a purple circle and a black star"),
    ],
)
def test_the_example_pictures_are_described(examiner: Examiner, name: str, expected: str) -> None:
    assert answer(examiner, f"{IMAGE}\nWhat is in the picture?", Image.open(EXAMPLES / name)) == expected


def test_shapes_drawn_by_other_means_are_described(examiner: Examiner) -> None:
    picture = Image.new("RGB", (600, 400), "white")
    pen = ImageDraw.Draw(picture)
    pen.ellipse((60, 60, 160, 160), fill="purple")
    pen.rectangle((400, 200, 500, 300), fill=(0, 255, 0))
    assert answer(examiner, f"{IMAGE}\nWhat is in the picture?", picture) == "a purple circle and a green square"


@pytest.mark.parametrize("name", SCENES)
def test_the_example_files_are_what_their_script_draws(name: str) -> None:
    drawn, stored = example(name).convert("RGB"), Image.open(EXAMPLES / name).convert("RGB")
    assert drawn.tobytes() == stored.tobytes()


def test_a_conversation_can_go_on_about_its_picture(examiner: Examiner) -> None:
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is in the picture?"}]},
        {"role": "assistant", "content": "a red circle and a blue square"},
        {"role": "user", "content": "What shape is blue?"},
    ]
    prompt = examiner.processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = examiner.processor(
        text=prompt, images=example("circle-and-square.png"), add_special_tokens=False, return_tensors="pt"
    )
    ids = examiner.model.generate(**inputs, max_new_tokens=10)[0, inputs.input_ids.shape[1] :]
    assert examiner.processor.decode(ids) == f"square{EOS}"


def test_logits_are_finite_to_the_end_of_the_context(examiner: Examiner) -> None:
    context = examiner.model.config.text_config.max_position_embeddings
    ids = torch.randint(7, 768, (1, context), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert bool(examiner.model(input_ids=ids).logits.isfinite().all())


def test_the_chat_template_writes_what_training_has_seen(examiner: Examiner) -> None:
    exercise = story(Random(1))
    messages = [{"role": "user", "content": exercise.prompt}]
    rendered = examiner.processor.apply_chat_template(messages, add_generation_prompt=True)
    assert rendered == chat_prompt(exercise)


def test_the_chat_template_ends_each_answer_and_puts_a_picture_before_its_text(examiner: Examiner) -> None:
    messages = [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]},
        {"role": "assistant", "content": "2"},
    ]
    assert examiner.processor.apply_chat_template(messages) == (
        "<|bos|><|system|>Answer briefly.<|user|><image>\nHow many?<|assistant|>2<|eos|>"
    )


def test_the_chat_template_refuses_a_role_that_it_does_not_know(examiner: Examiner) -> None:
    with pytest.raises(TemplateError, match="not tool"):
        examiner.processor.apply_chat_template([{"role": "tool", "content": "71"}])


@pytest.mark.parametrize("text", ["Sort: pear apple mango", "Straße, naïve café — 東京 🎈\n\tend ", "1234 + 5"])
def test_text_comes_back_from_its_tokens(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


def test_each_digit_is_a_token() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    assert tokenizer.tokenize("2048") == ["2", "0", "4", "8"]


def test_the_tokenizer_begins_every_prompt_with_the_first_token_of_training() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    assert tokenizer("Hello").input_ids[0] == tokenizer.bos_token_id


def test_a_picture_takes_one_token_a_patch(examiner: Examiner) -> None:
    inputs = examiner.processor(text=f"{IMAGE}\nWhat?", images=example("four-shapes.png"), return_tensors="pt")
    assert inputs.input_ids[0].tolist().count(examiner.model.config.image_token_id) == PATCHES


def test_training_sees_the_pixels_that_the_processor_makes(examiner: Examiner) -> None:
    scene = random_scene(Random(3))
    processed = examiner.processor.image_processor(draw(scene), return_tensors="pt").pixel_values
    assert torch.equal(processed, normalized(pixels_of([scene])))
