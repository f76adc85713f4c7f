"""Augmentation: each sample's draws are its own, whatever the rows, the repetition or the global generator."""

import numpy as np
import pytest
import torch
from conftest import make_classifier

import classification
from augmentation import Augmentation, crop_at

IMAGES = torch.randint(256, (6, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
ALL = slice(None)


@pytest.mark.parametrize("randaugment", [False, True])
def test_rows_are_slices_of_the_whole(randaugment):
    augment = Augmentation(flip=True, crop=2, randaugment=randaugment, seed=3)
    whole = augment(IMAGES, 1, 5, 6, ALL)
    assert whole.dtype == torch.uint8 and whole.shape == IMAGES.shape and not torch.equal(whole, IMAGES)
    parts = [augment(IMAGES[rows], 1, 5, 6, rows) for rows in (slice(0, 4), slice(4, 6))]
    assert torch.equal(torch.cat(parts), whole)


def test_draws_belong_to_block_step_and_view():
    def draw(block, step, view):
        return Augmentation(flip=True, crop=2, randaugment=True, seed=0, view=view)(IMAGES, block, step, 6, ALL)

    usual = draw(0, 0, 0)
    assert torch.equal(usual, draw(0, 0, 0))
    assert all(not torch.equal(usual, draw(*other)) for other in ((1, 0, 0), (0, 1, 0), (0, 0, 1)))


def test_the_global_generator_is_left_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = Augmentation(flip=False, crop=0, randaugment=True, seed=0)(IMAGES, 0, 0, 6, ALL)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(one, Augmentation(flip=False, crop=0, randaugment=True, seed=0)(IMAGES, 0, 0, 6, ALL))


def test_nothing_asked_changes_nothing():
    assert torch.equal(Augmentation(flip=False, crop=0, randaugment=False, seed=0)(IMAGES, 0, 0, 6, ALL), IMAGES)


def test_crop_moves_the_image_and_fills_with_black():
    image = torch.arange(1, 10, dtype=torch.uint8).reshape(1, 1, 3, 3)
    cut = [crop_at(image, torch.tensor([shift]), 1)[0, 0].tolist() for shift in ([1, 1], [0, 0], [2, 1])]
    assert cut == [
        [[1, 2, 3], [4, 5, 6], [7, 8, 9]],
        [[0, 0, 0], [0, 1, 2], [0, 4, 5]],
        [[4, 5, 6], [7, 8, 9], [0, 0, 0]],
    ]


def test_flips_and_crops_have_their_rates():
    image = torch.tensor([[0, 1]], dtype=torch.uint8).expand(4000, 1, 1, 2)
    flipped = Augmentation(flip=True, crop=0, randaugment=False, seed=0)(image, 0, 0, 4000, ALL)
    assert flipped[:, 0, 0, 0].double().mean() == pytest.approx(0.5, abs=0.03)
    one = torch.ones(4000, 1, 1, 1, dtype=torch.uint8)
    kept = Augmentation(flip=False, crop=1, randaugment=False, seed=0)(one, 0, 0, 4000, ALL)
    assert kept.double().mean() == pytest.approx(1 / 9, abs=0.02)


def test_batches_are_augmented_by_step(cache):
    config = make_classifier(data={"cache": str(cache)})
    source = classification.source(config, classification.load(config), torch.device("cpu"))
    x, labels = source.batch(1, 2, 8)
    again, _ = source.batch(1, 2, 8, slice(3, 6))
    assert torch.equal(x[3:6], again) and labels.shape == (8,)


def test_two_views_of_the_same_images(cache):
    config = make_classifier("forward_forward", data={"cache": str(cache)})
    data = classification.load(config)
    source = classification.source(config, data, torch.device("cpu"))
    views, labels = source.batch(0, 0, 8)
    assert views.shape == (16, 1, 8, 8) and labels.shape == (8,)
    assert not torch.equal(views[:8], views[8:])
    plain = classification.source(make_classifier("forward_forward", data={"cache": str(cache), "crop": 0}), data, "cpu")
    views, labels = plain.batch(0, 0, 8)
    assert torch.equal(views[:8], views[8:])  # the same images in the same order: digits have nothing else to draw
    assert np.array_equal(labels, plain.batch(0, 0, 8)[1])
    assert plain.batch(1, 0, 8)[0].shape == (8, 1, 8, 8)  # the read-out sees one view
