"""Points around centres: data for very many peers."""

import numpy as np
import pytest

from peer.errors import ConfigError
from peer.train.datasets import clusters as module
from peer.train.datasets.clusters import clusters
from peer.train.partition import partition
from peer.train.tasks import resolve_task


def test_a_longer_set_begins_with_the_shorter_one(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 64)
    short, labels = clusters(0, 100, features=5, classes=3, spread=0.5)
    long, more = clusters(0, 300, features=5, classes=3, spread=0.5)
    assert np.array_equal(long[:100], short)
    assert np.array_equal(more[:100], labels)
    assert not np.array_equal(clusters(1, 100, features=5, classes=3, spread=0.5)[0], short)


def test_points_lie_around_the_centres_of_their_class():
    points, labels = clusters(0, 4000, features=6, classes=5, spread=0.0)
    assert points.dtype == np.float32
    for label in range(5):
        assert len(np.unique(points[labels == label], axis=0)) == module.CENTRES_OF_A_CLASS
    spread, same = clusters(0, 4000, features=6, classes=5, spread=0.3)
    assert np.array_equal(same, labels)
    assert (spread - points).std() == pytest.approx(0.3, rel=0.02)
    # All classes are about equally frequent.
    assert np.bincount(labels).min() > 700


def test_the_task_has_about_two_thousand_parameters_and_a_share_for_every_peer():
    task = resolve_task("clusters", {"samples": 4000})
    assert sum(p.numel() for p in task.make_model().parameters()) == 1994
    labels = task.train_data().labels.numpy()
    shares = partition(labels, 200, "skew", seed=0, skew=0.8).train.values()
    assert {len(share) for share in shares} == {20}
    assert all((np.diff(share) > 0).all() for share in shares)
    assert len(task.test_data()) == 2000


@pytest.mark.parametrize("options", [{"spread": -1.0}, {"spread": True}, {"classes": 1}, {"samples": 0}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match="task_options"):
        resolve_task("clusters", options)
