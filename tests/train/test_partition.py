"""Every device computes the same split alone; every sample belongs to one peer; no peer is left without."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.errors import ConfigError, DataError
from peer.train.partition import _dirichlet, own_samples, partition

KINDS = ("by-label", "dirichlet", "iid", "shards", "skew")
DIGITS = np.arange(2000) % 10


def histogram_of(manifest, labels):
    """Return int64[peers, classes]: how many training samples of each label every peer holds."""
    classes, dense = np.unique(labels, return_inverse=True)
    return np.stack([np.bincount(dense[part], minlength=classes.size) for part in manifest.train.values()])


@st.composite
def splits(draw):
    labels = np.array(draw(st.lists(st.integers(-3, 6), min_size=1, max_size=200)))
    return labels, {
        "num_peers": draw(st.integers(1, 20)),
        "kind": draw(st.sampled_from(KINDS)),
        "seed": draw(st.integers(0, 2**63 - 1)),
        "skew": draw(st.floats(0, 1)),
        "alpha": draw(st.floats(1e-4, 100)),
        "labels_per_peer": draw(st.integers(1, 10)),
        "holdout_fraction": draw(st.sampled_from([0.0, 0.01, 0.2, 0.99])),
    }


@settings(max_examples=300, deadline=None)
@given(splits())
def test_every_sample_is_used_once_and_no_peer_is_empty_or_the_error_names_the_key(split):
    labels, request = split
    try:
        manifest = partition(labels, **request)
    except ConfigError as error:
        refused = error
    else:
        refused = None
    if refused is not None:
        assert refused.key in {"peers", "data.labels_per_peer", "data.holdout_fraction"}
        assert refused.valid is not None
        return
    assert manifest.num_samples == labels.size
    used = np.concatenate([*manifest.train.values(), *manifest.holdout.values()])
    assert sorted(used.tolist()) == list(range(labels.size))
    assert all(part.size for part in manifest.train.values())
    if request["holdout_fraction"] > 0:
        assert all(part.size for part in manifest.holdout.values())
    assert histogram_of(manifest, labels).sum() == sum(part.size for part in manifest.train.values())


@settings(max_examples=60, deadline=None)
@given(splits())
def test_the_same_inputs_give_the_same_split(split):
    labels, request = split
    try:
        once = partition(labels, **request)
    except ConfigError:
        return
    again = partition(labels.astype(np.int32).tolist(), **request)
    assert once.num_samples == again.num_samples
    for one, other in ((once.train, again.train), (once.holdout, again.holdout)):
        assert all(map(np.array_equal, one.values(), other.values()))


@pytest.mark.parametrize(
    ("kind", "digest"),
    [
        ("skew", "be21b85b8fc33543b8a51a51c98dc96e544b881fcbb44d8977309c1966c5c91f"),
        ("dirichlet", "95fa7fd9c5ede03c5ce77338b2b3e4a46b66f0821d38d9a91f50dd885e279b39"),
        ("shards", "f4efa5f8717c86fe08cb15881b716c0989092d5a25c257e5d9fd6a705b52f119"),
        ("iid", "30b9b5256300db04858b745f189ab6aaea24f5cd9597dfc9715c04ca51b0921c"),
    ],
)
def test_splits_stay_what_they_were_in_earlier_versions(kind, digest):
    # A changed digest means that devices with different versions would train on overlapping data.
    manifest = partition(DIGITS, 8, kind, seed=3, holdout_fraction=0.1)
    hasher = hashlib.sha256(b"sottovoce partition 1\n")
    hasher.update(hashlib.sha256(DIGITS.astype("<i8").tobytes()).digest())
    hasher.update(np.array([manifest.num_samples, len(manifest.train)], dtype="<i8").tobytes())
    for part in (*manifest.train.values(), *manifest.holdout.values()):
        hasher.update(np.array([part.size], dtype="<i8").tobytes())
        hasher.update(part.astype("<i8").tobytes())
    assert hasher.hexdigest() == digest


@pytest.mark.parametrize("kind", ["dirichlet", "iid", "shards", "skew"])
def test_another_seed_gives_another_split(kind):
    one, other = (partition(DIGITS, 8, kind, seed=seed) for seed in (1, 2))
    assert not all(map(np.array_equal, one.train.values(), other.train.values()))


def test_skew_1_deals_consecutive_blocks_of_the_sorted_labels():
    histogram = histogram_of(partition(DIGITS, 10, "skew", seed=0, skew=1.0), DIGITS)
    assert np.array_equal(histogram, 200 * np.eye(10, dtype=int))


def test_skew_0_8_deals_the_papers_example():
    """100 examples of 10 classes, 4 nodes: the first 20 of the 80 sorted ones go to node 1, the next 20 to node 2."""
    labels = np.repeat(np.arange(10), 10)[np.random.Generator(np.random.Philox(1)).permutation(100)]
    histogram = histogram_of(partition(labels, 4, "skew", seed=5, skew=0.8), labels)
    at_least = np.zeros((4, 10), dtype=int)
    for place in range(80):
        at_least[place // 20, place // 8] += 1
    assert (histogram >= at_least).all()
    assert histogram.sum(axis=1).tolist() == [25, 25, 25, 25]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=20, max_size=200),
    st.integers(1, 20),
    st.floats(0, 1),
)
def test_peers_of_a_skewed_split_have_equal_sizes(labels, num_peers, skew):
    sizes = [part.size for part in partition(labels, num_peers, "skew", seed=0, skew=skew).train.values()]
    assert max(sizes) - min(sizes) <= 1


def test_an_iid_split_spreads_every_label():
    histogram = histogram_of(partition(DIGITS, 8, "iid", seed=0), DIGITS)
    # 200 samples of a label on 8 peers: 25 each, standard deviation 4.7.
    assert 5 <= histogram.min() <= histogram.max() <= 50


def test_a_shard_holds_exactly_the_asked_number_of_labels():
    for labels_per_peer in (2, 3, 10):
        histogram = histogram_of(partition(DIGITS, 8, "shards", seed=0, labels_per_peer=labels_per_peer), DIGITS)
        assert ((histogram > 0).sum(axis=1) == labels_per_peer).all()
        holders = (histogram > 0).sum(axis=0)
        assert holders.max() - holders.min() <= 1


def test_dirichlet_proportions_have_the_mean_and_variance_of_the_distribution():
    for alpha in (0.05, 0.5, 1.0, 20.0):
        shares = _dirichlet(alpha, 40_000, 4, seed=11)
        assert np.allclose(shares.sum(axis=1), 1)
        variance = 0.25 * 0.75 / (4 * alpha + 1)
        assert np.allclose(shares.mean(axis=0), 0.25, atol=5 * np.sqrt(variance / 40_000))
        assert np.allclose(shares.var(axis=0), variance, rtol=0.05)


def test_a_tiny_alpha_gives_each_class_to_one_peer_and_still_leaves_no_peer_empty():
    manifest = partition(DIGITS, 50, "dirichlet", seed=0, alpha=1e-4, holdout_fraction=0.1)
    assert min(part.size for part in manifest.train.values()) == 1
    # Ten classes go whole to ten peers, but for the two samples that each of the others is given.
    assert np.sort([part.size for part in manifest.train.values()])[-10:].sum() > 1600
    assert min(part.size for part in manifest.holdout.values()) == 1


def test_a_hold_out_takes_the_asked_fraction_from_each_peer():
    manifest = partition(DIGITS, 8, "skew", seed=0, holdout_fraction=0.2)
    assert [part.size for part in manifest.holdout.values()] == [50] * 8
    without = partition(DIGITS, 8, "skew", seed=0)
    for peer in range(8):
        both = np.concatenate([manifest.train[peer], manifest.holdout[peer]])
        assert np.array_equal(np.sort(both), without.train[peer])


@pytest.mark.parametrize(
    ("arguments", "key", "says"),
    [
        ({"num_peers": 0, "kind": "iid"}, "peers", "at least one peer"),
        ({"num_peers": 2001, "kind": "iid"}, "peers", "without leaving one empty"),
        (
            {"num_peers": 4, "kind": "shards", "labels_per_peer": 2},
            "data.labels_per_peer",
            "cannot cover all 10 labels",
        ),
        ({"num_peers": 8, "kind": "shards", "labels_per_peer": 11}, "data.labels_per_peer", "10 different labels"),
        ({"num_peers": 1500, "kind": "shards", "labels_per_peer": 9}, "data.labels_per_peer", "has 200 samples"),
        ({"num_peers": 2000, "kind": "iid", "holdout_fraction": 0.1}, "data.holdout_fraction", "only one sample"),
    ],
)
def test_settings_without_a_split_are_refused_with_their_key(arguments, key, says):
    with pytest.raises(ConfigError, match=says) as caught:
        partition(DIGITS, **{"seed": 0, **arguments})
    assert caught.value.key == key


@pytest.mark.parametrize("labels", [[], [0.5, 1.0], [[1, 2]], ["a"], 3])
def test_labels_that_are_no_list_of_integers_are_refused(labels):
    with pytest.raises(DataError, match="list of at least one integer"):
        partition(labels, 1, "iid", seed=0)


def test_own_samples_are_all_of_them_but_what_the_peer_holds_out():
    everything = own_samples(DIGITS, 5, seed=1)
    assert np.array_equal(everything.train[5], np.arange(2000))
    assert everything.holdout[5].size == 0
    part = own_samples(DIGITS, 5, seed=1, holdout_fraction=0.1)
    assert part.holdout[5].size == 200
    assert np.array_equal(np.sort(np.concatenate([part.train[5], part.holdout[5]])), np.arange(2000))
    assert not np.array_equal(part.holdout[5], own_samples(DIGITS, 4, seed=1, holdout_fraction=0.1).holdout[4])
    assert set(part.train) == set(part.holdout) == {5}


def test_one_own_sample_cannot_be_trained_on_and_held_out():
    assert own_samples([3], 0, seed=1).train[0].tolist() == [0]
    with pytest.raises(ConfigError, match="peer 0 has only one sample"):
        own_samples([3], 0, seed=1, holdout_fraction=0.1)
    with pytest.raises(DataError, match="labels must be a list"):
        own_samples(np.empty(0, np.int64), 0, seed=1)


def test_each_label_is_one_peers_or_shared_by_peers_of_its_own():
    labels = np.repeat(np.arange(5), [10, 20, 30, 40, 7])
    of = [set(labels[part].tolist()) for part in partition(labels, 3, "by-label", seed=1).train.values()]
    assert of == [{0, 3}, {1, 4}, {2}]
    shared = partition(labels[labels < 2], 5, "by-label", seed=1)
    assert [set(labels[part].tolist()) for part in shared.train.values()] == [{0}, {1}, {0}, {1}, {0}]
    assert [len(part) for part in shared.train.values()] == [4, 10, 3, 10, 3]
    with pytest.raises(ConfigError, match="a label has fewer samples than it has peers"):
        partition(np.array([0, 1, 1]), 3, "by-label", seed=1)
