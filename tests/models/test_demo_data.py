"""The generated training data: repeatable, apart from the evaluation, and packed without leaks."""

from itertools import islice, pairwise
from random import Random

import pytest
import torch

from models.demo.evaluate import Examiner
from models.demo.exercises.exercise import IMAGE, Task
from models.demo.exercises.generate_data import BOS, EOS, TASKS, documents
from models.demo.exercises.picture_tasks import describe
from models.demo.exercises.scenes import CELLS, COLORS, Figure, Scene, draw, random_scene
from models.demo.exercises.text_tasks import sort
from models.demo.packing import NOT_LEARNED, Batch, PackedDocuments, normalized
from models.demo.progress import Progress
from models.demo.tower import NOTHING, labels_of
from models.demo.train import answer_loss


def test_a_seed_always_gives_the_same_documents() -> None:
    assert list(islice(documents("7"), 200)) == list(islice(documents("7"), 200))


def test_another_seed_gives_other_documents() -> None:
    assert list(islice(documents("7"), 20)) != list(islice(documents("8"), 20))


def test_every_document_ends_with_an_answer_that_is_learned() -> None:
    assert all(
        document.segments[-1].learned and document.segments[-1].text.endswith(EOS)
        for document in islice(documents("7"), 200)
    )


def test_a_document_has_a_mark_for_each_of_its_scenes() -> None:
    for document in islice(documents("7"), 500):
        assert sum(segment.text.count(IMAGE) for segment in document.segments) == len(document.scenes)


@pytest.mark.parametrize("task", [task for task in TASKS if not task.finite], ids=lambda task: task.name)
def test_training_and_evaluation_share_no_exercise(task: Task) -> None:
    random = Random(1)
    assert not any(task.for_training(random).held_out for _ in range(100))
    assert all(task.for_evaluation(random).held_out for _ in range(20))


def test_sorted_words_are_in_the_order_of_the_alphabet() -> None:
    random = Random(1)
    answers = [sort(random).answer.replace(",", "").split() for _ in range(50)]
    assert all(first < second for words in answers for first, second in pairwise(words))


def test_figures_stand_apart_and_from_left_to_right() -> None:
    random = Random(1)
    pairs = [pair for _ in range(200) for pair in pairwise(random_scene(random).figures)]
    assert all(left.x < right.x and left.is_apart_from(right) for left, right in pairs)


def test_a_figure_has_its_color_where_it_stands() -> None:
    scene = Scene((Figure("red", "star", 20, 40, 8),), background=(255, 255, 255))
    assert draw(scene).getpixel((20, 40)) == COLORS["red"]


def test_a_description_names_the_figures_from_left_to_right() -> None:
    figures = tuple(Figure("red", shape, 8 + 16 * index, 8, 7) for index, shape in enumerate(("circle", "star")))
    assert describe(Random(1), Scene(figures, (255, 255, 255))).answer == "a red circle and a red star"


def test_a_patch_is_labelled_with_the_figure_whose_centre_it_holds() -> None:
    scene = Scene((Figure("red", "star", 20, 40, 8),), background=(255, 255, 255))
    labelled = [patch for patch, label in enumerate(labels_of(scene)) if label != NOTHING]
    assert labelled == [2 * CELLS + 1]


def test_packed_documents_do_not_see_one_another(examiner: Examiner) -> None:
    batch = _first_batch(examiner, batch_tokens=1024)
    with torch.inference_mode():
        packed, alone = answer_loss(examiner.model, batch), _loss_one_by_one(examiner, batch)
    assert packed.item() == pytest.approx(alone, rel=1e-3, abs=1e-6)


def test_only_answers_are_learned(examiner: Examiner) -> None:
    batch = _first_batch(examiner, batch_tokens=512)
    learned = examiner.processor.tokenizer.decode(batch.labels[batch.labels != NOT_LEARNED])
    assert EOS in learned
    assert BOS not in learned
    assert IMAGE not in learned


def test_a_training_ends_with_its_steps() -> None:
    progress = Progress(steps=4, seconds=60)
    assert list(progress.shares()) == pytest.approx([0, 0.25, 0.5, 0.75], abs=0.01)


def test_a_training_ends_with_its_seconds() -> None:
    assert not list(Progress(steps=4, seconds=1e-9).shares())


def _first_batch(examiner: Examiner, batch_tokens: int) -> Batch:
    tokenizer = examiner.processor.tokenizer.backend_tokenizer
    return next(iter(PackedDocuments(tokenizer, seed=1, batch_tokens=batch_tokens)))


def _loss_one_by_one(examiner: Examiner, batch: Batch) -> float:
    """The mean loss of a learned token, every document being run by itself."""
    image, seen, losses, counts = examiner.model.config.image_token_id, 0, [], []
    for ids, labels, numbers in zip(batch.ids, batch.labels, batch.documents, strict=True):
        for number in numbers.unique():
            here = numbers == number
            pictures = int((ids[here] == image).sum()) // 16
            pixels = normalized(batch.pixels[seen : seen + pictures]) if pictures else None
            seen += pictures
            learned = int((labels[here] != NOT_LEARNED).sum())
            if learned:
                loss = examiner.model(input_ids=ids[here][None], pixel_values=pixels, labels=labels[here][None]).loss
                losses.append(loss.item() * learned)
                counts.append(learned)
    return sum(losses) / sum(counts)
